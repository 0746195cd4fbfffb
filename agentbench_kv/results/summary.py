"""A run's figures, derived from its records alone.

`summary.json` holds them for people and other programs: it is output, and nothing here reads it.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from agentbench_kv.results.files import write_atomic
from agentbench_kv.results.lines import Lines
from agentbench_kv.results.reader import RunReader, latest_trials
from agentbench_kv.results.records import TrialRecord, TrialStatus
from agentbench_kv.results.runinfo import RunInfo, RunStatus
from agentbench_kv.results.stats import Interval, Scores, level, pass_levels
from agentbench_kv.results.validity import Validity, assess, triggered_samples

__all__ = ["KVSummary", "SubScore", "Summary", "build", "summarize"]

FILE = "summary.json"


class _Derived(BaseModel):
    model_config = ConfigDict(frozen=True)


class SubScore(_Derived):
    """A part of the score: right / asked over all trials, the interval over samples."""

    right: float
    asked: float
    interval: Interval


class KVSummary(_Derived):
    """KV figures over the trials that reached the engine.

    Attributes
    ----------
    median_peak_live, max_peak_live, median_logical : float, int, float
        Tokens per (layer, KV head).
    live_over_logical : float
        Mean over trials of peak live / logical: the achieved KV, in (0, 1].
    mean_decode_kv : float
        Mean over trials of the mean live tokens over decode steps.
    events, evicted, restored, rows_moved, recomputed, prefill_tokens, decode_tokens : int
        Totals over trials.
    bytes_read : int
        Bytes of K and V read in decode, total over trials.
    """

    median_peak_live: float
    max_peak_live: int
    median_logical: float
    live_over_logical: float
    mean_decode_kv: float
    events: int
    evicted: int
    restored: int
    rows_moved: int
    recomputed: int
    prefill_tokens: int
    decode_tokens: int
    bytes_read: int


class Summary(_Derived):
    """A run in figures.

    Attributes
    ----------
    score : Interval or None
        Headline: mean over samples, every failed trial counted as 0; None without trials.
    score_triggered : Interval or None
        The same over the samples with at least one event; None if there are none.
    score_completed : Interval or None
        The same without the failed trials: what the failures cost.
    sub_scores : dict
        One per metric pair `x_right`, `x_asked`.
    pass_k : dict
        `pass^1` to `pass^K` of a run that tried every sample K times, see `stats.pass_levels`.
    kv : KVSummary or None
        None if no trial reached the engine.
    tokens_per_s : float or None
        Generated tokens over `wall_s`, the seconds in which trials were played.
    ttft_ms, tpot_ms : float or None
        Medians over scored trials, milliseconds.
    failures : dict
        Trials by failure kind.
    non_completion_rate : float
        Failed trials over trials.
    infra_retries : int
        Attempts lost to infrastructure, whether the retry helped or not.
    user_retries : int
        Attempts that the simulated user spoilt and another followed.
    alien_lines : int
        Lines of `samples.jsonl` that this version did not fully understand.
    notes : list of str
        What a reader of the figures should know besides the validity.
    """

    run_id: str
    status: RunStatus
    task: str | None
    method: str | None
    budget: int | str | None
    engine: str | None
    model: str | None
    seed: int | None
    samples: int
    trials: int
    expected_trials: int | None
    score: Interval | None
    score_triggered: Interval | None
    score_completed: Interval | None
    sub_scores: dict[str, SubScore]
    kv: KVSummary | None
    wall_s: float
    tokens_per_s: float | None
    ttft_ms: float | None
    tpot_ms: float | None
    failures: dict[str, int]
    non_completion_rate: float
    infra_retries: int
    session_resets: int
    validity: Validity
    alien_lines: int
    notes: list[str]
    user_retries: int = 0
    pass_k: dict[str, Interval] = {}


def summarize(run: RunReader) -> Summary:
    """Rebuild a run's summary and write it to `summary.json`.

    Raises
    ------
    UsageError
        If the directory is not a run.
    PrerequisiteError
        If the file cannot be written.
    """
    summary = build(run)
    write_atomic(run.path / FILE, summary.model_dump_json(indent=2).encode() + b"\n")
    return summary


def build(run: RunReader) -> Summary:
    """Derive a run's summary from its records without writing anything.

    Raises
    ------
    UsageError
        If the directory is not a run.
    """
    return derive(run.info, run.trial_lines())


def derive(info: RunInfo, lines: Lines[TrialRecord]) -> Summary:
    """Derive the summary of what `run.json` and `samples.jsonl` hold."""
    trials = sorted(latest_trials(lines.records), key=lambda record: record.key)
    failures = Counter(record.status for record in trials if record.score is None)
    triggered = triggered_samples(trials)
    kv = _kv(trials)
    return Summary(
        **_identity(info),
        samples=len({record.sample_id for record in trials}),
        trials=len(trials),
        score=_score(trials),
        score_triggered=_score(record for record in trials if record.sample_id in triggered),
        score_completed=_score(record for record in trials if record.score is not None),
        sub_scores=_sub_scores(trials),
        pass_k=pass_levels(*_by_sample(trials)),
        kv=kv,
        wall_s=info.wall_s,
        tokens_per_s=kv.decode_tokens / info.wall_s if kv and info.wall_s > 0 else None,
        ttft_ms=_median(record.timing.ttft_ms for record in trials),
        tpot_ms=_median(record.timing.tpot_ms for record in trials),
        failures={s.value: failures[s] for s in TrialStatus if failures[s]},
        non_completion_rate=failures.total() / len(trials) if trials else 0.0,
        infra_retries=_infra_retries(lines.records, trials),
        user_retries=sum(_user_retries(lines.records, trials).values()),
        session_resets=sum(record.session_resets for record in trials),
        validity=assess(info.spec, trials, expected=info.expected_trials),
        alien_lines=len(lines.unreadable),
        notes=_notes(info, lines),
    )


def _identity(info: RunInfo) -> dict[str, Any]:
    """Return what the run is; a spec of another shape leaves fields empty, never fails."""
    spec = info.spec
    texts = {name: spec.get(name) for name in ("task", "method", "engine", "model")}
    budget, seed = spec.get("budget"), spec.get("seed")
    return {
        "run_id": info.run_id,
        "status": info.status,
        "expected_trials": info.expected_trials,
        **{name: None if value is None else str(value) for name, value in texts.items()},
        "budget": budget if isinstance(budget, int | str) else None,
        "seed": seed if isinstance(seed, int) else None,
    }


def _score(trials: Iterable[TrialRecord]) -> Interval | None:
    scores, clusters = _by_sample(trials)
    return level(Scores.of_trials(scores, clusters)) if scores else None


def _by_sample(trials: Iterable[TrialRecord]) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Return every sample's headline scores, and the groups of samples that are in one."""
    scores: dict[str, list[float]] = {}
    clusters: dict[str, str] = {}
    for record in trials:
        scores.setdefault(record.sample_id, []).append(record.headline)
        if record.cluster is not None:
            clusters[record.sample_id] = record.cluster
    return scores, clusters


def _sub_scores(trials: Sequence[TrialRecord]) -> dict[str, SubScore]:
    names = {
        name.removesuffix("_asked")
        for record in trials
        for name in record.metrics
        if name.endswith("_asked")
    }
    scores = {name: _sub_score(trials, name) for name in sorted(names)}
    return {name: score for name, score in scores.items() if score is not None}


def _sub_score(trials: Sequence[TrialRecord], name: str) -> SubScore | None:
    counts: dict[str, tuple[float, float]] = {}
    groups = {r.sample_id: r.cluster for r in trials if r.cluster is not None}
    for record in trials:
        pair = (record.metrics.get(f"{name}_right"), record.metrics.get(f"{name}_asked"))
        if isinstance(pair[0], int | float) and isinstance(pair[1], int | float):
            old = counts.get(record.sample_id, (0.0, 0.0))
            counts[record.sample_id] = (old[0] + pair[0], old[1] + pair[1])
    scores = Scores.of_counts(counts, groups)
    if not scores.parts:
        return None
    right, asked = (sum(part) for part in zip(*scores.parts.values(), strict=True))
    return SubScore(right=right, asked=asked, interval=level(scores))


def _kv(trials: Sequence[TrialRecord]) -> KVSummary | None:
    accounts = [record.kv for record in trials if record.kv.logical]
    if not accounts:
        return None
    return KVSummary(
        median_peak_live=statistics.median(kv.peak_live for kv in accounts),
        max_peak_live=max(kv.peak_live for kv in accounts),
        median_logical=statistics.median(kv.logical for kv in accounts),
        live_over_logical=statistics.fmean(kv.peak_live / kv.logical for kv in accounts),
        mean_decode_kv=statistics.fmean(kv.mean_decode_kv for kv in accounts),
        events=sum(kv.events for kv in accounts),
        evicted=sum(kv.evicted for kv in accounts),
        restored=sum(kv.restored for kv in accounts),
        rows_moved=sum(kv.rows_moved for kv in accounts),
        recomputed=sum(kv.recomputed for kv in accounts),
        prefill_tokens=sum(kv.prefill_tokens for kv in accounts),
        decode_tokens=sum(kv.decode_tokens for kv in accounts),
        bytes_read=sum(kv.bytes_read for kv in accounts),
    )


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _infra_retries(records: Sequence[TrialRecord], trials: Sequence[TrialRecord]) -> int:
    """Count lost attempts once, whether they left a record or only raised `attempts`."""
    recorded = Counter(record.key for record in records if not record.finished)
    users = _user_retries(records, trials)
    return sum(
        max(recorded[record.key], record.attempts - record.finished - users[record.key])
        for record in trials
    )


def _user_retries(
    records: Sequence[TrialRecord], trials: Sequence[TrialRecord]
) -> Counter[tuple[str, int]]:
    """Count, for each trial, the records of a failed user that do not count in the end."""
    failed = Counter(r.key for r in records if r.status is TrialStatus.USER_ERROR)
    return failed - Counter(r.key for r in trials if r.status is TrialStatus.USER_ERROR)


def _notes(info: RunInfo, lines: Lines[TrialRecord]) -> list[str]:
    notes = [
        f"resumed with another {name}: {old} -> {new}"
        for resume in info.resumes
        for name, (old, new) in sorted(resume.changed.items())
    ]
    notes += [f"samples.jsonl line {odd.line}: {odd.reason}" for odd in lines.unreadable[:5]]
    if lines.torn:
        notes.append("samples.jsonl: the torn last line was dropped; resuming runs its trial again")
    if info.error is not None:
        notes.append(f"the run failed: {info.error}")
    return notes
