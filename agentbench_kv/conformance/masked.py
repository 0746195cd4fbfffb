"""Masked-cache equality: an engine that evicts must give the logits of a model that masks.

The embedded engine is driven over several turns while its logits and what every event kept are
recorded (`driver`). The plain Hugging Face model then reads the same ids in one pass, every query
blind to the tokens that were evicted before it was computed (`reference`). If rows, positions,
masks or compaction were wrong anywhere, the logits differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from agentbench_kv.conformance import CheckResult
from agentbench_kv.conformance.driver import SessionTrace, TurnPlan, default_turns, drive
from agentbench_kv.conformance.reference import (
    TOLERANCE,
    largest_difference,
    reference_error,
    tiny_model,
)
from agentbench_kv.methods.base import Method


def check_masked_cache(
    method: Method,
    model: Any = None,
    *,
    turns: Sequence[TurnPlan] | None = None,
    interval: int = 32,
    min_events: int = 5,
    tolerance: float = TOLERANCE,
) -> list[CheckResult]:
    """Drive the embedded engine with `method` and compare it with the masked reference.

    By default `default_turns` on a tiny random Qwen3; a second session runs at the same time. The
    budget must be below the tokens of the turns for events to happen, of which a compressing method
    must have `min_events`; `interval` replaces the method's own, so that a short run has them.
    """
    model = tiny_model() if model is None else model
    vocab = int(model.config.vocab_size)
    first, second = list(turns or default_turns(vocab)), default_turns(vocab, 1)[2:4]
    method = replace(method, interval=interval)
    traces = drive(model, method, {"first": first, "second": second})
    error = reference_error(model, traces["second"].tokens[:200], method.positions)
    detail = f"largest logit difference {error:.2e} to eager attention without evictions"
    results = [CheckResult("reference is the plain model", error <= tolerance, detail)]
    for name, trace in traces.items():
        due = min_events if name == "first" else 0
        results += check_trace(name, model, method, trace, due, tolerance)
    return results


def check_trace(
    name: str,
    model: Any,
    method: Method,
    trace: SessionTrace,
    min_events: int = 0,
    tolerance: float = TOLERANCE,
) -> list[CheckResult]:
    """Check one session's trace: coverage, kept sets, accounting, and equality of the logits."""
    wrong = sorted(set(trace.decoded_at) ^ set(trace.logits))[:8]
    missing = f"logits are missing or unexpected at positions {wrong}" if wrong else ""
    problems = {
        "logits recorded": missing,
        "events": _event_problem(method, trace, min_events),
        "kept sets": _kept_problem(method, trace),
        "accounting": _accounting_problem(trace),
    }
    results = [CheckResult.unless(text, f"{name}: {key}") for key, text in problems.items()]
    ok, detail = False, "kept sets are not valid"
    if not problems["kept sets"]:
        largest = largest_difference(model, trace, method.positions)
        over = f"{len(trace.logits)} positions, {len(trace.events)} events"
        ok, detail = largest <= tolerance, f"largest logit difference {largest:.2e} over {over}"
    return [*results, CheckResult(f"{name}: masked-cache equality", ok, detail)]


def _event_problem(method: Method, trace: SessionTrace, min_events: int) -> str:
    if not method.compresses:
        return f"{len(trace.events)} events, expected none" if trace.events else ""
    got, due = [event.logical for event in trace.events], _due(method, trace)
    if got != due:
        return f"events at {got}, due at {due} with trigger={method.trigger}"
    few = len(trace.events) < min_events
    return f"{len(trace.events)} events, expected at least {min_events}" if few else ""


def _due(method: Method, trace: SessionTrace) -> list[int]:
    """Return the tokens seen at every event, from the meaning of the triggers alone."""
    generated, due, evicted = set(trace.decoded_at), [], 0
    for count, seen in enumerate(trace.decoded_at, 1):
        # `seen` tokens are in the cache when the one at that position is drawn.
        live, budget = seen - evicted, method.budget_at(seen)
        fires = {
            "every": count % method.interval == 0,
            "slack": live >= budget + method.interval,
            "turn": seen + 1 not in generated,
        }
        fires["prefill+every"] = fires["every"] or seen - 1 not in generated
        room = method.has_room(budget, method.protected(trace.prompt, trace.system))
        if fires[method.trigger] and live > budget and room:
            due.append(seen)
            evicted += live - budget
    return due


def _kept_problem(method: Method, trace: SessionTrace) -> str:
    """Kept positions must be `budget` distinct ones that were still cached."""
    cached: Tensor | None = None
    before = 0
    for number, event in enumerate(trace.events):
        kept = event.kept.sort(-1).values
        where = f"event {number} at {event.logical}: "
        budget = method.budget_at(event.logical)
        if kept.shape[-1] != budget:
            return f"{where}{kept.shape[-1]} rows kept, budget {budget}"
        if bool((kept[..., 1:] == kept[..., :-1]).any()):
            return f"{where}a position is kept twice in one head"
        if bool((kept < 0).any() or (kept >= event.logical).any()):
            return f"{where}a kept position is not in [0, {event.logical})"
        if cached is not None:
            again = (kept < before) & ~(kept[..., :, None] == cached[..., None, :]).any(-1)
            if bool(again.any()):
                return f"{where}position {int(kept[again][0])} is back after its eviction"
        cached, before = kept, event.logical
    return ""


def _accounting_problem(trace: SessionTrace) -> str:
    stats = trace.stats
    fed = len(trace.tokens) - 1
    evicted = sum(event.live_before - event.live_after for event in stats.events)
    figures = {
        "logical": (stats.logical, len(trace.tokens)),
        "decode_tokens": (stats.decode_tokens, len(trace.decoded_at)),
        "prefill_tokens": (stats.prefill_tokens, len(trace.tokens) - len(trace.decoded_at)),
        "evicted": (stats.evicted, evicted),
        "live": (stats.live, fed - evicted),
        "events": (
            [(event.logical, event.live_after) for event in stats.events],
            [(event.logical, event.kept.shape[-1]) for event in trace.events],
        ),
    }
    wrong = [f"{key} {got}, expected {want}" for key, (got, want) in figures.items() if got != want]
    return "; ".join(wrong)
