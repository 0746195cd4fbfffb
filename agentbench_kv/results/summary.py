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

FILE = "summary.json"


class _Derived(BaseModel):
    model_config = ConfigDict(frozen=True)


class SubScore(_Derived):
    """A part of the score: right / asked over all trials, the interval over samples."""

    right: float
    asked: float
    interval: Interval


class KVSummary(_Derived):
    """KV figures over the trials that reached the engine; tokens per (layer, KV head)."""

    median_peak_live: float
    max_peak_live: int
    median_logical: float
    live_over_logical: float  # the achieved KV, in (0, 1]: mean over trials of peak live / logical
    mean_decode_kv: float  # mean over trials of the mean live tokens over decode steps
    # From here on totals over trials.
    events: int
    evicted: int
    restored: int
    rows_moved: int
    recomputed: int
    prefill_tokens: int
    decode_tokens: int
    bytes_read: int  # of K and V, in decode


_TOTALS = (
    "events", "evicted", "restored", "rows_moved", "recomputed", "prefill_tokens",
    "decode_tokens", "bytes_read",
)  # fmt: skip


class Summary(_Derived):
    """A run in figures; a score is a mean over samples with every failed trial counted as 0."""

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
    score: Interval | None  # None without trials
    score_triggered: Interval | None  # over the samples with at least one event
    score_completed: Interval | None  # without the failed trials: what the failures cost
    sub_scores: dict[str, SubScore]  # one per metric pair `x_right`, `x_asked`
    kv: KVSummary | None  # None if no trial reached the engine
    wall_s: float
    tokens_per_s: float | None  # generated tokens over the seconds in which trials were played
    ttft_ms: float | None  # medians over scored trials
    tpot_ms: float | None
    failures: dict[str, int]  # trials by kind
    non_completion_rate: float  # failed trials over trials
    infra_retries: int  # attempts lost to infrastructure, whether the retry helped or not
    session_resets: int
    validity: Validity
    alien_lines: int  # of `samples.jsonl`, not fully understood by this version
    notes: list[str]  # what a reader of the figures should know besides the validity
    user_retries: int = 0  # attempts that the simulated user spoilt and another followed
    pass_k: dict[str, Interval] = {}  # `pass^1` to `pass^K` if every sample was tried K times


def summarize(run: RunReader) -> Summary:
    """Rebuild a run's summary and write it to `summary.json`; a PrerequisiteError if it cannot."""
    summary = build(run)
    write_atomic(run.path / FILE, summary.model_dump_json(indent=2).encode() + b"\n")
    return summary


def build(run: RunReader) -> Summary:
    """Derive a run's summary from its records without writing anything."""
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
        ttft_ms=median(record.timing.ttft_ms for record in trials),
        tpot_ms=median(record.timing.tpot_ms for record in trials),
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
    asked = {name for record in trials for name in record.metrics if name.endswith("_asked")}
    names = sorted(name.removesuffix("_asked") for name in asked)
    scores = {name: _sub_score(trials, name) for name in names}
    return {name: score for name, score in scores.items() if score is not None}


def _sub_score(trials: Sequence[TrialRecord], name: str) -> SubScore | None:
    counts: dict[str, tuple[float, float]] = {}
    for record in trials:
        right, asked = (record.metrics.get(f"{name}_{part}") for part in ("right", "asked"))
        if isinstance(right, int | float) and isinstance(asked, int | float):
            old = counts.get(record.sample_id, (0.0, 0.0))
            counts[record.sample_id] = (old[0] + right, old[1] + asked)
    scores = Scores.of_counts(counts, _by_sample(trials)[1])
    if not scores.parts:
        return None
    totals = [sum(part) for part in zip(*scores.parts.values(), strict=True)]
    return SubScore(right=totals[0], asked=totals[1], interval=level(scores))


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
        **{name: sum(getattr(kv, name) for kv in accounts) for name in _TOTALS},
    )


def median(values: Iterable[float | None]) -> float | None:
    """Return the median of the values that are known; None if none is."""
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
