"""Do the turns of a trial add up to its record, and its transcript to both."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Any

from agentbench_kv.adapters.browser.seal import SEALED, unseal
from agentbench_kv.leaderboard.evidence import CUT_OFF, Evidence, Transcript, place
from agentbench_kv.leaderboard.findings import Checks, Note, Wrong, differs
from agentbench_kv.results.reader import TrialKey
from agentbench_kv.results.records import TrialRecord, TrialStatus, TurnRecord
from agentbench_kv.results.rundir import transcript_name

OWN = frozenset({"embedded", "scripted"})
"""Engines whose turns account for every token; a server may have stopped one token later."""


def check_turns(evidence: Evidence) -> Checks:
    """Compare every trial with its turns."""
    exact = evidence.spec.engine in OWN
    for key, record in evidence.trials.items():
        turns = evidence.turns.get(key, [])
        if not record.usage.requests and record.status is not TrialStatus.SCORED:
            continue
        if record.prompt_sha is None:
            yield Wrong(place(key, "prompt_sha"), "is missing")
        if len(turns) != record.usage.requests or _gaps(turns):
            yield differs(place(key, "turns"), len(turns), record.usage.requests)
            continue
        for name, said, derived in _sums(record, turns, exact):
            # A session that was cut off may hold more than its last finished turn.
            if said < derived or (said > derived and record.status not in CUT_OFF):
                yield differs(place(key, name), said, derived)
        yield from _check_lengths(key, record, turns)
        yield from _check_times(key, record, turns)


def _gaps(turns: Sequence[TurnRecord]) -> bool:
    return any(turn.turn != place for place, turn in enumerate(turns))


def _sums(
    record: TrialRecord, turns: Sequence[TurnRecord], exact: bool
) -> list[tuple[str, int, int]]:
    def total(name: str) -> int:
        return sum(getattr(turn, name) for turn in turns)

    kv, usage = record.kv, record.usage
    found = [
        ("usage.prompt_tokens", usage.prompt_tokens, total("prompt_tokens")),
        ("usage.completion_tokens", usage.completion_tokens, total("output_tokens")),
        ("kv.events", kv.events, total("events")),
        ("kv.evicted", kv.evicted, total("evicted")),
        ("kv.restored", kv.restored, total("restored")),
        ("kv.prefill_tokens", kv.prefill_tokens, total("prefill_tokens")),
    ]
    if exact:
        found += [
            ("kv.decode_tokens", kv.decode_tokens, total("output_tokens")),
            ("kv.bytes_read", kv.bytes_read, total("kv_bytes_read")),
            ("kv.longest_prefill", kv.longest_prefill, max(t.prefill_tokens for t in turns)),
        ]
    return found


def _check_lengths(key: TrialKey, record: TrialRecord, turns: Sequence[TurnRecord]) -> Checks:
    """Check that a session only grows, and no turn holds more than was seen or the peak."""
    for turn in turns:
        seen = turn.prompt_tokens + turn.output_tokens
        for name in ("live_before", "live_after"):
            held, peak = getattr(turn, name), record.kv.peak_live
            if held > min(seen, peak):
                text = f"is {held}; the session has seen {seen}, kv.peak_live is {peak}"
                yield Wrong(place(key, f"turn {turn.turn}: {name}"), text)
        if sum(turn.phases.values()) > seen:
            yield differs(place(key, f"turn {turn.turn}: phases"), sum(turn.phases.values()), seen)
    if record.session_resets:
        return
    for earlier, later in pairwise(turns):
        if later.prompt_tokens < earlier.prompt_tokens + earlier.output_tokens:
            text = "is shorter than what the session held, and no reset is recorded"
            yield Wrong(place(key, f"turn {later.turn}: prompt_tokens"), text)


def _check_times(key: TrialKey, record: TrialRecord, turns: Sequence[TurnRecord]) -> Checks:
    """Check that a trial's times are the medians of its turns', which fit into its time."""
    timing = record.timing
    if record.status is not TrialStatus.SCORED:
        return
    for name in ("ttft_ms", "tpot_ms"):
        known = [value for turn in turns if (value := getattr(turn, name)) is not None]
        derived, said = median(known) if known else None, getattr(timing, name)
        if said != derived:
            yield differs(place(key, f"timing.{name}"), said, derived)
    took = sum(
        (turn.ttft_ms or 0.0) + (turn.tpot_ms or 0.0) * max(0, turn.output_tokens - 1)
        for turn in turns
    )
    if timing.e2e_s is None or took > 1000 * timing.e2e_s + 1:
        text = f"is {timing.e2e_s} s, its turns took {took / 1000:.3f} s"
        yield Wrong(place(key, "timing.e2e_s"), text)


def check_transcripts(evidence: Evidence) -> Checks:
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
    evidence: Evidence, key: TrialKey, record: TrialRecord, transcript: Transcript
) -> Checks:
    turns = evidence.turns.get(key, [])
    if not evidence.at_text_level:
        said = [len(ids) for ids in transcript.tokens if ids]
        derived = [turn.output_tokens for turn in turns if turn.output_tokens]
        if said != derived:
            yield differs(place(key, "transcript: tokens generated"), said, derived)
    if transcript.error != record.error:
        yield differs(place(key, "transcript: error"), transcript.error, record.error)
    if len(transcript.events) != record.kv.events:
        found = len(transcript.events)
        yield differs(place(key, "transcript: events"), found, record.kv.events)
    said_by = _assistant_messages(transcript.transcript)
    if record.status is TrialStatus.SCORED and said_by not in (None, len(turns)):
        yield differs(place(key, "transcript: assistant messages"), said_by, len(turns))
    yield from _check_events(key, record, transcript)


def _check_events(key: TrialKey, record: TrialRecord, transcript: Transcript) -> Checks:
    kv = record.kv
    for number, event in enumerate(transcript.events):
        fits = (
            0 <= event.live_after <= event.live_before <= kv.peak_live
            and 0 <= event.decoded <= kv.decode_tokens
            and event.live_before <= event.logical
            and event.rows_moved >= 0
        )
        if not fits:
            yield Wrong(place(key, f"transcript: event {number}"), f"{event} cannot be")
    evicted = sum(event.live_before - event.live_after for event in transcript.events)
    if evicted != kv.evicted:
        yield differs(place(key, "kv.evicted"), kv.evicted, evicted)


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
