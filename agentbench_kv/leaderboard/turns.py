"""Do the turns of a trial add up to its record, and its transcript to both.

Are these all trials of the run, each with its own seed, and none with a second try for luck.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Any

from agentbench_kv.adapters.browser.answers import SEALED, unseal
from agentbench_kv.leaderboard.evidence import (
    CUT_OFF,
    Checks,
    Evidence,
    Note,
    Transcript,
    Wrong,
    differs,
    place,
)
from agentbench_kv.results.records import TrialRecord, TrialStatus, TurnRecord
from agentbench_kv.results.store import TrialKey, transcript_name
from agentbench_kv.run.trial import MAX_ATTEMPTS

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


_RETRIED = frozenset({TrialStatus.INFRA_ERROR, TrialStatus.USER_ERROR})


def check_count(evidence: Evidence) -> Checks:
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
            yield Wrong(
                f"sample {sample} trial {trial}", f"is beyond the {spec.trials} of the spec"
            )
    if spec.limit is not None and len(samples) > spec.limit:
        yield differs("samples", len(samples), spec.limit)
    for key, record in trials.items():
        if not record.finished:
            yield Wrong(
                place(key, "status"), f"is {record.status.value}: the trial is not finished"
            )


def check_seeds(evidence: Evidence) -> Checks:
    """Derive the seed of every attempt from spec, sample and trial."""
    for key, attempts in evidence.attempts.items():
        derived = evidence.spec.trial_seed(*key)
        for record in attempts:
            if record.seed != derived:
                yield differs(place(key, "seed"), record.seed, derived)


def check_attempts(evidence: Evidence) -> Checks:
    """Check that no record was superseded where the runner would not have tried again."""
    for key, attempts in evidence.attempts.items():
        if attempts[0].attempts != 1:
            yield differs(place(key, "attempts"), attempts[0].attempts, 1)
        yield from _check_order(key, attempts)
    again = sum(len(attempts) - 1 for attempts in evidence.attempts.values())
    if again:
        yield Note(f"{again} attempts are said to have been lost, and were repeated")


def _check_order(key: tuple[str, int], attempts: Sequence[TrialRecord]) -> Checks:
    for earlier, later in pairwise(attempts):
        spoilt = earlier.status is TrialStatus.USER_ERROR
        if earlier.status not in _RETRIED or (spoilt and earlier.attempts >= MAX_ATTEMPTS):
            said = f"a record with status {earlier.status.value} was superseded by a later one"
            yield Wrong(place(key, "status"), said)
        # A resumed run begins to count anew.
        allowed = {earlier.attempts + 1} | (set() if spoilt else {1})
        if later.attempts not in allowed or later.attempts > MAX_ATTEMPTS:
            yield differs(place(key, "attempts"), later.attempts, min(allowed))


def check_scores(evidence: Evidence) -> Checks:
    """Check that no part of a score has more right than asked."""
    for key, record in evidence.trials.items():
        for name, right in record.metrics.items():
            part = name.removesuffix("_right")
            asked = record.metrics.get(f"{part}_asked")
            if part == name or asked is None:
                continue
            if not isinstance(right, int | float) or not isinstance(asked, int | float):
                yield Wrong(place(key, f"metrics.{name}"), "is no number")
            elif not -asked <= right <= asked:
                yield Wrong(place(key, f"metrics.{name}"), f"is {right} of {asked} asked")


def check_unfounded(evidence: Evidence) -> Checks:
    """Check that turns belong to trials."""
    for key in sorted(evidence.turns.keys() - evidence.trials.keys())[:5]:
        yield Wrong(f"turns.jsonl: sample {key[0]} trial {key[1]}", "is no trial of the run")
