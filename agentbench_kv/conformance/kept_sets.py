"""Kept sets replayed, and sessions compared with themselves in other company.

At every event the method chooses again from the reference's own tensors. The masked reference reads
the whole session in one pass, so its queries and keys know nothing of prefill chunks, rings,
running sums, slots or compaction. If the method keeps other tokens on them than it kept in the
engine, the engine gave it something else than the specification says.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from agentbench_kv.analysis.replay import MethodInput, gathered, held_queries
from agentbench_kv.analysis.traces import CacheEvent, ScoredEvent
from agentbench_kv.conformance import CheckResult, reference
from agentbench_kv.conformance.driver import (
    IDLE,
    SessionTrace,
    TurnPlan,
    calibrated_for,
    drive,
    short_turns,
)
from agentbench_kv.methods.base import LayerView, Method, Queries, QueryKind

MARGIN = 1e-4
"""Scores that differ by less of a head's range are equal: float32 cannot tell them apart."""


def check_replay(name: str, model: Any, method: Method, trace: SessionTrace) -> CheckResult:
    """Check that every event of a trace kept what the method keeps on the reference's tensors."""
    method, name = calibrated_for(model, method), f"{name}: kept sets replayed"
    inputs = reference_inputs(model, method, trace)
    for number, (given, event) in enumerate(zip(inputs, trace.events, strict=True)):
        problem = _difference(method, given, event)
        if problem:
            return CheckResult(name, False, f"event {number}: {problem}")
    return CheckResult(name, True, f"{len(trace.events)} events")


def _difference(method: Method, given: MethodInput, event: CacheEvent) -> str:
    selection = given.select(method)
    expected, scores, places = given.positions(selection), selection.scores, given.places
    if event.kept.shape != expected.shape:
        return f"kept {tuple(event.kept.shape)}, expected {tuple(expected.shape)}"
    for at in itertools.product(*map(range, expected.shape[:2])):
        problem = _swapped(event.kept[at], expected[at], places[at], scores[at])
        if not problem and isinstance(event, ScoredEvent):
            problem = _score_difference(event.scores[at], scores[at])
        if problem:
            return f"{problem} in layer {at[0]} head {at[1]} at {event.logical}"
    return ""


def _swapped(kept: Tensor, expected: Tensor, held: Tensor, scores: Tensor) -> str:
    """Compare kept positions; tokens whose scores are equal to float32's precision may swap."""
    got, want = set(kept.tolist()), set(expected.tolist())
    disputed = scores[torch.isin(held, torch.tensor(sorted(got ^ want)))]
    if not len(disputed) or bool(disputed.max() - disputed.min() <= _margin(scores)):
        return ""
    return f"kept {sorted(got - want)} instead of {sorted(want - got)}"


def _score_difference(got: Tensor, want: Tensor) -> str:
    if not got.isnan().equal(want.isnan()):
        return "other tokens are always kept"
    largest = float((got - want).abs().nan_to_num(0.0).max())
    return "" if largest <= _margin(want) else f"scores differ by {largest:.2e}"


def _margin(scores: Tensor) -> float:
    """Differences in scores that mean nothing."""
    competing = scores[~scores.isnan()]
    if not len(competing):
        return 0.0
    spread = float(competing.max() - competing.min())
    return max(MARGIN * spread, 1e-6 * float(competing.abs().max()))


def reference_inputs(model: Any, method: Method, trace: SessionTrace) -> list[MethodInput]:
    """Rebuild what the method should have been given at every event; rows go by position."""
    layers, heads = reference.cache_size(model, trace)
    capture = reference.ReferenceTensors()
    allowed = reference.visible(trace, layers, heads)
    reference.reference_logits(
        model, trace.tokens[:-1], allowed, capture, positions=method.positions
    )
    rope = None
    if method.positions == "cache":
        rope = reference.remove_rotary(copy.deepcopy(model), len(trace.tokens) - 1).full
    found = []
    cached = torch.empty(layers, heads, 0, dtype=torch.int64)
    seen = 0
    for event in trace.events:
        new = torch.arange(seen, event.logical).expand(layers, heads, -1)
        cached = torch.cat([cached, new], -1)
        found.append(_input_at(method, capture, trace, event.logical, cached, rope))
        cached, seen = event.kept.sort(-1).values, event.logical
    return found


def _input_at(
    method: Method,
    capture: reference.ReferenceTensors,
    trace: SessionTrace,
    now: int,
    cached: Tensor,
    rope: reference.Rope | None,
) -> MethodInput:
    plan, live, phases = method.query_plan(), cached.shape[-1], torch.tensor(trace.phases[:now])
    held = held_queries(plan, phases)
    layers, queries = [], []
    for layer, places in enumerate(cached):
        keys, values = (gathered(each[layer], places) for each in (capture.keys, capture.values))
        vectors = capture.queries[layer][:, held]
        if rope is not None:
            # The end of the cache is where the next token goes, at every time.
            keys = reference.rotated(keys, torch.arange(live), rope).float()
            vectors = reference.rotated(vectors, live - (now - held), rope).float()
        sums = None
        if plan.kind is QueryKind.SUMS:
            # Probability from the queries so far, mean over the group's query heads.
            got = capture.weights[layer][:, :now].sum(1)
            sums = got.reshape(len(places), -1, got.shape[-1]).mean(1).gather(1, places)
        layers.append(LayerView(keys, values, places, sums))
        queries.append(Queries(vectors, held, phases[held]))
    return MethodInput(layers, queries, now, trace.prompt, phases, trace.system)


def check_sessions(
    method: Method,
    model: Any = None,
    *,
    sessions: Mapping[str, Sequence[TurnPlan]] | None = None,
    interval: int = 16,
) -> list[CheckResult]:
    """Compare sessions that run alone with the same ones together and one after the other.

    By default three short sessions on a tiny random Qwen3. `interval` replaces the method's own, so
    that short sessions have events.
    """
    model = reference.tiny_model(layers=2) if model is None else model
    vocab = int(model.config.vocab_size)
    turns = {key: list(value) for key, value in (sessions or _sessions(vocab)).items()}
    often = replace(method, interval=interval)
    alone = {name: drive(model, often, {name: own})[name] for name, own in turns.items()}
    few = min(len(trace.events) for trace in alone.values()) if method.compresses else 1
    results = [CheckResult("every session has events", few > 0, "" if few else "one has none")]
    for label, together in (("beside others", True), ("after others", False)):
        traces = drive(model, often, turns, together=together)
        found = (compare_traces(alone[name], traces[name]) for name in turns)
        problems = [f"{name}: {text}" for name, text in zip(turns, found, strict=True) if text]
        name = f"a session {label} is as alone"
        results.append(CheckResult.unless("; ".join(problems), name))
    return results


def _sessions(vocab: int) -> dict[str, list[TurnPlan]]:
    """Three of unequal lengths: the second comes later and ends early, the third asks more."""
    long = short_turns(vocab, 2)
    long[0] = replace(long[0], prompt=[*long[0].prompt, *long[1].prompt])
    late = [IDLE, *short_turns(vocab, 1)[:2]]
    return {"a": short_turns(vocab, 0), "b": late, "c": long}


def compare_traces(expected: SessionTrace, found: SessionTrace) -> str:
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
    return "" if largest <= reference.TOLERANCE else f"logits differ by {largest:.2e}"
