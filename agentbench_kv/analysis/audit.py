"""The evidence audit: when were the tokens that held an answer evicted, and how narrowly."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from agentbench_kv.analysis.numbers import listed
from agentbench_kv.analysis.traces import EventTrace


@dataclass(frozen=True)
class Eviction:
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
class Evidence:
    """What became of one token."""

    position: int
    heads: int  # (layer, head)s there are
    held: int  # those that still held it after the last event
    evictions: list[Eviction]  # one for every event that evicted it somewhere, in order

    def document(self) -> dict[str, Any]:
        """Return it as JSON data."""
        return vars(self) | {"evictions": [eviction.document() for eviction in self.evictions]}


def audit(events: Sequence[EventTrace], positions: Collection[int]) -> list[Evidence]:
    """Say for every position at which events it was evicted, in which heads, by how much.

    Parameters
    ----------
    events : sequence of EventTrace
        All events of a session, in order.
    positions : collection of int
        Logical positions of the tokens that hold an answer.

    Returns
    -------
    list of Evidence
        By position.
    """
    total = events[0].kept.shape[:2].numel() if events else 0
    found = []
    for position in sorted(set(positions)):
        every = (_eviction(position, number, event) for number, event in enumerate(events))
        evictions = [eviction for eviction in every if len(eviction.heads)]
        held = total - sum(len(eviction.heads) for eviction in evictions)
        found.append(Evidence(position, total, held, evictions))
    return found


def _eviction(position: int, number: int, event: EventTrace) -> Eviction:
    layer, head, row = ((event.positions == position) & ~event.kept).nonzero(as_tuple=True)
    competing = ~(event.scores.isnan() & event.kept)[layer, head]
    chosen = competing & event.kept[layer, head]
    scores = event.scores[layer, head].nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    own = scores.gather(-1, row[:, None])
    earlier = torch.arange(event.live) < row[:, None]
    ahead = competing & ((scores > own) | ((scores == own) & earlier))
    lowest = scores.masked_fill(~chosen, torch.inf).amin(-1)
    return Eviction(
        position,
        number,
        event.logical,
        heads=torch.stack([layer, head], -1),
        ranks=ahead.sum(-1) + 1,
        places=chosen.sum(-1),
        competed=competing.sum(-1),
        margins=(own[:, 0] - lowest).masked_fill(~chosen.any(-1), torch.nan),
    )
