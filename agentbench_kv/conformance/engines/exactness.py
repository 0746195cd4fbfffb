"""Whether every token is the one a model blind to the evicted rows would have chosen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentbench_kv.conformance.engines.traces import EngineTrace, epochs
from agentbench_kv.conformance.masked_reference import cache_heads, reference_logits, visible
from agentbench_kv.conformance.result import CheckResult

_MOST_ROTATED = 600
"""Tokens of a session of which the reference rotates every pair within seconds."""

Choice = tuple[int, int, int, float]
"""Position, the token generated there, the reference's, and the gap between their logits."""


def wrong_tokens(network: Any, trace: EngineTrace, positions: str = "logical") -> list[Choice]:
    """Return the tokens of a greedy session that are not the reference's first choice.

    The reference is blind to what the engine says it evicted; `positions` is the method's.
    """
    wrong = []
    for decoded_at, part in epochs(trace):
        allowed = visible(part, network.config.num_hidden_layers, cache_heads(network, part))
        logits = reference_logits(network, part.tokens[:-1], allowed, positions=positions)
        for position in decoded_at:
            row, got = logits[position - 1], part.tokens[position]
            best = int(row.argmax())
            if best != got:
                wrong.append((position, got, best, float(row[best] - row[got])))
    return wrong


def check_reference(
    network: Any, traces: Mapping[str, EngineTrace], positions: str = "logical"
) -> CheckResult:
    """Check that every token of every session is the masked reference's first choice."""
    name, wrong = "tokens are the masked reference's", []
    # Where positions are the cache's, the reference is too slow for a long session.
    read = {
        session: trace
        for session, trace in traces.items()
        if positions == "logical" or len(trace.tokens) <= _MOST_ROTATED
    }
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
    largest = max(gap for _, (*_, gap) in wrong)
    more = f"{len(wrong)} of {tokens} differ, largest logit gap {largest:.2e}"
    return CheckResult(name, False, f"{session}: {describe_choice(first)}; {more}")


def describe_choice(choice: Choice) -> str:
    position, got, best, gap = choice
    return f"token {got} at {position}, reference {best}, logit gap {gap:.2e}"
