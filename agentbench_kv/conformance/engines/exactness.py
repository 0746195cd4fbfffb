"""Whether every token is the one a model blind to the evicted rows would have chosen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentbench_kv.conformance.engines.traces import EngineTrace, epochs
from agentbench_kv.conformance.masked_reference import cache_heads, reference_logits, visible
from agentbench_kv.conformance.result import CheckResult

__all__ = ["Choice", "check_reference", "logit_gap", "wrong_tokens"]

_MOST_ROTATED = 600
"""Tokens of a session of which the reference rotates every pair within seconds."""

Choice = tuple[int, int, int, float]
"""Position, the token generated there, the reference's, and the gap between their logits."""


def wrong_tokens(network: Any, trace: EngineTrace, positions: str = "logical") -> list[Choice]:
    """Return the tokens of a greedy session that are not the reference's first choice.

    Parameters
    ----------
    network : transformers causal LM
    trace : EngineTrace
        With the events the engine says it had.
    positions : str
        The method's.
    """
    wrong = []
    for epoch in epochs(trace):
        part = epoch.trace
        allowed = visible(part, network.config.num_hidden_layers, cache_heads(network, part))
        logits = reference_logits(network, part.tokens[:-1], allowed, positions=positions)
        for position in epoch.positions:
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
    read = {key: trace for key, trace in traces.items() if _readable(trace, positions)}
    for session, trace in read.items():
        if trace.kept_missing:
            return CheckResult(name, False, f"{session}: {trace.kept_missing}")
        wrong += [(session, each) for each in wrong_tokens(network, trace, positions)]
    tokens = sum(len(trace.decoded_at) for trace in read.values())
    if not wrong:
        events = sum(len(trace.events) for trace in read.values())
        return CheckResult(name, True, f"{tokens} tokens, {events} events{_left_out(traces, read)}")
    session, first = wrong[0]
    largest = max(gap for _, (*_, gap) in wrong)
    more = f"{len(wrong)} of {tokens} differ, largest logit gap {largest:.2e}"
    return CheckResult(name, False, f"{session}: {logit_gap(first)}; {more}")


def _readable(trace: EngineTrace, positions: str) -> bool:
    """Whether the reference can read a session; where positions are the cache's, it is slow."""
    return positions == "logical" or len(trace.tokens) <= _MOST_ROTATED


def _left_out(traces: Mapping[str, EngineTrace], read: Mapping[str, EngineTrace]) -> str:
    names = ", ".join(traces.keys() - read.keys())
    return f"; not {names}: too long to rotate every pair" if names else ""


def logit_gap(choice: Choice) -> str:
    """Say one differing token in words."""
    position, got, best, gap = choice
    return f"token {got} at {position}, reference {best}, logit gap {gap:.2e}"
