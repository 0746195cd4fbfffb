"""A run's figures, derived from its records alone, and whether they may be ranked.

`summary.json` holds them for people and other programs: it is output, and nothing here reads it.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from itertools import chain
from typing import Any

from pydantic import BaseModel

from agentbench_kv.accounting import TOTALS, LayerReach
from agentbench_kv.budget import Budget
from agentbench_kv.errors import UsageError
from agentbench_kv.results.files import write_atomic
from agentbench_kv.results.lines import Lines
from agentbench_kv.results.records import LOST, Metric, TrialRecord, TrialStatus
from agentbench_kv.results.stats import Interval, Scores, level, pass_levels
from agentbench_kv.results.store import RunInfo, RunReader, RunStatus, latest_trials

GIVEN_TOKENS = "given tokens"  # the determinism of runs that generate nothing (fidelity)
UNCOMPRESSED = frozenset({"full", "full-constrained"})
REMEMBERS = "remembers"  # in the provenance of a run whose method has a memory
# Those that had one before provenance said so.
_MEMORIES = frozenset({"memart", "mem0", "graphiti"})
# A trial's metrics that say what past sessions cost; those that are absent where there was none, by
# the one that says so.
RARELY = {
    "ingest_failed": ("ingest_failed",),
    "ingest_files": ("ingest_files", "ingest_files_s"),
    "append_tokens": ("append_tokens", "append_s"),
}
READING = ("ingest_calls", "ingest_tokens", "ingest_s", *chain.from_iterable(RARELY.values()))
ANSWERING = ("answer_prefill_tokens", "answer_live_tokens", "answer_ttft_ms")  # means of a trial
DEFAULT_INTERVAL = 128
_UNREAD = ("other_syntax", "calls_in_other_syntax")  # metrics of a trial
_PARAMETER_FIELDS = ("params", "set", "method_params")


class RunState(StrEnum):
    """The verdict on a run; only `valid` runs are ranked."""

    VALID = "valid"
    INCOMPLETE = "incomplete"
    BUDGET_NOT_APPLIED = "budget_not_applied"
    DRIFT = "drift"


class Validity(BaseModel, frozen=True):
    """The verdict on a run with all its reasons."""

    state: RunState  # the gravest finding
    reasons: list[str]  # every finding, one line each; empty for a valid run
    triggered_samples: int  # with at least one event
    samples: int  # with at least one trial


def assess(
    spec: Mapping[str, Any],
    trials: Sequence[TrialRecord],
    expected: int | None = None,
    reference: Sequence[TrialRecord] | None = None,
    *,
    provenance: Mapping[str, Any] | None = None,
) -> Validity:
    """Judge a run by the records that count.

    Prompts that drifted weigh most, then a budget that was exceeded, then missing trials, then a
    method that never triggered (which missing trials might still show to be wrong).

    `expected` (trials) is the spec's `expected_trials` if not given; `reference` are trials of an
    arm that must have had the same prompts. `provenance` is the run's.
    """
    if expected is None:
        expected = spec.get("expected_trials")
    recalled = _never_recalled(trials) if remembers(spec, provenance or {}) else None
    findings = [
        (RunState.DRIFT, _drifted(trials, reference or ())),
        (RunState.BUDGET_NOT_APPLIED, _refused(trials)),
        (RunState.BUDGET_NOT_APPLIED, _exceeded(spec, trials)),
        (RunState.BUDGET_NOT_APPLIED, _raised(spec, trials)),
        (RunState.INCOMPLETE, _missing(trials, expected)),
        (RunState.BUDGET_NOT_APPLIED, _never_triggered(spec, trials)),
        (RunState.BUDGET_NOT_APPLIED, recalled),
    ]
    found = [(state, reason) for state, reason in findings if reason is not None]
    return Validity(
        state=found[0][0] if found else RunState.VALID,
        reasons=[reason for _, reason in found],
        triggered_samples=len(triggered_samples(trials)),
        samples=len({record.sample_id for record in trials}),
    )


def remembers(spec: Mapping[str, Any], provenance: Mapping[str, Any]) -> bool:
    """Whether a run's method has a memory of past sessions."""
    return _method(spec) in _MEMORIES or bool(provenance.get(REMEMBERS))


def budget_bounds(spec: Mapping[str, Any], trials: Sequence[TrialRecord]) -> list[int]:
    """Return the most live tokens each trial may hold; none where nothing bounds them.

    That is B + Δ + the longest single prefill, all in tokens per (layer, KV head); a budget that is
    a share counts by the session's final length. A policy with a trigger in tokens and no budget
    promises the trigger + the longest prefill.
    """
    if (trigger := _own_trigger(spec)) is not None:
        return [trigger + each.kv.longest_prefill for each in trials]
    if not _is_compressed(spec):
        return []
    size, interval = Budget.parse(spec["budget"]), _interval(spec)
    return [size.at(each.kv.logical) + interval + each.kv.longest_prefill for each in trials]


def triggered_samples(trials: Sequence[TrialRecord]) -> set[str]:
    return {record.sample_id for record in trials if record.kv.events}


def _is_compressed(spec: Mapping[str, Any]) -> bool:
    return _method(spec) not in UNCOMPRESSED and spec.get("budget") is not None


def _method(spec: Mapping[str, Any]) -> str:
    return str(spec.get("method", "full")).partition("@")[0]


def _own_trigger(spec: Mapping[str, Any]) -> int | None:
    """Return the tokens above which a policy drops messages, where that is not a budget."""
    if _parameter(spec, "exec") is None or spec.get("budget") is not None:
        return None
    try:
        return int(str(_parameter(spec, "trigger")))
    except ValueError:  # a word: the context, the model's own wish
        return None


def _interval(spec: Mapping[str, Any]) -> int:
    """Return Δ: from the spec itself, else from the method's parameters, else the default."""
    found = _parameter(spec, "interval")
    try:
        return DEFAULT_INTERVAL if found is None else int(found)
    except (TypeError, ValueError, OverflowError):
        raise UsageError(f"the interval of the run is {str(found)[:40]!r}, no number") from None


def _parameter(spec: Mapping[str, Any], name: str) -> Any:
    """Return a value of the spec itself, else of the method's parameters; None if it has none."""
    places = [spec, *(spec.get(field) for field in _PARAMETER_FIELDS)]
    values = (place.get(name) for place in places if isinstance(place, Mapping))
    return next((value for value in values if value is not None), None)


def _exceeded(spec: Mapping[str, Any], trials: Sequence[TrialRecord]) -> str | None:
    bounds = zip(trials, budget_bounds(spec, trials), strict=False)
    excess = [(_held(r) - bound, r) for r, bound in bounds if _held(r) > bound]
    if not excess:
        return None
    over, worst = max(excess, key=lambda item: item[0])
    limit, sizes, names = "budget", f"{spec['budget']} + {_interval(spec)}", "budget + interval"
    if (trigger := _own_trigger(spec)) is not None:
        limit, sizes, names = "trigger", f"{trigger}", "trigger"
    return (
        f"{len(excess)} trials exceeded the {limit}; worst: sample {worst.sample_id} trial "
        f"{worst.trial} held {_held(worst)} tokens, {over} over the bound "
        f"{sizes} + {worst.kv.longest_prefill} ({names} + longest prefill){_told_anew(spec, worst)}"
    )


def _told_anew(spec: Mapping[str, Any], record: TrialRecord) -> str:
    """Say that a client changed its history, behind which a policy of messages begins anew."""
    if _parameter(spec, "exec") is None or not record.session_resets:
        return ""
    return f"; its history was changed {record.session_resets} times, and nothing leaves of such"


def _held(record: TrialRecord) -> int:
    """Return the most tokens of a session, without what its method asked beside it."""
    return record.kv.peak_alone or record.kv.peak_live


def _refused(trials: Sequence[TrialRecord]) -> str | None:
    """Say where what is always kept left no room under the budget, so that nothing was evicted."""
    refused = [record for record in trials if record.kv.refused]
    if not refused:
        return None
    worst = max(refused, key=lambda record: record.kv.protected)
    kv = worst.kv
    return (
        f"{len(refused)} of {len(trials)} trials had no room for an event; sample "
        f"{worst.sample_id} trial {worst.trial}: "
        f"protected {kv.protected} + recent {kv.refused_recent} >= budget {kv.refused_budget}; "
        "raise --budget or protect less"
    )


def _raised(spec: Mapping[str, Any], trials: Sequence[TrialRecord]) -> str | None:
    """Say where a share came to fewer tokens than the method can work with, so it kept more."""
    # A session without an event was not compressed to either number.
    if not _is_compressed(spec):
        return None
    size = Budget.parse(spec["budget"])
    raised = [r for r in trials if r.kv.events and (r.kv.budget or 0) > size.at(r.kv.logical)]
    if not raised:
        return None
    worst = min(raised, key=lambda record: record.kv.logical)
    return (
        f"{len(raised)} trials ended with a budget above the share; sample {worst.sample_id} trial "
        f"{worst.trial} was given {worst.kv.budget} tokens, the least the method takes, and "
        f"{spec['budget']} of {worst.kv.logical} are {size.at(worst.kv.logical)}"
    )


def _never_triggered(spec: Mapping[str, Any], trials: Sequence[TrialRecord]) -> str | None:
    if not trials or triggered_samples(trials):
        return None
    if not _is_compressed(spec):
        return _never_dropped(spec, trials)
    if any(record.kv.refused for record in trials):  # events fell due, and `_refused` says more
        return None
    longest = max(record.kv.logical for record in trials)
    fits = longest <= Budget.parse(spec["budget"]).at(longest)
    said = f"logical tokens at most {longest} {'<=' if fits else '>'} budget {spec['budget']}"
    return f"never triggered; {said}{'' if fits else _cure(spec)}"


def _never_dropped(spec: Mapping[str, Any], trials: Sequence[TrialRecord]) -> str | None:
    """Say that a method which drops messages above a length of its own met no such session."""
    if _parameter(spec, "exec") is None:
        return None
    if (every := _parameter(spec, "fork_every")) is not None:
        asked = sum(record.kv.auxiliary_calls for record in trials)
        cure = "ask more often: --set fork_every=N"
        if asked:
            cure = "use a model that kvbench train sidequest has trained, or ask one more often"
        return (
            f"never triggered; the model was asked {asked} times (fork_every={every}) and"
            f" named no result to drop; {cure}"
        )
    longest = max(record.kv.logical for record in trials)
    return (
        f"never triggered; logical tokens at most {longest}, trigger {_parameter(spec, 'trigger')}:"
        " nothing was dropped; --set trigger=TOKENS below that, or --set trigger=budget"
    )


def _never_recalled(trials: Sequence[TrialRecord]) -> str | None:
    """Say that a memory brought nothing back, rows or texts, as where it was told of no past."""
    found = any(each.kv.restored or each.metrics.get("recalled_texts") for each in trials)
    return None if found or not trials else "never triggered; its memory brought nothing back"


def _cure(spec: Mapping[str, Any]) -> str:
    """Say what makes a method fire that waits for more generated tokens than there are."""
    if _parameter(spec, "trigger") != "every":
        return ""
    return (
        f"; an event is due at every {_interval(spec)}th generated token only, and answers may be "
        "short: --set trigger=prefill+every compresses after what was read, too"
    )


def _missing(trials: Sequence[TrialRecord], expected: int | None) -> str | None:
    finished = sum(record.finished for record in trials)
    wanted = max(expected or 0, len(trials))
    if finished >= wanted and trials:
        return None
    if not wanted:
        return "no trials"
    again = "; {} lost to engine or infrastructure count 0 until the same command tries them again"
    lost = len(trials) - finished
    return f"{finished} of {wanted} trials finished{again.format(lost) if lost else ''}"


def _drifted(trials: Sequence[TrialRecord], reference: Sequence[TrialRecord]) -> str | None:
    theirs = {record.key: record.prompt_sha for record in reference if record.prompt_sha}
    shared = [record for record in trials if record.prompt_sha and record.key in theirs]
    different = [record for record in shared if record.prompt_sha != theirs[record.key]]
    if not different:
        return None
    return (
        f"prompts differ from the other arm in {len(different)} of {len(shared)} trials, "
        f"first in sample {different[0].sample_id} trial {different[0].trial}"
    )


FILE = "summary.json"


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
        notes=[
            *_notes(info, lines),
            *_reach(info, kv),
            *_protected(info, kv),
            *_bytes(info, trials),
        ],
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


def _reach(info: RunInfo, kv: KVSummary | None) -> list[str]:
    """Say how much of the KV a method could reach, where some layers keep windows."""
    details = info.provenance.get("engine_details")
    found = LayerReach.read(details) if isinstance(details, dict) else None
    return [found.sentence(round(kv.median_logical))] if found and kv else []


def _protected(info: RunInfo, kv: KVSummary | None) -> list[str]:
    """Say what of a budget is left to choose, where some of it is protected."""
    if kv is None or not kv.median_protected or info.spec.get("budget") is None:
        return []
    size = Budget.parse(info.spec["budget"]).at(round(kv.median_logical))
    free = max(0, size - round(kv.median_protected))
    return [
        f"of the budget, {size} tokens, a median of {kv.median_protected:g} are protected: "
        f"{free} beyond them"
    ]


def _bytes(info: RunInfo, trials: Sequence[TrialRecord]) -> list[str]:
    """Say where bytes are not recorded throughout, or do not follow from the tokens."""
    held = [kv for each in trials if (kv := each.kv).peak_live]
    known = [kv.peak_bytes / kv.peak_live for kv in held if kv.peak_bytes]
    if not known:
        return []
    if len(known) < len(held):
        return [f"bytes are recorded in {len(known)} of {len(held)} sessions, so the run has none"]
    details = info.provenance.get("engine_details")
    # Rows of windows, and those that age, are not all of one size.
    windows = isinstance(details, dict) and LayerReach.read(details) is not None
    if windows or str(info.spec.get("kv_dtype") or "").startswith("kivi"):
        return []
    least, most = min(known), max(known)
    # What a method asks beside a session is counted in whole bytes.
    if most - least <= 1:
        return []
    return [
        f"warning: peak_bytes do not follow from peak_live: {least:,.0f} to {most:,.0f} bytes a "
        "token, which are one number where every row has one size"
    ]


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


def _notes(info: RunInfo, lines: Lines[TrialRecord]) -> list[str]:
    notes = [
        f"resumed with another {name}: {old} -> {new}"
        for resume in info.resumes
        for name, (old, new) in sorted(resume.changed.items())
    ]
    notes += [f"samples.jsonl line {odd.line}: {odd.reason}" for odd in lines.unreadable[:5]]
    if lines.torn:
        notes.append("samples.jsonl: the torn last line was dropped; resuming runs its trial again")
    used = info.provenance.get("calibration")
    if isinstance(used, dict):
        notes.append(f"calibrated on {used.get('tokens')} tokens of {used.get('source')}")
    notes += _unread_calls(info, lines.records)
    if info.error is not None:
        notes.append(f"the run failed: {info.error}")
    return notes


def _unread_calls(info: RunInfo, records: list[TrialRecord]) -> list[str]:
    """Say how many answers write their calls in a syntax that was not read, and what mends it."""
    written: Counter[str] = Counter()
    for record in latest_trials(records):
        syntax, answers = (record.metrics.get(name) for name in _UNREAD)
        if isinstance(syntax, str) and isinstance(answers, int):
            written[syntax] += answers
    read = info.provenance.get("tool_parser")
    if not written:
        return _no_calls(info, records, str(read))
    most = written.most_common(1)[0][0]
    cure = f"to read them: --tool-syntax {most}"
    if read == "endpoint":
        cure = "switch on the tool parser of the endpoint"
    elif read == most:
        cure = "they stand where this syntax has none, amid other text"
    return [
        f"warning: {written.total()} answers call tools as {most} writes calls, and calls were "
        f"read as {read}, so none of these was run; {cure}"
    ]


def _no_calls(info: RunInfo, records: list[TrialRecord], read: str) -> list[str]:
    """Say that a model makes no calls at all where a task counts them."""
    counted = [r.metrics["calls"] for r in latest_trials(records) if "calls" in r.metrics]
    if not counted or any(counted) or info.spec.get("engine") == "scripted":
        return []
    cure = {
        "endpoint": "the endpoint's tool parser may be off",
        "none": "--tool-syntax none reads none",
        "json": "the model writes none",
    }.get(read, "a model that was not trained to write them so needs --tool-syntax json")
    return [f"warning: no call of a tool in {len(counted)} trials, read as {read}; {cure}"]
