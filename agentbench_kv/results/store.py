"""The folder of runs: names derived from specs, opening, listing, finding."""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentbench_kv.errors import UsageError
from agentbench_kv.results.reader import RunReader
from agentbench_kv.results.rundir import RunDir

_UNSAFE = re.compile(r"[^A-Za-z0-9._@+-]+")
_HASH_START = re.compile(r"[0-9a-f]{4,10}")
_PART_LENGTH = 40
_PREFIX_LENGTH = 160


def prefix_parts(spec: Mapping[str, Any]) -> list[str]:
    """Return what a run is called for people: task, method, budget, model name, seed."""
    budget = spec.get("budget")
    return [
        str(spec.get("task", "task")),
        str(spec.get("method", "method")),
        "bnone" if budget is None else f"b{budget}".replace("%", "pct"),
        str(spec.get("model", "model")).rstrip("/").rsplit("/", 1)[-1],
        f"s{spec.get('seed', 0)}",
    ]


def run_id(parts: Sequence[str], spec: Mapping[str, Any]) -> str:
    """Name a run: readable parts, then 10 hex digits of the SHA-256 of the spec as canonical JSON.

    The same spec gives the same name in every process and on every machine, whatever the order
    of its keys; so the same command finds its own directory. `parts` are words for people, see
    `prefix_parts`. A UsageError if the spec holds something JSON has no exact form for.
    """
    try:
        canonical = json.dumps(spec, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UsageError(f"the spec cannot be written as JSON: {error}") from error
    safe = [_UNSAFE.sub("_", part).strip("._-")[:_PART_LENGTH] for part in parts]
    prefix = "-".join(part for part in safe if part)[:_PREFIX_LENGTH] or "run"
    return f"{prefix}-{hashlib.sha256(canonical.encode()).hexdigest()[:10]}"


@dataclass(frozen=True)
class RunStore:
    """A folder of run directories; made when the first run is opened."""

    root: Path

    def open(
        self,
        name: str,
        spec: Mapping[str, Any],
        provenance: Mapping[str, Any] | None = None,
        expected_trials: int | None = None,
    ) -> RunDir:
        """Create the run or resume it, see `RunDir.claim`.

        `name` is what `run_id` returned; with fewer finished trials than expected (samples times
        trials) the run is `incomplete`.
        """
        return RunDir.claim(self.root / name, spec, provenance or {}, expected_trials)

    def names(self) -> list[str]:
        """Return the run ids in the folder, sorted."""
        if not self.root.is_dir():
            return []
        return sorted(path.parent.name for path in self.root.glob("*/run.json"))

    def find(self, run: str) -> RunReader:
        """Find a run by path, by id, or by the first digits of the hash that ends its id.

        A UsageError naming the nearest ids if there is no such run, or more than one.
        """
        for path in (Path(run), self.root / run):
            if (path / "run.json").is_file():
                return RunReader(path)
        names = self.names()
        ending = [name for name in names if name.rpartition("-")[2].startswith(run)]
        if _HASH_START.fullmatch(run) and ending:
            if len(ending) > 1:
                raise UsageError(f"{run} is {len(ending)} runs: {', '.join(ending[:3])}; say more")
            return RunReader(self.root / ending[0])
        raise UsageError(f"no run {run!r} here or in {self.root}/{suggestion(run, names)}")


def suggestion(name: str, known: Sequence[str]) -> str:
    """Return what ends an error about an unknown name: a question, or nothing."""
    near = nearest(name, known)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def nearest(name: str, known: Sequence[str]) -> list[str]:
    """Return up to three of the known names that hold `name` or are spelled like it."""
    holding = [candidate for candidate in known if name and name.lower() in candidate.lower()]
    return holding[:3] or difflib.get_close_matches(name, known, n=3, cutoff=0.4)
