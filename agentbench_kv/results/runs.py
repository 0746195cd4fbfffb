"""Runs as everybody reads them: identity, figures and scores, derived from the records alone.

Records are read once and let go; what was derived of them stays. `summary.json` is never read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from agentbench_kv.budget import Budget
from agentbench_kv.errors import UsageError
from agentbench_kv.results.records import TrialRecord
from agentbench_kv.results.store import RunInfo, RunReader, TrialKey, latest_trials
from agentbench_kv.results.summary import RunState, Summary, derive, triggered_samples

SCORE = "score"
CONDITIONS = ("temperature", "max_tokens", "timeout_s", "dtype", "task_params")
"""What a method does not set and scores depend on: only runs alike in it compare."""


@dataclass(frozen=True)
class Setting:
    """Where methods compete: task, model (last part of its path) and engine."""

    task: str
    model: str
    engine: str

    @property
    def null(self) -> bool:
        """Whether its runs are of the agent that does nothing: what a task gives for free."""
        return self.engine == "scripted" and self.model == "null"


@dataclass(frozen=True)
class Problem:
    """A folder that could not be read as a run, or a line of one that was not understood."""

    path: Path
    reason: str


@dataclass(frozen=True)
class Trials:
    """What comparisons need of a run's records, sample by sample.

    Attributes
    ----------
    scores : dict of str to dict of (int, int) to float
        Headline score of each trial by its index and seed, which say which trial it is: two runs
        that share both played the same trial. A failed trial counts 0.
    groups : dict of str to str
        Group of each sample that belongs to one (LoCoMo: the conversation).
    prompts : dict of (str, int) to str
        Hash of each trial's first prompt.
    peaks : dict of str to list of int
        Peak live tokens of the trials that reached the engine.
    counts : dict of str to dict of str to (float, float)
        Sub-score to right and asked of each sample, summed over its trials.
    uncounted : dict of str to int
        Failed trials of a sample that do not say what they were asked.
    triggered : set of str
        Samples with at least one event.
    busy_s : float
        Seconds of all trials together.
    """

    scores: dict[str, dict[tuple[int, int], float]]
    groups: dict[str, str]
    prompts: dict[TrialKey, str]
    peaks: dict[str, list[int]]
    counts: dict[str, dict[str, tuple[float, float]]]
    uncounted: dict[str, int]
    triggered: set[str]
    busy_s: float

    @classmethod
    def of(cls, records: Sequence[TrialRecord]) -> Trials:
        """Gather them from the records that count."""
        scores: dict[str, dict[tuple[int, int], float]] = {}
        peaks: dict[str, list[int]] = {}
        uncounted: dict[str, int] = {}
        counts: dict[str, dict[str, tuple[float, float]]] = {}
        for record in records:
            sample = record.sample_id
            scores.setdefault(sample, {})[record.trial, record.seed] = record.headline
            if record.kv.peak_live:
                peaks.setdefault(sample, []).append(record.kv.peak_live)
            found = sub_scores(record.metrics)
            if record.score is None and not found:
                uncounted[sample] = uncounted.get(sample, 0) + 1
            for name, (right, asked) in found.items():
                old = counts.setdefault(name, {}).get(sample, (0.0, 0.0))
                counts[name][sample] = (old[0] + right, old[1] + asked)
        return cls(
            scores=scores,
            groups={r.sample_id: r.cluster for r in records if r.cluster is not None},
            prompts={r.key: r.prompt_sha for r in records if r.prompt_sha is not None},
            peaks=peaks,
            counts=counts,
            uncounted=uncounted,
            triggered=triggered_samples(records),
            busy_s=sum(record.timing.e2e_s or 0.0 for record in records),
        )


class Run:
    """One run.

    Parameters
    ----------
    path : Path
        The run directory; of a run in a baseline, the file and the run's id.
    info : RunInfo
        Spec, status, provenance.
    records : sequence of TrialRecord
        The record that counts for each (sample, trial).
    summary : Summary
        Derived from the records.
    read : callable
        Gives the records again.
    """

    def __init__(
        self,
        path: Path,
        info: RunInfo,
        records: Sequence[TrialRecord],
        summary: Summary,
        read: Callable[[], list[TrialRecord]],
    ) -> None:
        self.path = path
        self.info = info
        self.summary = summary
        self.trials = Trials.of(records)
        self.budget: int | str | None = summary.budget
        self._read = read
        _ = self.tokens  # a budget nobody can read is this run's problem, not that of all

    def records(self) -> list[TrialRecord]:
        """Read the record that counts for each (sample, trial) again, sorted by key."""
        return sorted(self._read(), key=lambda record: record.key)

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

    @cached_property
    def tokens(self) -> int | None:
        """The budget in tokens; a share counts by the median session's length."""
        if self.budget is None:
            return None
        logical = self.summary.kv.median_logical if self.summary.kv else 0
        return Budget.parse(self.budget).at(int(logical))

    @property
    def compressed(self) -> bool:
        """Whether the method takes a budget: one that keeps everything has none in its spec."""
        return self.budget is not None

    @cached_property
    def conditions(self) -> tuple[str, ...]:
        """The values of `CONDITIONS`."""
        return tuple(repr(self.spec.get(name)) for name in CONDITIONS)

    @cached_property
    def label(self) -> str:
        """The method, and in parentheses the parameters that a `--set` changed."""
        changed = self.info.provenance.get("changed_settings")
        if not isinstance(changed, dict) or not changed:
            return self.method
        settings = ", ".join(f"{name}={value}" for name, value in sorted(changed.items()))
        return f"{self.method} ({settings})"

    @cached_property
    def setting(self) -> Setting:
        """Task, model and engine."""
        model = (self.summary.model or "?").rstrip("/").rsplit("/", 1)[-1]
        return Setting(self.summary.task or "?", model, self.summary.engine or "?")

    @property
    def valid(self) -> bool:
        """Whether the run may be ranked, as far as its own records tell."""
        return self.summary.validity.state is RunState.VALID

    @property
    def reason(self) -> str | None:
        """Why it may not; None if it may."""
        validity = self.summary.validity
        return None if self.valid else f"{validity.state.value}: {'; '.join(validity.reasons)}"

    @property
    def in_flight(self) -> float | None:
        """Sessions driven at once, on average while trials were played."""
        wall = self.info.wall_s
        return self.trials.busy_s / wall if self.trials.busy_s and wall > 0 else None


def sub_scores(metrics: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Return right and asked of every sub-score of a trial: its metrics `x_right` and `x_asked`."""
    found = {}
    for key, asked in metrics.items():
        name = key.removesuffix("_asked")
        right = metrics.get(f"{name}_right")
        if name != key and isinstance(asked, int | float) and isinstance(right, int | float):
            found[name] = (float(right), float(asked))
    return found


def load_runs(paths: Iterable[Path]) -> tuple[list[Run], list[Problem]]:
    """Load every run at or directly below the given paths.

    Returns
    -------
    runs : list of Run
        Sorted by task, model, engine, method, budget and seed.
    problems : list of Problem
        Folders and lines that were skipped; never fatal.

    Raises
    ------
    UsageError
        If a path does not exist or there is no run in all of them.
    """
    runs: list[Run] = []
    problems: list[Problem] = []
    wanted = list(paths)
    for folder in run_folders(wanted):
        try:
            run = load_run(folder)
        except (UsageError, OSError, ValueError) as error:
            problems.append(Problem(folder, " ".join(str(error).split())))
            continue
        runs.append(run)
        notes = (note for note in run.summary.notes if note.startswith("samples.jsonl"))
        problems += [Problem(folder, note) for note in notes]
    if not runs:
        places = ", ".join(map(str, wanted))
        why = f" ({problems[0].path}: {problems[0].reason})" if problems else ""
        raise UsageError(f"no run in {places}{why}; kvbench run writes one")
    return sorted(runs, key=_order), problems


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


def load_run(folder: Path) -> Run:
    """Load one run; a folder that is none, or whose record makes no sense, is a UsageError."""
    reader = RunReader(folder)
    info, lines = reader.info, reader.trial_lines()
    records = latest_trials(lines.records)
    return Run(folder, info, records, derive(info, lines), reader.trials)


def _order(run: Run) -> tuple[Any, ...]:
    setting = run.setting
    place = (setting.task, setting.model, setting.engine, run.compressed, run.label)
    return (*place, run.tokens or 0, run.summary.seed or 0, run.run_id)
