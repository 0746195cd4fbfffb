"""A run's figures, derived from its records alone.

`summary.json` holds them for people and other programs: it is output, and nothing here reads it.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from pydantic import BaseModel

from agentbench_kv.accounting import TOTALS
from agentbench_kv.results.files import write_atomic
from agentbench_kv.results.lines import Lines
from agentbench_kv.results.notes import notes
from agentbench_kv.results.records import LOST, Metric, TrialRecord, TrialStatus
from agentbench_kv.results.run_info import RunInfo, RunStatus
from agentbench_kv.results.run_reader import RunReader, latest_trials
from agentbench_kv.results.stats import Interval, Scores, level, pass_levels
from agentbench_kv.results.validity import Validity, assess, triggered_samples

FILE = "summary.json"
GIVEN_TOKENS = "given tokens"  # the determinism of runs that generate nothing (fidelity)
# A trial's metrics that say what past sessions cost; those that are absent where there was none, by
# the one that says so.
RARELY = {
    "ingest_failed": ("ingest_failed",),
    "ingest_files": ("ingest_files", "ingest_files_s"),
    "append_tokens": ("append_tokens", "append_s"),
}
READING = ("ingest_calls", "ingest_tokens", "ingest_s", *chain.from_iterable(RARELY.values()))
ANSWERING = ("answer_prefill_tokens", "answer_live_tokens", "answer_ttft_ms")  # means of a trial


class SubScore(BaseModel, frozen=True, extra="forbid"):
    """A part of the score: right / asked over all trials, the interval over samples."""

    right: float
    asked: float
    interval: Interval


class KVSummary(BaseModel, frozen=True, extra="forbid"):
    """KV figures over the trials that reached the engine; tokens per (layer, KV head)."""

    median_peak_live: float
    max_peak_live: int
    median_logical: float
    # The achieved KV: mean over trials of peak live / logical. Above 1 only where requests beside a
    # session came on top of it.
    live_over_logical: float
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
    window_bytes_read: int  # of them, those of layers that see a window
    refused: int = 0  # events that found no room beside what is always kept
    median_protected: float = 0.0  # first tokens that no event may evict
    rewrites: int = 0  # times a history was written anew without what was dropped
    auxiliary_calls: int = 0  # requests that the method made of the model by itself
    auxiliary_tokens: int = 0
    auxiliary_s: float = 0.0
    auxiliary_bytes_read: int = 0
    median_peak_bytes: float = 0.0  # over all layers and heads; 0 if any record has none
    max_peak_bytes: int = 0
    max_peak_alone: int = 0  # without those requests; 0 under methods that make none
    cached_tokens: int = 0  # of the prefilled ones, those that a shared prefix had
    median_shared: float = 0.0  # first tokens whose rows are held once for several sessions

    @property
    def token_bytes(self) -> float | None:
        """Bytes of a live token over all layers and heads, at the peak; None if not known."""
        counted = self.median_peak_bytes and self.median_peak_live
        return self.median_peak_bytes / self.median_peak_live if counted else None


class Summary(BaseModel, frozen=True, extra="forbid"):
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
    infra_retries: int  # attempts lost to infrastructure that another followed
    session_resets: int
    validity: Validity
    alien_lines: int  # of `samples.jsonl`, not fully understood by this version
    notes: list[str]  # what a reader of the figures should know besides the validity
    user_retries: int = 0  # attempts that the simulated user spoilt and another followed
    pass_k: dict[str, Interval] = {}  # `pass^1` to `pass^K` if every sample was tried K times
    # What past sessions cost, mean of a trial (`ingest_…`), and what asking cost, mean of an answer
    # (`answer_…`); empty where records do not say.
    ledger: dict[str, float] = {}

    @property
    def asks(self) -> bool:
        """Whether the method asked the model something by itself, beside the sessions."""
        return self.kv is not None and self.kv.auxiliary_calls > 0

    @property
    def lost(self) -> int:
        """Trials that ended through no fault of the agent and are still to be played."""
        return sum(self.failures.get(status, 0) for status in LOST)


def summarize(run: RunReader) -> Summary:
    """Rebuild a run's summary and write it to `summary.json`; a PrerequisiteError if it cannot."""
    summary = build(run)
    write_atomic(run.path / FILE, summary.model_dump_json(indent=2).encode() + b"\n")
    return summary


def build(run: RunReader) -> Summary:
    """Derive a run's summary from its records without writing anything."""
    return derive(run.info, run.trial_lines())


def derive(info: RunInfo, lines: Lines[TrialRecord]) -> Summary:
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
        ledger=ledger_means(trials),
        wall_s=info.wall_s,
        tokens_per_s=_tokens_per_s(info, kv),
        ttft_ms=median(record.timing.ttft_ms for record in trials),
        tpot_ms=median(record.timing.tpot_ms for record in trials),
        failures={s.value: failures[s] for s in TrialStatus if failures[s]},
        non_completion_rate=failures.total() / len(trials) if trials else 0.0,
        infra_retries=_infra_retries(lines.records, trials),
        user_retries=sum(_user_retries(lines.records, trials).values()),
        session_resets=sum(record.session_resets for record in trials),
        validity=assess(
            info.spec, trials, expected=info.expected_trials, provenance=info.provenance
        ),
        alien_lines=len(lines.unreadable),
        notes=notes(info, lines, trials),
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


def _tokens_per_s(info: RunInfo, kv: KVSummary | None) -> float | None:
    given = info.provenance.get("determinism") == GIVEN_TOKENS
    return kv.decode_tokens / info.wall_s if kv and info.wall_s > 0 and not given else None


def _sub_scores(trials: Sequence[TrialRecord]) -> dict[str, SubScore]:
    counts: dict[str, dict[str, tuple[float, float]]] = {}
    for record in trials:
        for name, (right, asked) in record.sub_scores.items():
            old = counts.setdefault(name, {}).get(record.sample_id, (0.0, 0.0))
            counts[name][record.sample_id] = (old[0] + right, old[1] + asked)
    found, clusters = {}, _by_sample(trials)[1]
    for name in sorted(counts):
        scores = Scores.of_counts(counts[name], clusters)
        if scores.parts:
            right, asked = (sum(part) for part in zip(*scores.parts.values(), strict=True))
            found[name] = SubScore(right=right, asked=asked, interval=level(scores))
    return found


def ledger_means(trials: Iterable[TrialRecord]) -> dict[str, float]:
    """Return means of what trials record of reading past sessions and of asking behind them.

    All that reading took is of the same trials: those with seconds, which a failed one has none of,
    or if none has any, all. Parts that were lost and sessions that came from files are 0 where none
    did.
    """
    told = [record.metrics for record in trials]
    reading = [_with_rare(each) for each in told if "ingest_calls" in each]
    timed = [each for each in reading if isinstance(each.get("ingest_s"), int | float)]
    pairs = {name: [(each.get(name), 1) for each in timed or reading] for name in READING} | {
        name: [(each.get(f"{name}_total"), each.get(f"{name}_count")) for each in told]
        for name in ANSWERING
    }
    found = {}
    for name, own in pairs.items():
        known = [
            (total, count)
            for total, count in own
            if isinstance(total, int | float) and isinstance(count, int | float)
        ]
        if whole := sum(count for _, count in known):
            found[name] = sum(total for total, _ in known) / whole
    return found


def _with_rare(told: Mapping[str, Metric]) -> dict[str, Metric]:
    """Return a trial's metrics with 0 for what is absent where there was none."""
    absent = [names for said, names in RARELY.items() if said not in told]
    return {**dict.fromkeys(chain.from_iterable(absent), 0), **told}


def _kv(trials: Sequence[TrialRecord]) -> KVSummary | None:
    accounts = [record.kv for record in trials if record.kv.logical]
    if not accounts:
        return None
    counted = all(kv.peak_bytes for kv in accounts)  # a median with 0 for unknown is of nothing
    return KVSummary(
        median_peak_live=statistics.median(kv.peak_live for kv in accounts),
        max_peak_live=max(kv.peak_live for kv in accounts),
        median_logical=statistics.median(kv.logical for kv in accounts),
        max_peak_alone=max(kv.peak_alone for kv in accounts),
        median_peak_bytes=statistics.median(kv.peak_bytes for kv in accounts) if counted else 0,
        max_peak_bytes=max(kv.peak_bytes for kv in accounts) if counted else 0,
        live_over_logical=statistics.fmean(kv.peak_live / kv.logical for kv in accounts),
        mean_decode_kv=statistics.fmean(kv.mean_decode_kv for kv in accounts),
        median_shared=statistics.median(kv.shared for kv in accounts),
        median_protected=statistics.median(kv.protected for kv in accounts),
        **{name: sum(getattr(kv, name) for kv in accounts) for name in TOTALS},
    )


def median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _infra_retries(records: Sequence[TrialRecord], trials: Sequence[TrialRecord]) -> int:
    """Count retries once, whether what they repeat left a record or only raised `attempts`."""
    lost = Counter(record.key for record in records if not record.finished)
    lost -= Counter(record.key for record in trials if not record.finished)
    users = _user_retries(records, trials)
    return sum(max(lost[each.key], each.attempts - 1 - users[each.key]) for each in trials)


def _user_retries(
    records: Sequence[TrialRecord], trials: Sequence[TrialRecord]
) -> Counter[tuple[str, int]]:
    """Count, for each trial, the records of a failed user that do not count in the end."""
    failed = Counter(r.key for r in records if r.status is TrialStatus.USER_ERROR)
    return failed - Counter(r.key for r in trials if r.status is TrialStatus.USER_ERROR)
