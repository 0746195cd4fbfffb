"""Mutated submissions: a refusal or a label, never a traceback.

10,000 mutations; 100,000 with KVBENCH_LONG_TESTS=1. Every one is hashed again, as a forger would,
and where the spec changed the run is mostly renamed, so that the later checks are reached.
"""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from agentbench_kv import registry
from agentbench_kv.errors import KVBenchError
from agentbench_kv.leaderboard import checking, validate
from agentbench_kv.leaderboard.evidence import MANIFEST, hashes, strict_json
from agentbench_kv.results.run_names import prefix_parts, run_id

LONG = os.environ.get("KVBENCH_LONG_TESTS") == "1"
RECORDS = 100_000 if LONG else 10_000
REPLAYS = 3_000 if LONG else 150
CRASHED = "could not be checked"

NASTY: list[Any] = [
    None, True, False, 0, -1, 1, 2, 3.5, -0.0, 1e308, -1e308, 5e-324, 2**31, 2**53, 2**63 - 1,
    -(2**63),
    "", "x", "timeout", "0", "-1", "1e999", "\u0000", "\ud800", "../..", "a|b|c", "%s%n", "25%",
    "0%",
    "x" * 5000, "micro", "full", "agentkv", "agentkv@paper", "evoke", "kvpress:SnapKVPress()",
    "kvpress:(", "scripted", "embedded", "api", "vllm", "micro/recall-5k", "recall-1k-1",
    "recall-1k--1",
    "recall-1k-99999999999999999999", [], {}, [[]], [{}], {"": ""}, {"a": {"b": [1]}}, [None],
    "9" * 400,
]  # fmt: skip
RAW = [
    "9" * 400, "-" + "9" * 30, "1e400", "NaN", "Infinity", "-Infinity", "[" * 3000 + "]" * 3000,
    '{"a":' * 200 + "1" + "}" * 200, "[" * 100_000, '"\\ud800"', '"\\u0000"', "1.0e", "01", "'x'",
    '{"a":1,"a":2}', "tru", "1" + "0" * 5000, "0." + "1" * 2000, "",
]  # fmt: skip
MARK = "\u2063mark\u2063"


class Mutator:
    """Mutates the files of one submission in place and puts them back."""

    def __init__(self, folder: Path, run: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.folder, self.run = folder, run
        transcripts = [f"transcripts/{path.name}" for path in (run / "transcripts").iterdir()]
        self.names = ["run.json", "samples.jsonl", "turns.jsonl", *transcripts]
        self.before = {name: (run / name).read_bytes() for name in self.names}
        self.manifest = (folder / MANIFEST).read_bytes()

    def rounds(self, count: int, *, names: list[str] | None = None) -> Iterator[None]:
        for _ in range(count):
            changed = self._mutate(names)
            yield
            self._restore(changed)

    def _mutate(self, names: list[str] | None) -> list[str]:
        if names is None and self.random.random() < 0.05:
            (self.folder / MANIFEST).write_bytes(self._changed(self.manifest, lines=False))
            return []
        chosen = self.random.choices(names or self.names, k=self.random.choice((1, 1, 1, 2)))
        for name in dict.fromkeys(chosen):
            raw = self._changed(self.before[name], lines=name.endswith(".jsonl"))
            (self.run / name).write_bytes(raw)
        self._cover("run.json" in chosen)
        return chosen

    def _cover(self, spec_changed: bool) -> None:
        name = self.run.name
        if spec_changed and self.random.random() < 0.8:
            try:
                info = strict_json((self.run / "run.json").read_bytes())
                name = run_id(prefix_parts(info["spec"]), info["spec"])
                info["run_id"] = name
                (self.run / "run.json").write_text(json.dumps(info))
            except (ValueError, TypeError, KeyError, AttributeError, KVBenchError):
                name = self.run.name
        target = self.run.with_name(name)
        self.run.rename(target)
        manifest = json.loads(self.manifest)
        manifest["runs"] = [{"run_id": name, "sha256": hashes(target)}]
        (self.folder / MANIFEST).write_text(json.dumps(manifest))
        self.renamed = target

    def _restore(self, changed: list[str]) -> None:
        (self.folder / MANIFEST).write_bytes(self.manifest)
        if changed:
            self.renamed.rename(self.run)
        for name in changed:
            (self.run / name).write_bytes(self.before[name])

    def _changed(self, raw: bytes, *, lines: bool) -> bytes:
        if self.random.random() < 0.25:
            return self._bytes(raw)
        if not lines:
            return self._document(raw)
        rows = raw.splitlines(keepends=True)
        at = self.random.randrange(len(rows))
        kind = self.random.random()
        if kind < 0.08:
            rows.insert(at, rows[self.random.randrange(len(rows))])
        elif kind < 0.16:
            del rows[at]
        else:
            rows[at] = self._document(rows[at]) + b"\n"
        return b"".join(rows)

    def _bytes(self, raw: bytes) -> bytes:
        at = self.random.randrange(len(raw) + 1)
        kind = self.random.randrange(4)
        if kind == 0:
            return raw[:at]
        if kind == 1:
            return raw[:at] + bytes([self.random.randrange(256)]) + raw[at + 1 :]
        if kind == 2:
            return raw[:at] + self.random.randbytes(self.random.randrange(1, 9)) + raw[at:]
        return raw[:at] + raw[at + self.random.randrange(1, 40) :]

    def _document(self, raw: bytes) -> bytes:
        document = json.loads(raw)
        places = list(_places(document))
        parent, key = self.random.choice(places)
        kind = self.random.random()
        literal = None
        if kind < 0.1:
            del parent[key]
        elif kind < 0.2:
            other, name = self.random.choice(places)
            parent[key] = copy.deepcopy(other.get(name) if isinstance(other, dict) else other[name])
        elif kind < 0.35 and isinstance(parent[key], int | float):
            parent[key] = self.random.choice((parent[key] + 1, parent[key] * 0.3, -parent[key]))
        elif kind < 0.5:
            parent[key], literal = MARK, self.random.choice(RAW)
        elif kind < 0.55 and isinstance(parent, dict):
            parent[self.random.choice(("new", "", "score", "kv"))] = self.random.choice(NASTY)
        else:
            parent[key] = self.random.choice(NASTY)
        text = json.dumps(document)
        return (text if literal is None else text.replace(json.dumps(MARK), literal)).encode()


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    keys = (
        value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    )
    for key in list(keys):
        yield value, key
        yield from _places(value[key])


def check(mutator: Mutator, count: int, names: list[str] | None = None) -> dict[str, int]:
    seen = {"refused": 0, "harmless": 0}
    for number, _ in enumerate(mutator.rounds(count, names=names)):
        try:
            findings = validate(mutator.folder).findings
        except KVBenchError as error:
            findings = [error]
        for each in findings:
            assert CRASHED not in str(each), (number, str(each))
            str(each).encode("utf-8")
        seen["refused" if findings else "harmless"] += 1
    return seen


@pytest.fixture
def mutate(submit: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a function that makes a mutator of a small submission, in memory if possible."""
    # Plug-ins do not change while a test runs, and looking them up takes longer than a check.
    monkeypatch.setattr(registry, "_entry_points", cache(registry._entry_points))

    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as place:

        def make(seed: int) -> Mutator:
            made = submit("small")
            folder = Path(shutil.copytree(made.folder, Path(place) / "submission"))
            return Mutator(folder, folder / made.run.name, seed)

        yield make


class NoReplay:
    """Plays nothing: the replay has its own test, and takes a hundred times as long."""

    def __init__(self, *_: Any) -> None:
        pass

    def check(self, _: Any) -> Iterator[Any]:
        return iter(())


@pytest.mark.slow
@pytest.mark.parametrize(
    "records", [RECORDS // 5, pytest.param(RECORDS, marks=pytest.mark.nightly)]
)
def test_mutated_records_never_end_in_a_traceback(
    mutate: Any, monkeypatch: pytest.MonkeyPatch, records: int
) -> None:
    monkeypatch.setattr(checking, "Replay", NoReplay)
    seen = check(mutate(0), records)
    assert seen["refused"] > 0.7 * records, seen
    assert seen["harmless"] > 0, seen


@pytest.mark.slow
def test_mutated_transcripts_never_end_in_a_traceback_when_played_again(mutate: Any) -> None:
    mutator = mutate(1)
    transcripts = [name for name in mutator.names if name.startswith("transcripts/")]
    seen = check(mutator, REPLAYS, [*transcripts, "samples.jsonl"])
    assert seen["refused"] > 0.7 * REPLAYS, seen
