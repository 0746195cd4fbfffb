"""Replaying a session's events over a capture, one after the other, each on what the last left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from agentbench_kv.analysis.attention import attention_sums
from agentbench_kv.analysis.captures import Capture
from agentbench_kv.analysis.replay import (
    Moment,
    future_sums,
    kept_queries,
    phases_by_position,
    ready,
)
from agentbench_kv.analysis.traces import EventTrace, Trace
from agentbench_kv.errors import UsageError
from agentbench_kv.methods.base import LayerView, Method, QueryKind
from agentbench_kv.methods.schedule import Schedule


def event_points(capture: Capture, method: Method) -> list[int]:
    """Return the logical lengths at which an engine would have run the method's events.

    An engine counts generated tokens. Where a capture does not say which those are (`decoded`),
    every token after the prompt counts as one.
    """
    decoded = capture.decoded
    if decoded is None:
        decoded = capture.positions >= capture.prompt
    starts = decoded & ~torch.nn.functional.pad(decoded, (1, 0))[:-1]
    # Whether the last token ends a turn cannot be known: say no.
    ends = decoded & ~torch.nn.functional.pad(decoded, (0, 1), value=True)[1:]
    marks = (capture.positions, decoded, starts, ends)
    schedule, points, live = Schedule(method), [], 0
    for position, is_decoded, first, last in zip(*(m.tolist() for m in marks), strict=True):
        # A token is sampled, and events run, when all before it are fed; it is fed afterwards.
        due = is_decoded and any(
            [
                first and schedule.after_prefill(live, position),
                schedule.after_decode(live, position),
                last and schedule.after_turn(live, position),
            ]
        )
        if due:
            points.append(position)
            live = method.budget_at(position)
        live += 1
    return points


@dataclass
class _Cache:
    """What is live: rows of the capture [layers, heads, live], ascending, and their sums."""

    rows: Tensor
    sums: Tensor


def replay(capture: Capture, method: Method, events: Sequence[int]) -> list[EventTrace]:
    """Run events over a capture as an engine would, each on what the one before has left.

    Parameters
    ----------
    capture : Capture
    method : Method
    events : sequence of int
        Logical lengths, ascending. One that finds no more than the budget live is passed over.

    Returns
    -------
    list of EventTrace

    Raises
    ------
    UsageError
        If events are out of order or past the capture, or the method cannot be replayed.
    """
    _check_events(capture, events)
    if method.positions == "cache":
        raise UsageError(
            f"{method.label} has positions=cache, a capture logical ones; "
            "add --set positions=logical"
        )
    method = ready(method, capture, max(events, default=0))
    heads = capture.q_heads if method.per_query_head else capture.kv_heads
    empty = torch.zeros(capture.layers, heads, 0)
    cache = _Cache(empty.long(), empty)
    traces = []
    start = 0
    with torch.inference_mode():
        for now in events:
            end = capture.before(now)
            _feed(capture, method, cache, start, end)
            start = end
            if cache.rows.shape[-1] > method.budget_at(now):
                traces.append(_run_event(capture, method, cache, now))
    return traces


def replay_trace(capture: Capture, method: Method) -> Trace:
    """Replay a capture at the events an engine would have had.

    Raises
    ------
    UsageError
        As `replay`, or if there would have been no event.
    """
    points = event_points(capture, method)
    events = replay(capture, method, points)
    if not events:
        raise UsageError(
            f"{method.label} would have had no event: the capture has {capture.length} tokens, "
            f"{capture.prompt} of them prompt; lower --budget or --set interval"
        )
    end = int(capture.positions[-1]) + 1
    meta = {
        "method": method.label,
        "settings": method.settings(),
        "budget": method.budget,
        "budget_share": method.share,
        "capture": capture.meta,
    }
    return Trace(events, phases_by_position(capture, end), meta)


def _check_events(capture: Capture, events: Sequence[int]) -> None:
    end = int(capture.positions[-1]) + 1
    for before, now in pairwise((0, *events)):
        if not before < now <= end:
            raise UsageError(f"event at {now}: expected ascending logical lengths up to {end}")


def _feed(capture: Capture, method: Method, cache: _Cache, start: int, end: int) -> None:
    """Append the capture's tokens [start, end), and what their queries attend to."""
    new = torch.arange(start, end).expand(*cache.rows.shape[:2], -1)
    cache.rows = torch.cat([cache.rows, new], -1)
    cache.sums = torch.cat([cache.sums, torch.zeros(new.shape)], -1)
    if method.query_plan().kind is not QueryKind.SUMS:
        return
    for layer, rows in enumerate(cache.rows):
        cache.sums[layer] += attention_sums(
            capture.q[layer, :, start:end],
            capture.positions[start:end],
            _gathered(capture.k[layer], rows),
            capture.positions[rows],
        )


def _gathered(source: Tensor, rows: Tensor) -> Tensor:
    """Return rows [heads, live] of one layer's keys or values, [heads, live, head_dim], float32."""
    heads = torch.arange(rows.shape[0])[:, None] // (rows.shape[0] // source.shape[0])
    return source[heads, rows].float()


def _run_event(capture: Capture, method: Method, cache: _Cache, now: int) -> EventTrace:
    moment = _moment(capture, method, cache, now)
    selection = moment.select(method)
    positions = torch.stack([view.positions for view in moment.layers])
    cache.rows = cache.rows.gather(-1, selection.kept)
    cache.sums = cache.sums.gather(-1, selection.kept)
    return EventTrace.from_selection(now, positions, selection)


def _moment(capture: Capture, method: Method, cache: _Cache, now: int) -> Moment:
    plan = method.query_plan()
    count = capture.before(now)
    layers = []
    for layer, rows in enumerate(cache.rows):
        sums = cache.sums[layer] if plan.kind is QueryKind.SUMS else None
        if plan.kind is QueryKind.FUTURE:
            sums = future_sums(capture, layer, count, rows.shape[0]).gather(-1, rows)
        keys, values = _gathered(capture.k[layer], rows), _gathered(capture.v[layer], rows)
        layers.append(LayerView(keys, values, capture.positions[rows], sums))
    return Moment(
        layers=layers,
        queries=kept_queries(capture, plan, count),
        now=now,
        prompt=capture.prompt,
        phases=phases_by_position(capture, now),
    )
