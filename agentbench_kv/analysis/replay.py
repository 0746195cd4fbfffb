"""What an engine would hand a method at an event, taken from a capture."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agentbench_kv.analysis.attention import attention_sums
from agentbench_kv.analysis.captures import Capture
from agentbench_kv.errors import UsageError
from agentbench_kv.methods.base import LayerView, Method, Queries, QueryKind, QueryPlan, Selection
from agentbench_kv.methods.phases import Phase


@dataclass(frozen=True)
class Moment:
    """Everything `Method.select` takes, for one event; lists have one entry per layer."""

    layers: list[LayerView]
    queries: list[Queries]
    now: int  # logical length
    prompt: int = 0  # tokens of the first prefill
    phases: Tensor | None = None  # by logical position, [now]

    def select(self, method: Method) -> Selection:
        return method.select(
            self.layers, self.queries, self.now, prompt=self.prompt, phases=self.phases
        )


def ready(method: Method, capture: Capture, now: int) -> Method:
    """Return the method with what the capture knows of the model; `now` is its last event.

    UsageError if the method does not evict, or needs something the capture has not.
    """
    if not method.compresses:
        raise UsageError(f"{method.name} keeps every token: there is nothing to select")
    plan = method.query_plan()
    if plan.kind is QueryKind.PER_PHASE:
        capture.labels(method.label)
    if plan.kind is QueryKind.FUTURE and capture.before(now) == capture.length:
        raise UsageError(
            f"{method.label} needs tokens after the event: the capture ends at its event, position "
            f"{now}; give an earlier one with --now"
        )
    if not getattr(method, "needs_calibration", False):
        return method
    if capture.calibration is None:
        raise UsageError(
            f"{method.label} needs the model's statistics: the capture has no arrays q_mean_real, "
            "q_mean_imag, q_abs_mean and inv_freq"
        )
    return method.with_calibration(capture.calibration)


def cache_heads(capture: Capture, method: Method) -> int:
    """Return the heads of the method's cache: query heads if it has one per query head."""
    return capture.q_heads if method.per_query_head else capture.kv_heads


def moment_at(
    capture: Capture,
    method: Method,
    now: int,
    rows: Tensor | None = None,
    sums: Tensor | None = None,
) -> Moment:
    """Return what `method`, as `ready` returns it, is given at an event.

    Tokens of the capture at positions from `now` on are the future. `rows` [layers, heads, live]
    are those that are cached, ascending; all before the event if not given. `sums`, of the same
    shape, is the attention they got, if it is known already.
    """
    count = capture.before(now)
    kind = method.query_plan().kind
    heads = cache_heads(capture, method)
    if rows is None:
        rows = torch.arange(count).expand(capture.layers, heads, -1)
    layers = []
    for layer, held in enumerate(rows):
        known = None if sums is None else sums[layer]
        if known is None and kind is QueryKind.SUMS:
            known = _past_sums(capture, layer, count, heads).gather(-1, held)
        if known is None and kind is QueryKind.FUTURE:
            known = _future_sums(capture, layer, count, heads).gather(-1, held)
        keys, values = (gathered(source[layer], held) for source in (capture.k, capture.v))
        layers.append(LayerView(keys, values, capture.positions[held], known))
    return Moment(
        layers,
        kept_queries(capture, method.query_plan(), count),
        now,
        capture.prompt,
        phases_by_position(capture, now),
    )


def gathered(source: Tensor, rows: Tensor) -> Tensor:
    """Return rows [heads, live] of one layer's keys or values, [heads, live, head_dim], float32.

    Heads are query heads for a method with a cache per query head.
    """
    heads = torch.arange(rows.shape[0])[:, None] // (rows.shape[0] // source.shape[0])
    return source[heads, rows].float()


def _past_sums(capture: Capture, layer: int, count: int, heads: int) -> Tensor:
    """Return the attention [heads, count] that the first tokens got from their own queries."""
    places = capture.positions[:count]
    keys = _per_head(capture.k[layer, :, :count], heads)
    return attention_sums(capture.q[layer, :, :count], places, keys, places)


def _future_sums(capture: Capture, layer: int, count: int, heads: int) -> Tensor:
    """Return the attention [heads, count] that the first tokens get from all later queries."""
    places = capture.positions
    keys = _per_head(capture.k[layer], heads)
    return attention_sums(capture.q[layer, :, count:], places[count:], keys, places)[:, :count]


def _per_head(keys: Tensor, heads: int) -> Tensor:
    return keys.float().repeat_interleave(heads // keys.shape[0], 0)


def kept_queries(capture: Capture, plan: QueryPlan, count: int) -> list[Queries]:
    """Return the queries that a plan has kept of the first `count` tokens, for every layer."""
    chosen = torch.arange(0)
    if plan.kind is QueryKind.RECENT:
        chosen = torch.arange(max(0, count - plan.size), count)
    elif plan.kind is QueryKind.PER_PHASE:
        labels = capture.labels("this method")[:count]
        rings = [(labels == int(phase)).nonzero()[:, 0][-plan.size :] for phase in Phase]
        chosen = torch.cat(rings).sort().values
    phases = torch.full((capture.length,), int(Phase.OTHERS))
    if capture.phases is not None:
        phases = capture.phases
    return [
        Queries(layer[:, chosen].float(), capture.positions[chosen], phases[chosen])
        for layer in capture.q
    ]


def phases_by_position(capture: Capture, now: int) -> Tensor | None:
    """Return the phases [now] by logical position; positions the capture lacks are `others`."""
    if capture.phases is None:
        return None
    labels = torch.full((now,), int(Phase.OTHERS))
    count = capture.before(now)
    labels[capture.positions[:count]] = capture.phases[:count]
    return labels
