"""Sessions are independent of those that run at the same time and of those before them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentbench_kv.conformance.masked_reference import tiny_model
from agentbench_kv.conformance.result import CheckResult
from agentbench_kv.conformance.tracing import IDLE, Trace, Turn, drive, short_turns
from agentbench_kv.methods.base import Method

TOLERANCE = 1e-4


def check_sessions(
    method: Method,
    model: Any = None,
    *,
    sessions: Mapping[str, Sequence[Turn]] | None = None,
    interval: int = 16,
) -> list[CheckResult]:
    """Compare sessions that run alone with the same ones together and one after the other.

    By default three short sessions on a tiny random Qwen3. `interval` replaces the method's own, so
    that short sessions have events.
    """
    model = tiny_model(layers=2) if model is None else model
    vocab = int(model.config.vocab_size)
    turns = {key: list(value) for key, value in (sessions or _sessions(vocab)).items()}
    often = replace(method, interval=interval)
    alone: dict[str, Trace] = {}
    for name, own in turns.items():
        alone |= drive(model, often, {name: own})
    few = min(len(trace.events) for trace in alone.values()) if method.compresses else 1
    results = [CheckResult("every session has events", few > 0, "" if few else "one has none")]
    for label, together in (("beside others", True), ("after others", False)):
        traces = drive(model, often, turns, together=together)
        found = (compare_traces(alone[name], traces[name]) for name in turns)
        problems = [f"{name}: {text}" for name, text in zip(turns, found, strict=True) if text]
        results.append(
            CheckResult(f"a session {label} is as alone", not problems, "; ".join(problems))
        )
    return results


def _sessions(vocab: int) -> dict[str, list[Turn]]:
    """Three of unequal lengths: the second comes later and ends early, the third asks more."""
    long = short_turns(vocab, 2)
    long[0] = Turn(long[0].prompt + long[1].prompt, long[0].decode)
    late = [IDLE, *short_turns(vocab, 1)[:2]]
    return {"a": short_turns(vocab, 0), "b": late, "c": long}


def compare_traces(expected: Trace, found: Trace) -> str:
    """Say where two traces of the same turns differ, or nothing."""
    if expected.tokens != found.tokens:
        pairs = enumerate(zip(expected.tokens, found.tokens, strict=False))
        first = next((i for i, (a, b) in pairs if a != b), len(found.tokens))
        return f"token {first} differs"
    if [e.logical for e in expected.events] != [e.logical for e in found.events]:
        return "events at other times"
    for number, (a, b) in enumerate(zip(expected.events, found.events, strict=True)):
        if not a.kept.sort(-1).values.equal(b.kept.sort(-1).values):
            return f"event {number} keeps other tokens"
    if expected.logits.keys() != found.logits.keys():
        return "logits at other positions"
    largest = max(float((expected.logits[p] - found.logits[p]).abs().max()) for p in found.logits)
    return "" if largest <= TOLERANCE else f"logits differ by {largest:.2e}"
