"""Can the figures be: KV accounts within their sessions and the budget, times within the run's."""

from __future__ import annotations

from collections.abc import Sequence

from agentbench_kv.engines.serving.wire import read_model
from agentbench_kv.errors import KVBenchError
from agentbench_kv.leaderboard.evidence import CUT_OFF, Checks, Evidence, Wrong, differs, place
from agentbench_kv.leaderboard.identity import folder_of_model
from agentbench_kv.leaderboard.turns import OWN
from agentbench_kv.results.records import KVAccount, TrialRecord, TrialStatus, TurnRecord
from agentbench_kv.results.store import TrialKey
from agentbench_kv.results.summary import UNCOMPRESSED, RunState, assess

_LOCAL = frozenset({"embedded", "llamacpp", "vllm", "sglang"})
_SLACK_S = 60.0
"""A clock may be set while a run is going on."""
_MOST_TOKENS_S = 1e7
_MOST_BYTES_S = 1e15
"""Beyond what any machine decodes or reads, by two orders of magnitude."""


def check_validity(evidence: Evidence) -> Checks:
    """Apply the rules that every run is ranked by: the budget was kept to, every trial is there."""
    trials = list(evidence.trials.values())
    verdict = assess(evidence.info.spec, trials, evidence.info.expected_trials)
    if verdict.state is not RunState.VALID:
        yield Wrong("validity", f"{verdict.state.value}: {'; '.join(verdict.reasons)}")


def check_accounts(evidence: Evidence) -> Checks:
    """Check every trial's KV account against its session."""
    uncompressed = evidence.spec.method.partition("@")[0] in UNCOMPRESSED
    per_token = _bytes_per_token(evidence)
    for key, record in evidence.trials.items():
        turns = evidence.turns.get(key, [])
        if not turns:
            continue
        yield from _check_engine(evidence, key, record)
        yield from _check_lengths(key, record, turns)
        if record.status in CUT_OFF:
            continue
        if uncompressed:
            yield from _check_uncompressed(key, record, turns)
        if evidence.spec.engine in _LOCAL and record.kv.decode_tokens:
            yield from _check_bytes(key, record, per_token)
        if evidence.spec.engine == "embedded" and not record.session_resets:
            yield from _check_live(key, turns)


def _check_engine(evidence: Evidence, key: TrialKey, record: TrialRecord) -> Checks:
    """Check what holds for our own engines: no row is lost, every moved row is of an event."""
    kv = record.kv
    if evidence.spec.engine not in OWN:
        return
    if kv.recomputed:
        yield differs(place(key, "kv.recomputed"), kv.recomputed, 0)
    if not kv.restored and key in evidence.transcripts:
        moved = sum(event.rows_moved for event in evidence.transcripts[key].events)
        if kv.rows_moved != moved:
            yield differs(place(key, "kv.rows_moved"), kv.rows_moved, moved)


def _check_lengths(key: TrialKey, record: TrialRecord, turns: Sequence[TurnRecord]) -> Checks:
    kv, whole = record.kv, record.session_resets == 0 and record.kv.recomputed == 0
    seen = kv.prefill_tokens + kv.decode_tokens + kv.restored + kv.recomputed
    longest = max(turn.prompt_tokens + turn.output_tokens for turn in turns)
    most = {
        "evicted": kv.logical + kv.restored if whole else seen,
        "restored": kv.evicted,
        "logical": longest,
        "peak_live": kv.logical if whole else max(kv.logical, longest),
        "longest_prefill": max(turn.prefill_tokens for turn in turns),
        "mean_decode_kv": kv.peak_live,
        "events": kv.prefill_tokens + kv.decode_tokens,
    }
    for name, limit in most.items():
        if (value := getattr(kv, name)) > limit:
            text = f"is {value}, more than the {limit} there can be"
            yield Wrong(place(key, f"kv.{name}"), text)
    if not whole or not turns[-1].output_tokens or record.status in CUT_OFF:
        return
    # What was generated last need not be in the cache.
    if kv.peak_live < (left := kv.logical - kv.evicted + kv.restored - 1):
        yield Wrong(place(key, "kv.peak_live"), f"is {kv.peak_live}, {left} tokens were left")
    if kv.logical < longest - 1:
        yield differs(place(key, "kv.logical"), kv.logical, longest)


def _check_uncompressed(key: TrialKey, record: TrialRecord, turns: Sequence[TurnRecord]) -> Checks:
    kv = record.kv
    for name in ("events", "evicted", "restored", "rows_moved"):
        if getattr(kv, name):
            yield differs(place(key, f"kv.{name}"), getattr(kv, name), 0)
    held = max(turn.live_after for turn in turns)
    if kv.peak_live < max(held, kv.logical - 1) and not record.session_resets:
        yield differs(place(key, "kv.peak_live"), kv.peak_live, kv.logical)


def _check_bytes(key: TrialKey, record: TrialRecord, per_token: int | None) -> Checks:
    """Check that every token but the first of a turn read all live rows."""
    kv = record.kv
    rows = kv.mean_decode_kv * kv.decode_tokens
    unread = record.usage.requests * (kv.peak_live + 1)
    if rows > unread and not kv.bytes_read:
        yield Wrong(place(key, "kv.bytes_read"), "is 0 though rows were read")
    if per_token is None:
        return
    least = per_token * max(0.0, rows - unread)
    most = per_token * (rows + kv.decode_tokens + kv.events * kv.peak_live)
    if not least <= kv.bytes_read <= most:
        text = f"is {kv.bytes_read}, expected {least:.0f} to {most:.0f}"
        yield Wrong(place(key, "kv.bytes_read"), text)


def _check_live(key: TrialKey, turns: Sequence[TurnRecord]) -> Checks:
    """Check that a turn holds what it found, added and lost; the newest token waits to be fed."""
    held = 0
    for turn in turns:
        if turn.live_before != held:
            yield differs(place(key, f"turn {turn.turn}: live_before"), turn.live_before, held)
        held = turn.live_after
        added = turn.prefill_tokens + turn.output_tokens + turn.restored - turn.evicted
        expected = turn.live_before + added
        if not 0 <= expected - turn.live_after <= 1:
            field = place(key, f"turn {turn.turn}: live_after")
            yield differs(field, turn.live_after, expected)


def check_times(evidence: Evidence) -> Checks:
    """Check that the trials fit into the run's time, and the run between its heartbeats."""
    info, trials = evidence.info, evidence.trials.values()
    took = [each.timing.e2e_s or 0.0 for each in trials if each.status is TrialStatus.SCORED]
    slack = 1.0 + 0.01 * info.wall_s + 30.0 * len(info.resumes)
    if took and max(took) > info.wall_s + slack:
        yield Wrong("run.json: wall_s", f"is {info.wall_s}, a trial took {max(took):.3f} s")
    room = evidence.spec.concurrency * (info.wall_s + slack)
    if sum(took) > room:
        text = f"is {info.wall_s}, the trials took {sum(took):.1f} s in {evidence.spec.concurrency}"
        yield Wrong("run.json: wall_s", f"{text} at a time")
    if info.wall_s > info.heartbeat - info.created + _SLACK_S:
        lasted = info.heartbeat - info.created
        yield Wrong("run.json: wall_s", f"is {info.wall_s}, the run lasted {lasted:.1f} s")
    tokens = sum(each.kv.decode_tokens for each in trials)
    read = sum(each.kv.bytes_read for each in trials)
    if tokens > _MOST_TOKENS_S * info.wall_s or read > _MOST_BYTES_S * info.wall_s:
        yield Wrong("run.json: wall_s", f"is {info.wall_s}: no machine is that fast")


def _bytes_per_token(evidence: Evidence) -> int | None:
    """Return the bytes of a cached token of a shipped model on the embedded engine."""
    spec = evidence.spec
    folder = folder_of_model(spec, evidence.info.provenance, None)
    if spec.engine != "embedded" or folder is None:
        return None
    try:
        facts = read_model(folder)
        heads = facts.q_heads if spec.built_method.per_query_head else facts.kv_heads
        return facts.bytes_per_token(spec.dtype) * heads // facts.kv_heads
    except (KVBenchError, KeyError):
        return None


def account(kv: KVAccount) -> dict[str, float | int | None]:
    """Return what of an account follows from method, lengths and tokens alone."""
    names = ("peak_live", "logical", "events", "evicted", "bytes_read", "prefill_tokens")
    more = ("longest_prefill", "decode_tokens", "mean_decode_kv", "restored", "budget")
    return {name: getattr(kv, name) for name in (*names, *more)}
