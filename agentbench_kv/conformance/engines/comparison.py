"""Where an engine's session is not what it should be.

Compared with the embedded engine: tokens, kept sets, accounting. Compared with the reference:
whether every token is the one a model blind to the evicted rows would have chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor

from agentbench_kv.conformance import CheckResult
from agentbench_kv.conformance.driver import SessionTrace, epochs
from agentbench_kv.conformance.engines.fixture import load_network
from agentbench_kv.conformance.reference import cache_size, reference_logits, visible
from agentbench_kv.engines.base import KVStats
from agentbench_kv.engines.embedded.model import model_path
from agentbench_kv.errors import UsageError
from agentbench_kv.run.spec import RunSpec

FIGURES = (
    "logical", "live", "peak_live", "evicted", "prefill_tokens", "longest_prefill",
    "decode_tokens", "decode_kv_sum", "bytes_read", "budget",
)  # fmt: skip
_MOST_ROTATED = 600
"""Tokens of a session of which the reference rotates every pair within seconds."""

Traces = Mapping[str, SessionTrace]
Problem = Callable[[SessionTrace, SessionTrace], str]
"""Says where the second session differs from the first; empty if it does not."""


def compare(name: str, expected: Traces, found: Traces, problem: Problem) -> CheckResult:
    """Check a property session by session; the detail is the first counterexample."""
    for session, trace in found.items():
        text = error_problem(trace) or problem(expected[session], trace)
        if text:
            return CheckResult(name, False, f"{session}: {text}")
    return CheckResult(name, True, f"{len(found)} sessions")


def error_problem(trace: SessionTrace) -> str:
    """Say what ended a session early; empty if nothing did."""
    return "" if trace.error is None else f"{type(trace.error).__name__}: {trace.error}"


def token_problem(expected: SessionTrace, found: SessionTrace) -> str:
    for turn, (want, got) in enumerate(zip(expected.turns, found.turns, strict=True)):
        if want != got:
            for index, (a, b) in enumerate(zip_longest(want, got, fillvalue="the end")):
                if a != b:
                    return f"turn {turn}, token {index}: {b} instead of {a}"
    return ""


def reason_problem(expected: SessionTrace, found: SessionTrace) -> str:
    if expected.reasons == found.reasons:
        return ""
    ended, wanted = (", ".join(map(str, each.reasons)) for each in (found, expected))
    return f"ended by {ended} instead of {wanted}"


def kept_problem(expected: SessionTrace, found: SessionTrace) -> str:
    if found.kept_missing:
        return found.kept_missing
    for number, (want, got) in enumerate(zip(expected.events, found.events, strict=False)):
        if want.logical != got.logical or want.kept.shape != got.kept.shape:
            return (
                f"event {number} at {got.logical} keeps {tuple(got.kept.shape)}, "
                f"expected {tuple(want.kept.shape)} at {want.logical}"
            )
        differ = (want.kept.sort(-1).values != got.kept.sort(-1).values).any(-1).nonzero()
        if len(differ):
            layer, head = differ[0].tolist()
            mine, theirs = set(got.kept[layer, head].tolist()), set(want.kept[layer, head].tolist())
            return (
                f"event {number}, layer {layer}, head {head} keeps {sorted(mine - theirs)[:5]} "
                f"instead of {sorted(theirs - mine)[:5]}"
            )
    return ""


def accounting_problem(expected: SessionTrace, found: SessionTrace) -> str:
    for turn, (want, got) in enumerate(zip(expected.after, found.after, strict=True)):
        text = _figures_problem(want, got)
        if text:
            return f"after turn {turn}: {text}"
    return _figures_problem(expected.stats, found.stats)


def _figures_problem(want: KVStats, got: KVStats) -> str:
    wrong = [
        f"{key} {getattr(got, key)}, expected {getattr(want, key)}"
        for key in FIGURES
        if getattr(got, key) != getattr(want, key)
    ]
    if _events(got) != _events(want):
        wrong.append(f"events {_events(got)}, expected {_events(want)}")
    # Rows that stay together need no move on an engine that fills a cache from their side.
    moved, expected = got.rows_moved, want.rows_moved
    if bool(moved) < bool(expected) or (moved and not got.events):
        wrong.append(f"rows_moved {moved}, the embedded engine's {expected}")
    return "; ".join(wrong)


def _events(stats: KVStats) -> list[tuple[int, int, int, int]]:
    return [(e.decoded, e.logical, e.live_before, e.live_after) for e in stats.events]


class WrongToken(NamedTuple):
    """A token that is not the reference's first choice."""

    position: int
    token: int
    best: int  # the reference's choice
    gap: float  # between their logits

    def __str__(self) -> str:
        where = f"token {self.token} at {self.position}"
        return f"{where}, reference {self.best}, logit gap {self.gap:.2e}"


def wrong_tokens(network: Any, trace: SessionTrace, positions: str = "logical") -> list[WrongToken]:
    """Return the tokens of a greedy session that are not the reference's first choice.

    The reference is blind to what the engine says it evicted; `positions` is the method's.
    """
    wrong = []
    for decoded_at, part in epochs(trace):
        logits = _logits(network, part, positions)
        for position in decoded_at:
            row, got = logits[position - 1], part.tokens[position]
            best = int(row.argmax())
            if best != got:
                wrong.append(WrongToken(position, got, best, float(row[best] - row[got])))
    return wrong


def _logits(network: Any, trace: SessionTrace, positions: str) -> Tensor:
    """Return the reference's logits [tokens - 1, vocab] of a session."""
    allowed = visible(trace, *cache_size(network, trace))
    return reference_logits(network, trace.tokens[:-1], allowed, positions=positions)


def check_reference(
    network: Any, traces: Mapping[str, SessionTrace], positions: str = "logical"
) -> CheckResult:
    """Check that every token of every session is the masked reference's first choice."""
    name = "tokens are the masked reference's"
    # Where positions are the cache's, the reference is too slow for a long session.
    read = {
        session: trace
        for session, trace in traces.items()
        if positions == "logical" or len(trace.tokens) <= _MOST_ROTATED
    }
    wrong: list[tuple[str, WrongToken]] = []
    for session, trace in read.items():
        if trace.kept_missing:
            return CheckResult(name, False, f"{session}: {trace.kept_missing}")
        wrong += [(session, each) for each in wrong_tokens(network, trace, positions)]
    tokens = sum(len(trace.decoded_at) for trace in read.values())
    if not wrong:
        events = sum(len(trace.events) for trace in read.values())
        skipped = ", ".join(traces.keys() - read.keys())
        note = f"; not {skipped}: too long to rotate every pair" if skipped else ""
        return CheckResult(name, True, f"{tokens} tokens, {events} events{note}")
    session, first = wrong[0]
    largest = max(each.gap for _, each in wrong)
    more = f"{len(wrong)} of {tokens} differ, largest logit gap {largest:.2e}"
    return CheckResult(name, False, f"{session}: {first}; {more}")


def decision_gap(
    spec: RunSpec, sample: str, turn: int, index: int, tokens: Sequence[int | None]
) -> float:
    """Return how far apart the logits of two tokens are where two engines diverged.

    `tokens` are the embedded engine's choice and the other's for token `index` of generation
    `turn`. The sample is played again on the embedded engine, greedily; the reference reads what
    came before the token, blind to what was evicted. UsageError if the session cannot be repeated.
    """
    mine, theirs = tokens
    if spec.temperature or mine is None or theirs is None:
        raise UsageError("one engine ended there, or the tokens were drawn at random")
    trace, outputs = _play(replace(spec, engine="embedded", engine_args={}), sample)
    if turn >= len(outputs) or index >= len(outputs[turn]) or outputs[turn][index] != mine:
        raise UsageError("played again, the embedded engine chose another token")
    number = sum(map(len, outputs[:turn])) + index
    # The session's last token was never fed.
    position = [*trace.decoded_at, len(trace.tokens)][number]
    events = [event for event in trace.events if event.logical < position]
    prefix = SessionTrace([*trace.tokens[:position], mine], events=events)
    network = load_network(model_path(spec.model))
    row = _logits(network, prefix, spec.built_method.positions)[-1]
    return float(row[mine] - row[theirs])


def _play(spec: RunSpec, sample: str) -> tuple[SessionTrace, Sequence[Sequence[int]]]:
    """Play a sample's first trial; return ids with events, and the ids of every generation."""
    from agentbench_kv.run.observe import trace_session

    trace, log, watched = trace_session(spec, sample)
    if watched.attempt.report.resets:
        raise UsageError("the session was started over on the way")
    decoded_at = torch.tensor(log.decoded).nonzero()[:, 0].tolist()
    tokens = [int(token) for token in log.tokens]
    played = SessionTrace(tokens, decoded_at=decoded_at, events=list(trace.events))
    return played, watched.attempt.report.outputs
