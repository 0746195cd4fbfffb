"""Kept sets replayed: at every event the method chooses again from the reference's own tensors.

The masked reference reads the whole session in one pass, so its queries and keys know nothing of
prefill chunks, rings, running sums, slots or compaction. If the method keeps other tokens on them
than it kept in the engine, the engine gave it something else than the specification says.

Sessions are independent of those that run at the same time and of those before them.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from agentbench_kv.conformance import CheckResult
from agentbench_kv.conformance.reference import (
    IDLE,
    Event,
    ReferenceTensors,
    Rope,
    Trace,
    Turn,
    cache_heads,
    calibrated_for,
    drive,
    reference_logits,
    remove_rotary,
    short_turns,
    tiny_model,
    turn,
    visible,
)
from agentbench_kv.conformance.scenes import Scene, held_queries
from agentbench_kv.methods.base import LayerView, Method, Queries, QueryKind

MARGIN = 1e-4


"""Scores that differ by less of a head's range are equal: float32 cannot tell them apart."""


@dataclass(frozen=True)
class ReplayedEvent(Scene):
    """What a method is given at an event, made from the reference; rows by ascending position."""

    event: Event


def check_replay(name: str, model: Any, method: Method, trace: Trace) -> CheckResult:
    """Check that every event of a trace kept what the method keeps on the reference's tensors."""
    method = calibrated_for(model, method)
    for number, moment in enumerate(moments(model, method, trace)):
        selection = moment.select(method)
        problem = _difference(moment, moment.positions(selection), selection.scores)
        if problem:
            return CheckResult(f"{name}: kept sets replayed", False, f"event {number}: {problem}")
    return CheckResult(f"{name}: kept sets replayed", True, f"{len(trace.events)} events")


def _difference(moment: ReplayedEvent, expected: Tensor, scores: Tensor) -> str:
    event = moment.event
    if event.kept.shape != expected.shape:
        return f"kept {tuple(event.kept.shape)}, expected {tuple(expected.shape)}"
    places = moment.places
    for layer, head in itertools.product(*map(range, expected.shape[:2])):
        at = (layer, head)
        problem = _swapped(event.kept[at], expected[at], places[at], scores[at])
        if not problem and event.scores is not None:
            problem = _score_difference(event.scores[at], scores[at])
        if problem:
            return f"{problem} in layer {layer} head {head} at {event.logical}"
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


def moments(model: Any, method: Method, trace: Trace) -> list[ReplayedEvent]:
    """Rebuild what the method should have been given at every event of a trace."""
    layers, heads = int(model.config.num_hidden_layers), cache_heads(model, trace)
    capture = ReferenceTensors()
    allowed = visible(trace, layers, heads)
    tokens = trace.tokens[:-1]
    reference_logits(model, tokens, allowed, capture, positions=method.positions)
    rope = remove_rotary(copy.deepcopy(model)) if method.positions == "cache" else None
    found: list[ReplayedEvent] = []
    cached = torch.empty(layers, heads, 0, dtype=torch.int64)
    seen = 0
    for event in trace.events:
        new = torch.arange(seen, event.logical).expand(layers, heads, -1)
        cached = torch.cat([cached, new], -1)
        found.append(_moment(method, capture, trace, event, cached, rope))
        cached, seen = event.kept.sort(-1).values, event.logical
    return found


def _moment(
    method: Method,
    capture: ReferenceTensors,
    trace: Trace,
    event: Event,
    cached: Tensor,
    rope: Rope | None,
) -> ReplayedEvent:
    plan, live = method.query_plan(), cached.shape[-1]
    phases = torch.tensor(trace.phases[: event.logical])
    held = torch.tensor(held_queries(plan, phases.tolist(), event.logical), dtype=torch.int64)
    layers, queries = [], []
    for layer, places in enumerate(cached):
        keys, values = (_rows(each[layer], places) for each in (capture.keys, capture.values))
        vectors = capture.queries[layer][:, held]
        if rope is not None:
            # The end of the cache is where the next token goes, at every time.
            keys = turn(keys, torch.arange(live), rope).float()
            vectors = turn(vectors, live - (event.logical - held), rope).float()
        sums = None
        if plan.kind is QueryKind.SUMS:
            # Probability from the queries so far, mean over the group's query heads.
            weights = capture.weights[layer]
            got = weights[:, : event.logical].sum(1)
            got = got.reshape(len(places), -1, weights.shape[-1]).mean(1)
            sums = got.gather(1, places)
        layers.append(LayerView(keys, values, places, sums))
        queries.append(Queries(vectors, held, phases[held]))
    return ReplayedEvent(layers, queries, event.logical, trace.prompt, phases, event)


def _rows(rows: Tensor, places: Tensor) -> Tensor:
    """Gather [kv_heads, n, d] at places [heads, live]; heads may share a KV head."""
    repeated = rows.repeat_interleave(places.shape[0] // rows.shape[0], 0)
    return repeated.gather(1, places[..., None].expand(-1, -1, rows.shape[-1]))


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
