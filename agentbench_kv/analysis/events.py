"""Replaying a session's events over a capture, one after the other, each on what the last left."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from agentbench_kv.analysis.attention import attention_sums
from agentbench_kv.analysis.captures import Capture
from agentbench_kv.analysis.replay import (
    cache_heads,
    gathered,
    moment_at,
    phases_by_position,
    ready,
)
from agentbench_kv.analysis.traces import EventTrace, Trace
from agentbench_kv.errors import UsageError
from agentbench_kv.methods.base import Method, QueryKind
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


def replay(capture: Capture, method: Method, events: Sequence[int]) -> list[EventTrace]:
    """Run events over a capture as an engine would, each on what the one before has left.

    Parameters
    ----------
    capture : Capture
    method : Method
    events : sequence of int
        Logical lengths, ascending. One that finds no more than the budget live is passed over.

    Raises
    ------
    UsageError
        If events are out of order or past the capture, or the method cannot be replayed.
    """
    last = int(capture.positions[-1]) + 1
    for before, now in pairwise((0, *events)):
        if not before < now <= last:
            raise UsageError(f"event at {now}: expected ascending logical lengths up to {last}")
    if method.positions == "cache":
        raise UsageError(
            f"{method.label} has positions=cache, a capture logical ones; "
            "add --set positions=logical"
        )
    method = ready(method, capture, max(events, default=0))
    cache = _Cache(capture, method)
    traces = []
    with torch.inference_mode():
        for now in events:
            cache.feed(capture.before(now))
            if cache.rows.shape[-1] > method.budget_at(now):
                traces.append(cache.run_event(now))
    return traces


class _Cache:
    """What is live: rows of the capture [layers, heads, live], ascending, and their sums."""

    def __init__(self, capture: Capture, method: Method) -> None:
        self._capture, self._method = capture, method
        self._with_sums = method.query_plan().kind is QueryKind.SUMS
        self._fed = 0
        self._sums = torch.zeros(capture.layers, cache_heads(capture, method), 0)
        self.rows = self._sums.long()

    def feed(self, end: int) -> None:
        """Append the capture's tokens up to `end`, and what their queries attend to."""
        start, capture = self._fed, self._capture
        new = torch.arange(start, end).expand(*self.rows.shape[:2], -1)
        self.rows = torch.cat([self.rows, new], -1)
        self._sums = torch.cat([self._sums, torch.zeros(new.shape)], -1)
        self._fed = end
        if self._with_sums:
            for layer, rows in enumerate(self.rows):
                self._sums[layer] += attention_sums(
                    capture.q[layer, :, start:end],
                    capture.positions[start:end],
                    gathered(capture.k[layer], rows),
                    capture.positions[rows],
                )

    def run_event(self, now: int) -> EventTrace:
        sums = self._sums if self._with_sums else None
        selection = moment_at(self._capture, self._method, now, self.rows, sums).select(
            self._method
        )
        positions = self._capture.positions[self.rows]
        self.rows = self.rows.gather(-1, selection.kept)
        self._sums = self._sums.gather(-1, selection.kept)
        return EventTrace.from_selection(now, positions, selection)


def replay_trace(capture: Capture, method: Method) -> Trace:
    """Replay a capture at the events an engine would have had; UsageError if there are none."""
    points = event_points(capture, method)
    events = replay(capture, method, points)
    if not events:
        raise UsageError(
            f"{method.label} would have had no event: the capture has {capture.length} tokens, "
            f"{capture.prompt} of them prompt; lower --budget or --set interval"
        )
    meta = {
        "method": method.label,
        "settings": method.settings(),
        "budget": method.budget,
        "budget_share": method.share,
        "capture": capture.meta,
    }
    return Trace(events, phases_by_position(capture, int(capture.positions[-1]) + 1), meta)
