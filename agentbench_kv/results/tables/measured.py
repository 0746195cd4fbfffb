"""Runs ready for tables: figures checked against the records, then the records let go."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentbench_kv.results.arms import Arm, Problem
from agentbench_kv.results.reader import RunReader
from agentbench_kv.results.records import TrialRecord
from agentbench_kv.results.runinfo import RunStatus
from agentbench_kv.results.summary import build
from agentbench_kv.results.tables.pairing import Scores
from agentbench_kv.results.validity import RunState, Validity, assess

__all__ = ["SCORE", "Measured", "measure"]

SCORE = "score"
_IDENTITY = ("task", "method", "budget", "engine", "model", "seed")


@dataclass(frozen=True)
class Measured:
    """One run with what the tables need of its records.

    Attributes
    ----------
    arm : Arm
        Its summary follows from its records.
    label : str
        The arm's, which takes a look at the installed methods each time it is asked for.
    validity : Validity
        As the summary's, and `drift` where prompts differ from the cell's `full`.
    scores : dict
        `score` and every sub-score asked for, sample by sample; a run without one lacks the name.
    triggered : set of str
        Samples with an event.
    sessions : int
        Trials that reached the engine.
    in_flight : float or None
        Sessions driven at once, on average while trials were played.
    """

    arm: Arm
    label: str
    validity: Validity
    scores: dict[str, Scores]
    triggered: set[str]
    sessions: int
    in_flight: float | None

    @property
    def valid(self) -> bool:
        """Whether the run may be ranked."""
        return self.validity.state is RunState.VALID

    @property
    def reason(self) -> str | None:
        """Why not; None if it may."""
        if self.valid:
            return None
        return ": ".join([self.validity.state.value, "; ".join(self.validity.reasons)])


def measure(
    arms: Sequence[Arm], metrics: Iterable[str] = (SCORE,)
) -> tuple[list[Measured], list[Problem]]:
    """Read every run's records once.

    Parameters
    ----------
    arms : sequence of Arm
    metrics : iterable of str
        Sub-scores to collect besides the score.

    Returns
    -------
    measured : list of Measured
        In the order of the arms.
    problems : list of Problem
        Summaries that say something else than their records; the records are used.
    """
    wanted = [name for name in metrics if name != SCORE]
    references = {_place(arm): arm for arm in reversed(arms) if arm.method == "full"}
    for arm in references.values():
        _read(arm)
    measured, problems = [], []
    for arm in arms:
        reference = references.get(_place(arm))
        _read(arm)
        run = _measure(arm, reference if reference is not arm else None, wanted)
        sound, problem = _sound(run)
        measured.append(sound)
        problems += [problem] if problem else []
        if arm is not reference:
            _let_go(arm)
    for arm in references.values():
        _let_go(arm)
    return measured, problems


def _place(arm: Arm) -> tuple[Any, ...]:
    return (arm.cell, arm.summary.seed)


def _read(arm: Arm) -> None:
    """Load the arm's records, and what it derives of them, so that it outlives them."""
    _ = arm.trials, arm.scores, arm.clusters, arm.triggered


def _let_go(arm: Arm) -> None:
    """Drop the records: those of hundreds of runs would not fit."""
    vars(arm).pop("trials", None)


def _sound(run: Measured) -> tuple[Measured, Problem | None]:
    """Return the run with a summary that follows from its records."""
    wrong = _disagreement(run)
    if wrong is None:
        return run, None
    arm = replace(run.arm, summary=build(RunReader(run.arm.path)))
    again = replace(run, arm=arm, label=arm.label)
    if arm.info.status is RunStatus.RUNNING:
        # It went on between loading and now.
        return again, None
    reason = f"summary.json says {wrong}; using the records (kvbench summarize rebuilds it)"
    return again, Problem(arm.path, reason)


def _disagreement(run: Measured) -> str | None:
    """Name the first field in which the summary contradicts spec or records."""
    summary, spec = run.arm.summary, run.arm.spec
    for name in _IDENTITY:
        # A spec of another shape leaves a field of the summary empty.
        if getattr(summary, name) not in (None, spec.get(name)):
            return f"{name} {getattr(summary, name)!r}, the spec {spec.get(name)!r}"
    for name, stored, derived in _facts(run):
        if stored != derived:
            return f"{name} {stored}, the records {derived}"
    return None


def _facts(run: Measured) -> Iterable[tuple[str, object, object]]:
    """Yield name, stored and derived value of what a hand would change."""
    summary, trials = run.arm.summary, run.arm.trials
    yield "trials", summary.trials, len(trials)
    score = f"{summary.score.point:.6f}" if summary.score else None
    yield "score", score, f"{run.scores[SCORE].mean:.6f}" if trials else None
    if run.validity.state is not RunState.DRIFT:
        yield "validity", summary.validity.state.value, run.validity.state.value
    if summary.kv is None:
        return
    for name in ("events", "bytes_read", "prefill_tokens", "restored", "decode_tokens"):
        yield name, getattr(summary.kv, name), sum(getattr(each.kv, name) for each in trials)
    peak = max((each.kv.peak_live for each in trials), default=0)
    yield "max_peak_live", summary.kv.max_peak_live, peak


def _measure(arm: Arm, reference: Arm | None, metrics: Sequence[str]) -> Measured:
    trials = arm.trials
    scores = {SCORE: Scores.of_trials(arm.scores, arm.clusters)} if trials else {}
    for name in metrics:
        parts = _parts(trials, name)
        if parts:
            scores[name] = Scores(parts, clusters=arm.clusters, ratio=True)
    busy = sum(each.timing.e2e_s or 0.0 for each in trials)
    shared = reference.trials if reference is not None else None
    return Measured(
        arm=arm,
        label=arm.label,
        validity=assess(arm.spec, trials, arm.info.expected_trials, shared),
        scores=scores,
        triggered=arm.triggered,
        sessions=sum(bool(each.kv.logical) for each in trials),
        in_flight=busy / arm.info.wall_s if busy and arm.info.wall_s > 0 else None,
    )


def _parts(trials: Sequence[TrialRecord], name: str) -> dict[str, tuple[float, float]]:
    """Sum a sub-score's right and asked over each sample's trials."""
    parts: dict[str, tuple[float, float]] = {}
    for record in trials:
        right, asked = (record.metrics.get(f"{name}_{end}") for end in ("right", "asked"))
        if isinstance(right, int | float) and isinstance(asked, int | float) and asked > 0:
            before = parts.get(record.sample_id, (0.0, 0.0))
            parts[record.sample_id] = (before[0] + right, before[1] + asked)
    return parts
