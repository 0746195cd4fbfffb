"""The timeline: how many of the kept tokens belong to each phase, event by event."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from agentbench_kv.analysis.numbers import listed
from agentbench_kv.analysis.traces import EventTrace, Trace
from agentbench_kv.errors import UsageError
from agentbench_kv.methods.phases import PHASE_NAMES, Phase


@dataclass(frozen=True)
class Timeline:
    """Counts per event, head and phase.

    Attributes
    ----------
    logical, live : list of int
        Tokens ever seen, and tokens per head before the event.
    seen : Tensor [events, 4], int64
        Tokens of each phase ever seen.
    before, kept : Tensor [events, layers, heads, 4], int64
        Tokens of each phase before and after the event.
    """

    logical: list[int]
    live: list[int]
    seen: Tensor
    before: Tensor
    kept: Tensor

    def mean_kept(self) -> Tensor:
        """Return the mean over layers and heads, [events, 4]."""
        return self.kept.double().mean((1, 2))

    def mean_before(self) -> Tensor:
        """Return the mean over layers and heads before the event, [events, 4]."""
        return self.before.double().mean((1, 2))

    def document(self) -> dict[str, Any]:
        """Return it as JSON data."""
        names = ("logical", "live", "seen", "mean_before", "mean_kept", "before", "kept")
        columns = zip(
            self.logical,
            self.live,
            *(listed(t) for t in (self.seen, self.mean_before(), self.mean_kept())),
            *(listed(t) for t in (self.before, self.kept)),
            strict=True,
        )
        events = [dict(zip(names, column, strict=True)) for column in columns]
        return {"analysis": "timeline", "phases": list(PHASE_NAMES), "events": events}


def trace_timeline(trace: Trace) -> Timeline:
    """Return the timeline of a trace.

    Raises
    ------
    UsageError
        If it has no phases, or no event.
    """
    if trace.phases is None:
        raise UsageError("timeline needs the phase of every token: the trace has no array 'phase'")
    if not trace.events:
        raise UsageError("timeline: the session had no event, nothing was evicted")
    return phase_timeline(trace.events, trace.phases)


def phase_timeline(events: Sequence[EventTrace], phases: Tensor) -> Timeline:
    """Count the tokens of each phase before and after every event.

    Parameters
    ----------
    events : sequence of EventTrace
        At least one.
    phases : Tensor [tokens], int64
        Phase by logical position.
    """
    marks = torch.nn.functional.one_hot(phases, len(Phase))
    before = [marks[event.positions] for event in events]
    return Timeline(
        logical=[event.logical for event in events],
        live=[event.live for event in events],
        seen=torch.stack([marks[: event.logical].sum(0) for event in events]),
        before=torch.stack([rows.sum(2) for rows in before]),
        kept=torch.stack(
            [(rows * e.kept[..., None]).sum(2) for rows, e in zip(before, events, strict=True)]
        ),
    )
