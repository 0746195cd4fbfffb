"""Kept sets replayed: at every event the method chooses again from the reference's own tensors.

The masked reference reads the whole session in one pass, so its queries and keys know nothing of
prefill chunks, rings, running sums, slots or compaction. If the method keeps other tokens on them
than it kept in the engine, the engine gave it something else than the specification says.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from agentbench_kv.conformance.cache_positions import Rope, remove_rotary, turn
from agentbench_kv.conformance.masked_reference import (
    Capture,
    cache_heads,
    reference_logits,
    visible,
)
from agentbench_kv.conformance.result import CheckResult
from agentbench_kv.conformance.tracing import Event, Trace, calibrated_for
from agentbench_kv.methods.base import LayerView, Method, Queries, QueryKind, QueryPlan
from agentbench_kv.methods.phases import Phase

__all__ = ["Moment", "check_replay", "held_queries", "moments"]

MARGIN = 1e-4
"""Scores that differ by less of a head's range are equal: float32 cannot tell them apart."""


@dataclass(frozen=True)
class Moment:
    """What a method is given at one event, made from the reference; rows by ascending position."""

    event: Event
    layers: list[LayerView]
    queries: list[Queries]

    @property
    def places(self) -> Tensor:
        """Positions held before the event [layers, heads, tokens]."""
        return torch.stack([view.positions for view in self.layers])


def check_replay(name: str, model: Any, method: Method, trace: Trace) -> CheckResult:
    """Check that every event of a trace kept what the method keeps on the reference's tensors."""
    method = calibrated_for(model, method)
    phases = torch.tensor(trace.phases)
    for number, moment in enumerate(moments(model, method, trace)):
        logical = moment.event.logical
        selection = method.select(
            moment.layers, moment.queries, logical, trace.prompt, phases[:logical]
        )
        expected = moment.places.gather(-1, selection.kept)
        problem = _difference(moment, expected, selection.scores)
        if problem:
            return CheckResult(f"{name}: kept sets replayed", False, f"event {number}: {problem}")
    return CheckResult(f"{name}: kept sets replayed", True, f"{len(trace.events)} events")


def _difference(moment: Moment, expected: Tensor, scores: Tensor) -> str:
    """Say where an event's kept set or scores are not those expected, or nothing."""
    event = moment.event
    if event.kept.shape != expected.shape:
        return f"kept {tuple(event.kept.shape)}, expected {tuple(expected.shape)}"
    for layer in range(expected.shape[0]):
        for head in range(expected.shape[1]):
            row, held = scores[layer, head], moment.places[layer, head]
            problem = _swapped(event.kept[layer, head], expected[layer, head], held, row)
            if not problem and event.scores is not None:
                problem = _score_difference(event.scores[layer, head], row)
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


def moments(model: Any, method: Method, trace: Trace) -> list[Moment]:
    """Rebuild what the method should have been given at every event of a trace."""
    layers, heads = int(model.config.num_hidden_layers), cache_heads(model, trace)
    capture = Capture()
    allowed = visible(trace, layers, heads)
    tokens = trace.tokens[:-1]
    reference_logits(model, tokens, allowed, capture, positions=method.positions)
    rope = _rope(model) if method.positions == "cache" else None
    found: list[Moment] = []
    cached = torch.empty(layers, heads, 0, dtype=torch.int64)
    seen = 0
    for event in trace.events:
        new = torch.arange(seen, event.logical).expand(layers, heads, -1)
        cached = torch.cat([cached, new], -1)
        found.append(_moment(method.query_plan(), capture, trace, event, cached, rope))
        cached, seen = event.kept.sort(-1).values, event.logical
    return found


def _rope(model: Any) -> Rope:
    return remove_rotary(copy.deepcopy(model))


def _moment(
    plan: QueryPlan, capture: Capture, trace: Trace, event: Event, cached: Tensor, rope: Rope | None
) -> Moment:
    live = cached.shape[-1]
    held = torch.tensor(held_queries(plan, trace.phases, event.logical), dtype=torch.int64)
    phases = torch.tensor(trace.phases)[held]
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
            sums = _sums(capture.weights[layer], places, event.logical)
        layers.append(LayerView(keys, values, places, sums))
        queries.append(Queries(vectors, held, phases))
    return Moment(event, layers, queries)


def held_queries(plan: QueryPlan, phases: Sequence[int], logical: int) -> list[int]:
    """Return the positions whose queries an engine holds after `logical` tokens, ascending."""
    if plan.kind is QueryKind.RECENT:
        return list(range(max(0, logical - plan.size), logical))
    if plan.kind is QueryKind.PER_PHASE:
        rings = [[p for p in range(logical) if phases[p] == phase] for phase in Phase]
        return sorted(p for ring in rings for p in ring[-plan.size :])
    return []


def _rows(rows: Tensor, places: Tensor) -> Tensor:
    """Gather [kv_heads, n, d] at places [heads, live]; heads may share a KV head."""
    repeated = rows.repeat_interleave(places.shape[0] // rows.shape[0], 0)
    return repeated.gather(1, places[..., None].expand(-1, -1, rows.shape[-1]))


def _sums(weights: Tensor, places: Tensor, logical: int) -> Tensor:
    """Return the probability every place has got from the queries so far, mean over the group."""
    heads = places.shape[0]
    got = weights[:, :logical].sum(1).reshape(heads, -1, weights.shape[-1]).mean(1)
    return got.gather(1, places)
