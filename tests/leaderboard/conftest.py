"""Honest runs, played once, and a forger who edits copies of them and covers the traces."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agentbench_kv.leaderboard import pack
from agentbench_kv.leaderboard.evidence import MANIFEST, hashes
from agentbench_kv.results.run_names import prefix_parts, run_id
from agentbench_kv.results.run_reader import RunReader
from agentbench_kv.results.summary import summarize
from agentbench_kv.run.runner import run_one
from agentbench_kv.run.spec import RunSpec, resolve

SUBJECT = "rkv"
"""The run that is forged: it has sessions that succeed and sessions that fail."""


def make_spec(method: str = "full", budget: int | str | None = None, **changes: Any) -> RunSpec:
    settings = changes.pop("settings", {})
    values = {"engine": "embedded", "model": "micro", "task": "micro/recall-1k", "limit": 4}
    return resolve(RunSpec(method=method, budget=budget, **{**values, **changes}), settings)


def play(spec: RunSpec, root: Path) -> Path:
    return root / run_one(spec, root, lambda *_: None).run_id


@pytest.fixture(scope="session")
def honest(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs by a short name; never written to."""
    root = tmp_path_factory.mktemp("honest")
    scripted = {"engine": "scripted", "limit": 3}
    specs = {
        "rkv": make_spec("rkv", 384),
        "agentkv": make_spec("agentkv", 256, settings={"interval": "64"}),
        "full": make_spec(),
        "small": make_spec("agentkv", 256, settings={"interval": "64"}, limit=1),
        "gold": make_spec(model="gold", **scripted),
        "twice": make_spec(model="corrupt", trials=2, **scripted),
        "calibrated": make_spec("triattention", 384, limit=1),
    }
    return {name: play(spec, root) for name, spec in specs.items()}


@dataclass
class Forger:
    """Edits one run of a submission, then mends hashes and summary as a forger would."""

    folder: Path
    run: Path

    def info(self, change: Callable[[dict[str, Any]], Any]) -> None:
        self.json("run.json", change)

    def json(self, name: str, change: Callable[[Any], Any]) -> None:
        path = self.run / name
        document = json.loads(path.read_text())
        change(document)
        path.write_text(json.dumps(document))

    def lines(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run / name).read_text().splitlines()]

    def write(self, name: str, rows: list[dict[str, Any]]) -> None:
        (self.run / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    def trials(self, change: Callable[[dict[str, Any]], Any]) -> None:
        self._each("samples.jsonl", change)

    def turns(self, change: Callable[[dict[str, Any]], Any]) -> None:
        self._each("turns.jsonl", change)

    def transcripts(self, change: Callable[[dict[str, Any]], Any]) -> None:
        for path in sorted((self.run / "transcripts").glob("*.json")):
            self.json(f"transcripts/{path.name}", change)

    def cover(self, *, rename: bool = False) -> Path:
        """Make hashes and summary fit; with `rename` the run's id, too."""
        if rename:
            self._rename()
        with contextlib.suppress(Exception):
            summarize(RunReader(self.run))
        manifest = json.loads((self.folder / MANIFEST).read_text())
        manifest["runs"] = [{"run_id": self.run.name, "sha256": hashes(self.run)}]
        (self.folder / MANIFEST).write_text(json.dumps(manifest))
        return self.folder

    def _rename(self) -> None:
        spec = json.loads((self.run / "run.json").read_text())["spec"]
        name = run_id(prefix_parts(spec), spec)
        self.info(lambda info: info.update(run_id=name))
        self.run = self.run.rename(self.run.with_name(name))
        manifest = json.loads((self.folder / MANIFEST).read_text())
        manifest["method"] = spec["method"]
        (self.folder / MANIFEST).write_text(json.dumps(manifest))

    def _each(self, name: str, change: Callable[[dict[str, Any]], Any]) -> None:
        rows = self.lines(name)
        for row in rows:
            change(row)
        self.write(name, rows)


def submission_of(path: Path, folder: Path, **about: Any) -> Forger:
    method = json.loads((path / "run.json").read_text())["spec"]["method"].partition("@")[0]
    pack([RunReader(path)], folder, who="Ann", method=method, **about)
    return Forger(folder, folder / path.name)


@pytest.fixture
def forger(honest: dict[str, Path], tmp_path: Path) -> Forger:
    """A submission of the subject, to be forged."""
    return submission_of(honest[SUBJECT], tmp_path / "submission")


@pytest.fixture
def forger_of() -> Callable[..., Forger]:
    """Return a function that packs a run into a folder, to be forged."""
    return submission_of


@pytest.fixture
def submit(honest: dict[str, Path], tmp_path: Path) -> Callable[..., Forger]:
    """Return a function that packs an honest run by its short name."""

    def make(name: str, folder: str = "submission", **about: Any) -> Forger:
        return submission_of(honest[name], tmp_path / folder, **about)

    return make


@pytest.fixture
def copied(honest: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that copies an honest run, to be changed."""

    def make(name: str) -> Path:
        target = tmp_path / "copies" / honest[name].name
        shutil.copytree(honest[name], target)
        return target

    return make
