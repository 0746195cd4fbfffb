"""What events did to tokens: each one's evictions, and how many of each phase were kept."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from agentbench_kv.analysis.angles import listed
from agentbench_kv.analysis.traces import ScoredEvent, Trace
from agentbench_kv.errors import UsageError
from agentbench_kv.methods.base import PHASE_NAMES, Phase


@dataclass(frozen=True)
class TokenEviction:
    """What one event did to one token, in the heads where it was evicted."""

    position: int
    event: int  # its number
    logical: int  # tokens ever seen then
    heads: Tensor  # (layer, head) of every head that evicted it, [n, 2]
    # Rank [n] of its score among the tokens that competed, 1 is the best; equal scores rank by
    # position, as they are kept.
    ranks: Tensor
    places: Tensor  # kept ones of those that competed [n]: the budget less the tokens always kept
    competed: Tensor  # [n]
    # Its score less the lowest score that was kept [n]: 0 or below; NaN if all places were taken by
    # tokens that are always kept.
    margins: Tensor

    def document(self) -> dict[str, Any]:
        """Return it as JSON data."""
        return {
            name: listed(value) if isinstance(value, Tensor) else value
            for name, value in vars(self).items()
        }


@dataclass(frozen=True)
class TokenAudit:
    """What became of one token."""

    position: int
    heads: int  # (layer, head)s there are
    held: int  # those that still held it after the last event
    evictions: list[TokenEviction]  # one for every event that evicted it somewhere, in order

    def document(self) -> dict[str, Any]:
        """Return it as JSON data."""
        return vars(self) | {"evictions": [eviction.document() for eviction in self.evictions]}


def audit(events: Sequence[ScoredEvent], positions: Collection[int]) -> list[TokenAudit]:
    """Say for every position at which events it was evicted, in which heads, by how much.

    `events` are all events of a session, in order; `positions` the logical ones of the tokens that
    hold an answer. Returns an audit per token, by position.
    """
    total = events[0].kept.shape[:2].numel() if events else 0
    found = []
    for position in sorted(set(positions)):
        every = (_eviction(position, number, event) for number, event in enumerate(events))
        evictions = [eviction for eviction in every if len(eviction.heads)]
        held = total - sum(len(eviction.heads) for eviction in evictions)
        found.append(TokenAudit(position, total, held, evictions))
    return found


def _eviction(position: int, number: int, event: ScoredEvent) -> TokenEviction:
    layer, head, row = ((event.positions == position) & ~event.survived).nonzero(as_tuple=True)
    kept = event.survived[layer, head]
    scores = event.scores[layer, head]
    competing = ~(scores.isnan() & kept)
    chosen = competing & kept
    scores = scores.nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    own = scores.gather(-1, row[:, None])
    earlier = torch.arange(event.live) < row[:, None]
    ahead = competing & ((scores > own) | ((scores == own) & earlier))
    lowest = scores.masked_fill(~chosen, torch.inf).amin(-1)
    heads, ranks = torch.stack([layer, head], -1), ahead.sum(-1) + 1
    places, competed = chosen.sum(-1), competing.sum(-1)
    margins = (own[:, 0] - lowest).masked_fill(~chosen.any(-1), torch.nan)
    return TokenEviction(position, number, event.logical, heads, ranks, places, competed, margins)


@dataclass(frozen=True)
class PhaseTimeline:
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


def trace_timeline(trace: Trace) -> PhaseTimeline:
    """Return the timeline of a trace; UsageError if it has no phases, or no event."""
    if trace.phases is None:
        raise UsageError("timeline needs the phase of every token: the trace has no array 'phase'")
    if not trace.events:
        raise UsageError("timeline: the session had no event, nothing was evicted")
    return phase_timeline(trace.events, trace.phases)


def phase_timeline(events: Sequence[ScoredEvent], phases: Tensor) -> PhaseTimeline:
    """Count the tokens of each phase before and after every event; phases are by position."""
    marks = torch.nn.functional.one_hot(phases, len(Phase))
    return PhaseTimeline(
        logical=[event.logical for event in events],
        live=[event.live for event in events],
        seen=torch.stack([marks[: event.logical].sum(0) for event in events]),
        before=torch.stack([marks[event.positions].sum(2) for event in events]),
        kept=torch.stack([marks[event.kept].sum(2) for event in events]),
    )
