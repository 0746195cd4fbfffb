"""Whether the records of a run agree: trials, seeds, scores, turns, transcripts, KV and times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from statistics import median
from typing import Any

from agentbench_kv.adapters.browser.answers import SEALED, unseal
from agentbench_kv.engines.serving.model_facts import read_model
from agentbench_kv.errors import KVBenchError
from agentbench_kv.leaderboard.evidence import (
    CUT_OFF,
    OWN,
    Checks,
    Fault,
    Note,
    RecordedTranscript,
    RunEvidence,
    differs,
    expect,
    place,
    shown,
)
from agentbench_kv.leaderboard.identity import folder_of_model
from agentbench_kv.results.records import LOST, TrialRecord, TrialStatus, TurnRecord
from agentbench_kv.results.run_names import transcript_name
from agentbench_kv.results.run_reader import TrialKey
from agentbench_kv.results.validity import UNCOMPRESSED, RunState, assess
from agentbench_kv.run.trial import MAX_ATTEMPTS

# Fields of a trial's record, each the sum of a field of its turns; two hold for our engines only.
_TOTALS = {
    "usage.prompt_tokens": "prompt_tokens",
    "usage.completion_tokens": "output_tokens",
    **{f"kv.{name}": name for name in ("events", "evicted", "restored", "prefill_tokens")},
}
_OWN_TOTALS = {"kv.decode_tokens": "output_tokens", "kv.bytes_read": "kv_bytes_read"}
_OF_BANKS = ("append_s", "append_tokens", "ingest_files", "ingest_files_s")
_RETRIED = LOST | {TrialStatus.USER_ERROR}
_LOCAL = frozenset({"embedded", "llamacpp", "vllm", "sglang"})
_CLOCK_SLACK_S = 60.0  # a clock may be set while a run is going on
# Beyond what any machine decodes or reads, by two orders of magnitude.
_MOST_TOKENS_S = 1e7
_MOST_BYTES_S = 1e15


def check_count(evidence: RunEvidence) -> Checks:
    """Check that every sample has all its trials, each finished, and no more."""
    spec, trials = evidence.spec, evidence.trials
    expected = evidence.info.expected_trials
    if expected != len(trials) or not trials:
        yield differs("run.json: expected_trials", expected, len(trials))
    samples = {sample for sample, _ in trials}
    if len(trials) != len(samples) * spec.trials:
        yield differs("trials", len(trials), f"{spec.trials} of each of {len(samples)} samples")
    for sample, trial in sorted(trials):
        if trial >= spec.trials:
            text = f"is beyond the {spec.trials} of the spec"
            yield Fault(f"sample {sample} trial {trial}", text)
    if spec.limit is not None and len(samples) > spec.limit:
        yield differs("samples", len(samples), spec.limit)
    for key, record in trials.items():
        if not record.finished:
            text = f"is {record.status.value}: the trial is not finished"
            yield Fault(place(key, "status"), text)


def check_seeds(evidence: RunEvidence) -> Checks:
    """Derive the seed of every attempt from spec, sample and trial."""
    for key, attempts in evidence.attempts.items():
        derived = evidence.spec.trial_seed(*key)
        for record in attempts:
            yield from expect(place(key, "seed"), record.seed, derived)


def check_attempts(evidence: RunEvidence) -> Checks:
    """Check that no record was superseded where the runner would not have tried again."""
    for key, attempts in evidence.attempts.items():
        yield from expect(place(key, "attempts"), attempts[0].attempts, 1)
        for earlier, later in pairwise(attempts):
            spoilt = earlier.status is TrialStatus.USER_ERROR
            if earlier.status not in _RETRIED or (spoilt and earlier.attempts >= MAX_ATTEMPTS):
                text = f"a record with status {earlier.status.value} was superseded by a later one"
                yield Fault(place(key, "status"), text)
            # A resumed run begins to count anew.
            allowed = {earlier.attempts + 1} | (set() if spoilt else {1})
            if later.attempts not in allowed or later.attempts > MAX_ATTEMPTS:
                yield differs(place(key, "attempts"), later.attempts, min(allowed))
    again = sum(len(attempts) - 1 for attempts in evidence.attempts.values())
    if again:
        yield Note(f"{again} attempts are said to have been lost, and were repeated")


def check_scores(evidence: RunEvidence) -> Checks:
    """Check that no part of a score has more right than asked."""
    for key, record in evidence.trials.items():
        for name, right in record.metrics.items():
            part = name.removesuffix("_right")
            asked = record.metrics.get(f"{part}_asked")
            if part == name or asked is None:
                continue
            if not isinstance(right, int | float) or not isinstance(asked, int | float):
                yield Fault(place(key, f"metrics.{name}"), "is no number")
            elif not -asked <= right <= asked:
                yield Fault(place(key, f"metrics.{name}"), f"is {right} of {asked} asked")


def check_unfounded(evidence: RunEvidence) -> Checks:
    """Check that turns belong to trials."""
    for key in sorted(evidence.turns.keys() - evidence.trials.keys())[:5]:
        yield Fault(f"turns.jsonl: sample {key[0]} trial {key[1]}", "is no trial of the run")


def check_turns(evidence: RunEvidence) -> Checks:
    """Check that every trial's turns add up to its record."""
    exact = evidence.spec.engine in OWN
    for key, record in evidence.trials.items():
        turns = evidence.turns.get(key, [])
        if not record.usage.requests and record.status is not TrialStatus.SCORED:
            continue
        # Under a memory that brings rows back, prompts say nothing of a drift.
        if record.prompt_sha is None and not evidence.keeps_banks:
            yield Fault(place(key, "prompt_sha"), "is missing")
        in_order = [turn.turn for turn in turns] == list(range(len(turns)))
        if len(turns) != record.usage.requests or not in_order:
            yield differs(place(key, "turns"), len(turns), record.usage.requests)
            continue
        recalled = _most_rows(evidence, record)
        for name, said, of_turns in _sums(evidence, record, turns, exact):
            # A memory's rows are there before a session's first turn.
            more = recalled * (record.session_resets + 1) if name == "kv.restored" else 0
            derived = of_turns + more
            # A session that was cut off may hold more than its last finished turn.
            if said < derived or (said > derived and record.status not in CUT_OFF):
                yield differs(place(key, name), said, derived)
        yield from _check_growth(evidence, key, record, turns)
        yield from _check_turn_times(key, record, turns)


def _sums(
    evidence: RunEvidence, record: TrialRecord, turns: Sequence[TurnRecord], exact: bool
) -> list[tuple[str, int, int]]:
    """Return name, recorded value and derived value of what follows from the turns."""
    names = _TOTALS | (_OWN_TOTALS if exact else {})
    found = [
        (name, attrgetter(name)(record), sum(getattr(turn, of) for turn in turns))
        for name, of in names.items()
    ]
    # What is told again after a reset is not new where messages are dropped.
    if exact and not (evidence.policy and record.session_resets):
        longest = max(_new_tokens(evidence, turn) for turn in turns)
        found.append(("kv.longest_prefill", record.kv.longest_prefill, longest))
    return found


def _new_tokens(evidence: RunEvidence, turn: TurnRecord) -> int:
    """Return what a turn read that its session had never had."""
    if evidence.rewrites and turn.events:
        return turn.prompt_tokens - (turn.live_before - turn.evicted)
    return turn.prefill_tokens // evidence.passes


def _most_rows(evidence: RunEvidence, record: TrialRecord) -> int:
    """Return how many rows a session can have that are none of its own tokens: a memory's."""
    if not evidence.keeps_banks:
        return 0
    params = evidence.spec.params
    restored = record.kv.restored // (record.session_resets + 1)
    return min(int(params["topk"]) * int(params["block"]), restored)


def _check_growth(
    evidence: RunEvidence, key: TrialKey, record: TrialRecord, turns: Sequence[TurnRecord]
) -> Checks:
    """Check that a session only grows, and no turn holds more than was seen or the peak.

    A history that is written anew is shorter by what left, and by nothing else.
    """
    recalled = _most_rows(evidence, record)
    for turn in turns:
        seen = turn.prompt_tokens + turn.output_tokens
        left = turn.evicted if evidence.rewrites else 0
        for name in ("live_before", "live_after"):
            held, most = getattr(turn, name), "peak_alone" if record.kv.peak_alone else "peak_live"
            had = left if name == "live_before" else 0
            if held > min(seen + recalled + had, peak := getattr(record.kv, most)):
                text = f"is {held}; the session has seen {seen}, kv.{most} is {peak}"
                yield Fault(place(key, f"turn {turn.turn}: {name}"), text)
        if sum(turn.phases.values()) > seen:
            yield differs(place(key, f"turn {turn.turn}: phases"), sum(turn.phases.values()), seen)
    if record.session_resets:
        return
    for earlier, later in pairwise(turns):
        left = later.evicted + 1 if evidence.rewrites and later.events else 0
        if evidence.at_text_level and left:  # its tokens are estimates
            continue
        if later.prompt_tokens < earlier.prompt_tokens + earlier.output_tokens - left:
            text = "is shorter than what the session held, and no reset is recorded"
            yield Fault(place(key, f"turn {later.turn}: prompt_tokens"), text)


def _check_turn_times(key: TrialKey, record: TrialRecord, turns: Sequence[TurnRecord]) -> Checks:
    """Check that a trial's times are the medians of its turns', which fit into its time."""
    timing = record.timing
    if record.status is not TrialStatus.SCORED:
        return
    for name in ("ttft_ms", "tpot_ms"):
        known = [value for turn in turns if (value := getattr(turn, name)) is not None]
        derived = median(known) if known else None
        yield from expect(place(key, f"timing.{name}"), getattr(timing, name), derived)
    took = sum(
        (turn.ttft_ms or 0.0) + (turn.tpot_ms or 0.0) * max(0, turn.output_tokens - 1)
        for turn in turns
    )
    if timing.e2e_s is None or took > 1000 * timing.e2e_s + 1:
        text = f"is {timing.e2e_s} s, its turns took {took / 1000:.3f} s"
        yield Fault(place(key, "timing.e2e_s"), text)


def check_transcripts(evidence: RunEvidence) -> Checks:
    """Compare every transcript with the trial's record and its turns."""
    if not evidence.transcripts:
        yield Note("the transcripts are not in the submission")
        return
    for key, record in evidence.trials.items():
        expected = transcript_name(*key)
        if record.transcript != expected:
            yield differs(place(key, "transcript"), record.transcript, expected)
        elif key in evidence.transcripts:
            yield from _check_transcript(evidence, key, record, evidence.transcripts[key])


def _check_transcript(
    evidence: RunEvidence, key: TrialKey, record: TrialRecord, transcript: RecordedTranscript
) -> Checks:
    turns, field = evidence.turns.get(key, []), place(key, "transcript")
    if not evidence.at_text_level:
        said = [len(ids) for ids in transcript.tokens if ids]
        derived = [turn.output_tokens for turn in turns if turn.output_tokens]
        yield from expect(f"{field}: tokens generated", said, derived)
    yield from expect(f"{field}: error", transcript.error, record.error)
    yield from expect(f"{field}: events", len(transcript.events), record.kv.events)
    messages = _assistant_messages(transcript.transcript)
    if record.status is TrialStatus.SCORED and messages is not None:
        yield from expect(f"{field}: assistant messages", messages, len(turns))
    kv = record.kv
    for number, event in enumerate(transcript.events):
        possible = (
            0 <= event.live_after <= event.live_before <= kv.peak_live
            and 0 <= event.decoded <= kv.decode_tokens
            and event.live_before <= event.logical
            and event.rows_moved >= 0
        )
        if not possible:
            yield Fault(f"{field}: event {number}", f"{event} cannot be")
    evicted = sum(event.live_before - event.live_after for event in transcript.events)
    yield from expect(place(key, "kv.evicted"), kv.evicted, evicted)


def _assistant_messages(stored: Any) -> int | None:
    """Count the assistant's messages in a list of chat messages; None if it is something else."""
    try:
        entries = unseal(stored) if isinstance(stored, dict) and set(stored) == {SEALED} else stored
    except (ValueError, TypeError, RecursionError):
        return -1
    if not isinstance(entries, list) or not entries:
        return None
    if not all(isinstance(entry, dict) and "role" in entry for entry in entries):
        return None
    return [entry["role"] for entry in entries].count("assistant")


def check_validity(evidence: RunEvidence) -> Checks:
    """Apply the rules that every run is ranked by: the budget was kept to, every trial is there."""
    trials = list(evidence.trials.values())
    info = evidence.info
    verdict = assess(info.spec, trials, info.expected_trials, provenance=info.provenance)
    if verdict.state is not RunState.VALID:
        yield Fault("validity", f"{verdict.state.value}: {'; '.join(verdict.reasons)}")


def check_accounts(evidence: RunEvidence) -> Checks:
    """Check every trial's KV account against its session."""
    engine = evidence.spec.engine
    uncompressed = evidence.spec.method.partition("@")[0] in UNCOMPRESSED
    rows_of = _row_bytes(evidence)
    for key, record in evidence.trials.items():
        turns = evidence.turns.get(key, [])
        if not turns:
            continue
        if engine in OWN:
            yield from _check_rows(evidence, key, record, turns)
        yield from _check_limits(evidence, key, record, turns)
        if record.status in CUT_OFF:
            continue
        if uncompressed:
            yield from _check_uncompressed(key, record, turns)
        if evidence.keeps_banks:
            for name in ("events", "evicted", "rows_moved"):
                yield from expect(place(key, f"kv.{name}"), getattr(record.kv, name), 0)
        if engine in _LOCAL and record.kv.decode_tokens:
            yield from _check_bytes(key, record, rows_of)
        if engine == "embedded" and not record.session_resets:
            yield from _check_live(evidence, key, turns, _most_rows(evidence, record))


def _check_rows(
    evidence: RunEvidence, key: TrialKey, record: TrialRecord, turns: Sequence[TurnRecord]
) -> Checks:
    """Check what holds for our own engines: no row is lost, every moved row is of an event."""
    kv = record.kv
    again = kv.prefill_tokens * (evidence.passes - 1) // evidence.passes
    if evidence.rewrites:
        again = sum(turn.prefill_tokens - _new_tokens(evidence, turn) for turn in turns)
    if not evidence.rewrites or _in_turns(record, turns):
        yield from expect(place(key, "kv.recomputed"), kv.recomputed, again)
    elif kv.recomputed > kv.prefill_tokens:
        yield differs(place(key, "kv.recomputed"), kv.recomputed, again)
    if not kv.restored and key in evidence.transcripts:
        moved = sum(event.rows_moved for event in evidence.transcripts[key].events)
        yield from expect(place(key, "kv.rows_moved"), kv.rows_moved, moved)


def _in_turns(record: TrialRecord, turns: Sequence[TurnRecord]) -> bool:
    """Whether every rewrite is an event of a turn that read a prompt."""
    read = sum(turn.events for turn in turns if turn.prefill_tokens)
    return record.kv.rewrites == read and not record.session_resets


def _check_limits(
    evidence: RunEvidence, key: TrialKey, record: TrialRecord, turns: Sequence[TurnRecord]
) -> Checks:
    recalled = _most_rows(evidence, record)
    kv, rewrites = record.kv, evidence.rewrites
    lost = kv.recomputed > 0 and evidence.passes == 1 and not rewrites
    # An endpoint's tokens are estimates where a history was written anew.
    whole = record.session_resets == 0 and not lost and not (rewrites and evidence.at_text_level)
    seen = kv.prefill_tokens + kv.decode_tokens + kv.restored + kv.recomputed
    longest = max(turn.prompt_tokens + turn.output_tokens for turn in turns)
    held = recalled + (kv.logical if whole else max(kv.logical, longest))
    most = {
        "evicted": kv.logical + kv.restored if whole else seen,
        "restored": kv.evicted + recalled * (record.session_resets + 1),
        "logical": longest + (kv.evicted if rewrites else 0),
        # What a method asks beside a session comes on top of it, by no more than it read and said.
        "peak_alone": min(held, kv.peak_live),
        "peak_live": min(held, kv.peak_alone or held) + kv.auxiliary_tokens,
        "longest_prefill": max(_new_tokens(evidence, turn) for turn in turns),
        "mean_decode_kv": kv.peak_live,
        "cached_tokens": kv.prefill_tokens if evidence.shares else 0,
        "shared": held - recalled if evidence.shares else 0,
        "events": kv.prefill_tokens + kv.decode_tokens,
    }
    for name, limit in most.items():
        if (value := getattr(kv, name)) > limit:
            text = f"is {value}, more than the {limit} there can be"
            yield Fault(place(key, f"kv.{name}"), text)
    if not whole or not turns[-1].output_tokens or record.status in CUT_OFF:
        return
    # What was generated last need not be in the cache.
    if kv.peak_live < (left := kv.logical - kv.evicted + kv.restored - 1):
        yield Fault(place(key, "kv.peak_live"), f"is {kv.peak_live}, {left} tokens were left")
    if kv.logical < longest - 1:
        yield differs(place(key, "kv.logical"), kv.logical, longest)


def _check_uncompressed(key: TrialKey, record: TrialRecord, turns: Sequence[TurnRecord]) -> Checks:
    kv = record.kv
    for name in ("events", "evicted", "restored", "rows_moved"):
        yield from expect(place(key, f"kv.{name}"), getattr(kv, name), 0)
    held = max(turn.live_after for turn in turns)
    # A prompt without room was never held.
    if record.status is not TrialStatus.CONTEXT_LIMIT:
        held = max(held, kv.logical - 1)
    if kv.peak_live < held and not record.session_resets:
        yield differs(place(key, "kv.peak_live"), kv.peak_live, kv.logical)


def _check_bytes(key: TrialKey, record: TrialRecord, rows_of: _RowBytes | None) -> Checks:
    """Check that every token but the first of a turn read all live rows."""
    kv = record.kv
    rows = kv.mean_decode_kv * kv.decode_tokens
    unread = record.usage.requests * (kv.peak_live + 1)
    if rows > unread and not kv.bytes_read:
        yield Fault(place(key, "kv.bytes_read"), "is 0 though rows were read")
    if rows_of is None:
        return
    per_token, held = rows_of.of_a_token, rows_of.of_a_token * kv.peak_live
    # Records from before bytes were counted have none; rows of windows come on top.
    if kv.peak_bytes and not kv.window_bytes_read:
        if rows_of.exact:
            yield from expect(place(key, "kv.peak_bytes"), kv.peak_bytes, held)
        elif kv.peak_bytes < held:
            text = f"is {kv.peak_bytes}, {kv.peak_live} tokens take {held} at least"
            yield Fault(place(key, "kv.peak_bytes"), text)
    if not rows_of.exact:
        return
    least = per_token * max(0.0, rows - unread)
    most = per_token * (rows + kv.decode_tokens + kv.events * kv.peak_live)
    read = kv.bytes_read - kv.window_bytes_read
    if not least <= read <= most:
        text = f"is {read} beside windows, expected {least:.0f} to {most:.0f}"
        yield Fault(place(key, "kv.bytes_read"), text)


def _check_live(
    evidence: RunEvidence, key: TrialKey, turns: Sequence[TurnRecord], held: int
) -> Checks:
    """Check that a turn holds what it found, added and lost; the newest token waits to be fed.

    `held` is what a session holds before its first turn.
    """
    for turn in turns:
        yield from expect(place(key, f"turn {turn.turn}: live_before"), turn.live_before, held)
        held = turn.live_after
        added = _new_tokens(evidence, turn) + turn.output_tokens + turn.restored - turn.evicted
        expected = turn.live_before + added
        if not 0 <= expected - turn.live_after <= 1:
            field = place(key, f"turn {turn.turn}: live_after")
            yield differs(field, turn.live_after, expected)


@dataclass(frozen=True)
class _RowBytes:
    of_a_token: int  # in all layers and heads
    exact: bool  # or the least: a plug-in's method may keep rows for every query head


def _row_bytes(evidence: RunEvidence) -> _RowBytes | None:
    """Return the bytes of a cached token of a shipped model on the embedded engine."""
    spec = evidence.spec
    folder = folder_of_model(spec, evidence.info.provenance, None)
    if spec.engine != "embedded" or folder is None or spec.kv_dtype.startswith("kivi"):
        return None  # of KIVI, whose rows take less as they age, the replay says it
    try:
        facts = read_model(folder)
        size = facts.bytes_per_token(spec.kv_dtype or spec.dtype)
    except (KVBenchError, KeyError):
        return None
    try:
        heads = facts.q_heads if spec.built_method.per_query_head else facts.kv_heads
    except KVBenchError:
        return _RowBytes(size, exact=False)
    return _RowBytes(size * heads // facts.kv_heads, exact=True)


def check_times(evidence: RunEvidence) -> Checks:
    """Check that the trials fit into the run's time, and the run between its heartbeats."""
    info, trials = evidence.info, evidence.trials.values()
    at_once, field = evidence.spec.concurrency, "run.json: wall_s"
    took = [each.timing.e2e_s or 0.0 for each in trials if each.status is TrialStatus.SCORED]
    slack = 1.0 + 0.01 * info.wall_s + 30.0 * len(info.resumes)
    if took and max(took) > info.wall_s + slack:
        yield Fault(field, f"is {info.wall_s}, a trial took {max(took):.3f} s")
    if sum(took) > at_once * (info.wall_s + slack):
        text = f"is {info.wall_s}, the trials took {sum(took):.1f} s in {at_once} at a time"
        yield Fault(field, text)
    lasted = info.heartbeat - info.created
    if info.wall_s > lasted + _CLOCK_SLACK_S:
        yield Fault(field, f"is {info.wall_s}, the run lasted {lasted:.1f} s")
    tokens = sum(each.kv.decode_tokens for each in trials)
    read = sum(each.kv.bytes_read for each in trials)
    if tokens > _MOST_TOKENS_S * info.wall_s or read > _MOST_BYTES_S * info.wall_s:
        yield Fault(field, f"is {info.wall_s}: no machine is that fast")


def check_ingest(evidence: RunEvidence) -> Checks:
    """Check that taking a past into banks took possible amounts of calls, tokens and time."""
    for key, record in evidence.trials.items():
        if not evidence.keeps_banks:
            for name in sorted(record.metrics.keys() & set(_OF_BANKS)):
                yield Fault(place(key, f"metrics.{name}"), "is of no use to this method")
        elif record.status is TrialStatus.SCORED and "ingest_calls" in record.metrics:
            yield from _check_ingest(key, record)


def _check_ingest(key: TrialKey, record: TrialRecord) -> Checks:
    told: dict[str, float] = {}
    for name in ("ingest_calls", "ingest_tokens", "ingest_s", *_OF_BANKS):
        value = record.metrics.get(name, 0)
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            yield Fault(place(key, f"metrics.{name}"), f"is {shown(value)}, no amount")
            return
        told[name] = value
    files, calls = told["ingest_files"], told["ingest_calls"]
    if files > calls or (files == 0) != (told["ingest_files_s"] == 0):
        text = f"is {files} of {calls} calls, in {told['ingest_files_s']} s"
        yield Fault(place(key, "metrics.ingest_files"), text)
    if told["append_s"] > (record.timing.e2e_s or 0.0) or bool(told["append_s"]) != bool(
        told["append_tokens"]
    ):
        text = f"took {told['append_tokens']:.0f} tokens in {told['append_s']} s"
        yield Fault(place(key, "metrics.append_s"), text)
    # What came from files was read at another time.
    spent = told["ingest_files_s"] if files else told["ingest_s"]
    lasted = record.timing.e2e_s or 0.0
    if spent > lasted or told["ingest_tokens"] > _MOST_TOKENS_S * told["ingest_s"]:
        took = f"{told['ingest_tokens']:.0f} tokens in {told['ingest_s']} s"
        text = f"took {took}, in a trial of {lasted:.3f} s"
        yield Fault(place(key, "metrics.ingest_s"), text)
