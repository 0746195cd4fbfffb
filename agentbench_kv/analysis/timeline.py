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
    """Counts of tokens per event, head and phase."""

    logical: list[int]  # tokens ever seen
    live: list[int]  # tokens per head before the event
    seen: Tensor  # of each phase ever seen, [events, 4]
    before: Tensor  # of each phase before the event, [events, layers, heads, 4]
    kept: Tensor  # and after it

    def mean_kept(self) -> Tensor:
        """Return the mean over layers and heads, [events, 4]."""
        return self.kept.double().mean((1, 2))

    def document(self) -> dict[str, Any]:
        """Return it as JSON data."""
        columns = {
            "logical": self.logical,
            "live": self.live,
            "seen": listed(self.seen),
            "mean_before": listed(self.before.double().mean((1, 2))),
            "mean_kept": listed(self.mean_kept()),
            "before": listed(self.before),
            "kept": listed(self.kept),
        }
        rows = zip(*columns.values(), strict=True)
        events = [dict(zip(columns, row, strict=True)) for row in rows]
        return {"analysis": "timeline", "phases": list(PHASE_NAMES), "events": events}


def trace_timeline(trace: Trace) -> Timeline:
    """Return the timeline of a trace; UsageError if it has no phases, or no event."""
    if trace.phases is None:
        raise UsageError("timeline needs the phase of every token: the trace has no array 'phase'")
    if not trace.events:
        raise UsageError("timeline: the session had no event, nothing was evicted")
    return phase_timeline(trace.events, trace.phases)


def phase_timeline(events: Sequence[EventTrace], phases: Tensor) -> Timeline:
    """Count the tokens of each phase before and after every event; phases are by position."""
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
