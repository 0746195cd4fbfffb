"""Runs as arms of a comparison: identity, summary, and scores sample by sample."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from agentbench_kv.budget import Budget
from agentbench_kv.errors import UsageError
from agentbench_kv.results.reader import RunReader
from agentbench_kv.results.records import TrialRecord
from agentbench_kv.results.runinfo import RunInfo
from agentbench_kv.results.summary import FILE, Summary, build
from agentbench_kv.results.validity import triggered_samples

__all__ = ["Arm", "Cell", "Problem", "load_arm", "load_arms", "run_folders", "set_apart"]

UNCOMPRESSED = ("full", "full-constrained")


_CONDITIONS = ("temperature", "max_tokens", "timeout_s", "dtype", "task_params")


@dataclass(frozen=True)
class Cell:
    """What must be equal for two arms to be compared: only method and budget may differ."""

    task: str
    model: str
    engine: str


@dataclass(frozen=True)
class Problem:
    """A folder that could not be loaded as a run, or a line of one that was not understood."""

    path: Path
    reason: str


@dataclass(frozen=True)
class Arm:
    """One run.

    Attributes
    ----------
    path : Path
        The run directory.
    info : RunInfo
        Spec, status, provenance.
    summary : Summary
        As stored if it is newer than the records, else derived again.
    """

    path: Path
    info: RunInfo
    summary: Summary
    problems: tuple[Problem, ...] = field(default=(), compare=False)

    @property
    def run_id(self) -> str:
        """The run's name."""
        return self.info.run_id

    @property
    def spec(self) -> dict[str, Any]:
        """The resolved spec."""
        return self.info.spec

    @property
    def method(self) -> str:
        """`name` or `name@preset`."""
        return self.summary.method or "?"

    @property
    def budget(self) -> int | str | None:
        """Tokens, a share such as `25%`, or None."""
        return self.summary.budget

    @property
    def tokens(self) -> int | None:
        """The budget in tokens; a share counts by the median session's length."""
        if self.budget is None:
            return None
        logical = self.summary.kv.median_logical if self.summary.kv else 0
        return Budget.parse(self.budget).at(int(logical))

    @property
    def compressed(self) -> bool:
        """Whether a method with a budget ran."""
        return self.method.partition("@")[0] not in UNCOMPRESSED

    @property
    def conditions(self) -> tuple[str, ...]:
        """What a method does not set and scores depend on: only runs alike in it compare."""
        return tuple(repr(self.spec.get(name)) for name in _CONDITIONS)

    @property
    def settings(self) -> str:
        """Parameters that a `--set` changed from the preset's, `key=value` joined by commas."""
        changed = self.info.provenance.get("changed_settings")
        if not isinstance(changed, dict):
            return ""
        return ", ".join(f"{name}={value}" for name, value in sorted(changed.items()))

    @property
    def label(self) -> str:
        """Method with its changed parameters: what a table's row is called."""
        return f"{self.method} ({self.settings})" if self.settings else self.method

    @property
    def cell(self) -> Cell:
        """Task, model name and engine."""
        model = (self.summary.model or "?").rstrip("/").rsplit("/", 1)[-1]
        return Cell(self.summary.task or "?", model, self.summary.engine or "?")

    @cached_property
    def trials(self) -> list[TrialRecord]:
        """The record that counts for each (sample, trial), sorted by key; read when first asked."""
        return sorted(RunReader(self.path).trials(), key=lambda record: record.key)

    @cached_property
    def scores(self) -> dict[str, list[float]]:
        """Headline scores of each sample's trials: a failed trial counts 0."""
        scores: dict[str, list[float]] = {}
        for record in self.trials:
            scores.setdefault(record.sample_id, []).append(record.headline)
        return scores

    @cached_property
    def clusters(self) -> dict[str, str]:
        """Group of each sample that belongs to one (LoCoMo: the conversation)."""
        return {r.sample_id: r.cluster for r in self.trials if r.cluster is not None}

    @cached_property
    def triggered(self) -> set[str]:
        """Samples with at least one event."""
        return triggered_samples(self.trials)


def load_arms(paths: Iterable[Path]) -> tuple[list[Arm], list[Problem]]:
    """Load every run at or directly below the given paths.

    Parameters
    ----------
    paths : iterable of Path
        Run directories, or folders of them.

    Returns
    -------
    arms : list of Arm
        Sorted by task, model, engine, method, budget and seed.
    problems : list of Problem
        Folders and lines that were skipped; never fatal.

    Raises
    ------
    UsageError
        If a path does not exist or there is no run in all of them.
    """
    arms: list[Arm] = []
    problems: list[Problem] = []
    wanted = list(paths)
    for folder in run_folders(wanted):
        try:
            arm = load_arm(folder)
        except (UsageError, OSError, ValueError) as error:
            problems.append(Problem(folder, " ".join(str(error).split())))
            continue
        arms.append(arm)
        problems += arm.problems
    if not arms:
        places = ", ".join(map(str, wanted))
        why = f" ({problems[0].path}: {problems[0].reason})" if problems else ""
        raise UsageError(f"no run in {places}{why}; kvbench run writes one")
    return sorted(arms, key=_order), problems


def run_folders(paths: Sequence[Path]) -> list[Path]:
    """Return the run directories at or directly below some paths, each once."""
    found: dict[Path, None] = {}
    for path in paths:
        if not path.exists():
            raise UsageError(f"{path} does not exist; name a run directory or a folder of runs")
        inside = sorted(each.parent for each in path.glob("*/run.json")) if path.is_dir() else []
        own = [path] if (path / "run.json").is_file() else []
        found |= dict.fromkeys([*own, *inside])
    return list(found)


def load_arm(folder: Path) -> Arm:
    """Load one run.

    Raises
    ------
    UsageError
        If the folder is not a run, or its record makes no sense.
    """
    reader = RunReader(folder)
    summary = _stored(folder) or build(reader)
    problems = [Problem(folder, note) for note in summary.notes if note.startswith("samples.jsonl")]
    arm = Arm(folder, reader.info, summary, tuple(problems))
    _ = arm.tokens  # a budget nobody can read is this run's problem, not that of all
    return arm


def _stored(folder: Path) -> Summary | None:
    """Return the stored summary unless something it is derived from changed after it."""
    path = folder / FILE
    try:
        written = path.stat().st_mtime_ns
        sources = (folder / "samples.jsonl", folder / "run.json")
        # Finishing a run writes run.json a moment after the summary; records decide.
        if sources[0].exists() and sources[0].stat().st_mtime_ns > written:
            return None
        summary = Summary.model_validate_json(path.read_bytes())
        status = json.loads(sources[1].read_bytes()).get("status")
    except (OSError, ValidationError, ValueError):
        return None
    return summary if summary.status.value == status else None


def _order(arm: Arm) -> tuple[Any, ...]:
    cell = arm.cell
    place = (cell.task, cell.model, cell.engine, arm.compressed, arm.method, arm.settings)
    return (*place, arm.tokens or 0, arm.summary.seed or 0, arm.run_id)


def set_apart(arms: Iterable[Arm]) -> dict[int, str]:
    """Say by `id(arm)` under which conditions a run was made that others of its cell were not.

    As `temperature=1.0`, joined by commas; empty where a cell's runs are alike.
    """
    cells: dict[Cell, list[Arm]] = {}
    for arm in arms:
        cells.setdefault(arm.cell, []).append(arm)
    return {id(arm): text for same in cells.values() for arm, text in _apart(same)}


def _apart(arms: Sequence[Arm]) -> list[tuple[Arm, str]]:
    values = list(zip(*(arm.conditions for arm in arms), strict=True))
    differ = [name for name, found in zip(_CONDITIONS, values, strict=True) if len(set(found)) > 1]
    return [(arm, ", ".join(f"{name}={arm.spec.get(name)}" for name in differ)) for arm in arms]
