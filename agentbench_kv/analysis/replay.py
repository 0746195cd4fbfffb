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
    """Everything `Method.select` takes, for one event.

    Attributes
    ----------
    layers, queries : lists, one entry per layer
    now, prompt : int
        Logical length and tokens of the first prefill.
    phases : Tensor [now], int64, optional
        Phase by logical position.
    """

    layers: list[LayerView]
    queries: list[Queries]
    now: int
    prompt: int = 0
    phases: Tensor | None = None

    def select(self, method: Method) -> Selection:
        """Let the method choose what to keep."""
        return method.select(
            self.layers, self.queries, self.now, prompt=self.prompt, phases=self.phases
        )


def ready(method: Method, capture: Capture, now: int) -> Method:
    """Return the method with what the capture knows of the model.

    Parameters
    ----------
    method : Method
    capture : Capture
    now : int
        The last event that the method will run at.

    Raises
    ------
    UsageError
        If the method does not evict, or needs something the capture has not.
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


def moment_at(
    capture: Capture, method: Method, now: int, sums: list[Tensor] | None = None
) -> Moment:
    """Return what `method` is given at an event with nothing evicted before.

    Parameters
    ----------
    capture : Capture
    method : Method
        As `ready` returns it.
    now : int
        Logical length at the event; tokens at later positions are the future.
    sums : list of Tensor [heads, tokens], optional
        Sums of attention per layer, if they are known already.
    """
    count = capture.before(now)
    plan = method.query_plan()
    heads = capture.q_heads if method.per_query_head else capture.kv_heads
    layers = []
    for layer in range(capture.layers):
        keys, values = (per_head(rows[layer, :, :count], heads) for rows in (capture.k, capture.v))
        places = capture.positions[:count].expand(heads, -1)
        known = None if sums is None else sums[layer]
        if known is None and plan.kind is QueryKind.SUMS:
            known = past_sums(capture, layer, count, heads)
        if known is None and plan.kind is QueryKind.FUTURE:
            known = future_sums(capture, layer, count, heads)
        layers.append(LayerView(keys, values, places, known))
    return Moment(
        layers=layers,
        queries=kept_queries(capture, plan, count),
        now=now,
        prompt=capture.prompt,
        phases=phases_by_position(capture, now),
    )


def per_head(rows: Tensor, heads: int) -> Tensor:
    """Return keys or values of one layer as float32, repeated for as many heads.

    Heads are query heads for a method with a cache per query head.
    """
    return rows.float().repeat_interleave(heads // rows.shape[0], 0)


def past_sums(capture: Capture, layer: int, count: int, heads: int) -> Tensor:
    """Return the attention [heads, count] that the first tokens got from their own queries."""
    places = capture.positions[:count]
    keys = per_head(capture.k[layer, :, :count], heads)
    return attention_sums(capture.q[layer, :, :count], places, keys, places)


def future_sums(capture: Capture, layer: int, count: int, heads: int) -> Tensor:
    """Return the attention [heads, count] that the first tokens get from all later queries."""
    places = capture.positions
    keys = per_head(capture.k[layer], heads)
    return attention_sums(capture.q[layer, :, count:], places[count:], keys, places)[:, :count]


def kept_queries(capture: Capture, plan: QueryPlan, count: int) -> list[Queries]:
    """Return the queries that a plan has kept of the first `count` tokens, for every layer."""
    chosen = _kept_rows(capture, plan, count)
    phases = torch.full((capture.length,), int(Phase.OTHERS))
    if capture.phases is not None:
        phases = capture.phases
    return [
        Queries(capture.q[i][:, chosen].float(), capture.positions[chosen], phases[chosen])
        for i in range(capture.layers)
    ]


def _kept_rows(capture: Capture, plan: QueryPlan, count: int) -> Tensor:
    if plan.kind is QueryKind.RECENT:
        return torch.arange(max(0, count - plan.size), count)
    if plan.kind is not QueryKind.PER_PHASE:
        return torch.arange(0)
    labels = capture.labels("this method")[:count]
    rings = [(labels == int(phase)).nonzero()[:, 0][-plan.size :] for phase in Phase]
    return torch.cat(rings).sort().values


def phases_by_position(capture: Capture, now: int) -> Tensor | None:
    """Return the phases [now] by logical position; positions the capture lacks are `others`."""
    if capture.phases is None:
        return None
    labels = torch.full((now,), int(Phase.OTHERS))
    count = capture.before(now)
    labels[capture.positions[:count]] = capture.phases[:count]
    return labels
