"""A session and questions beside it as one sequence, with who sees whom.

Questions share what stands before them, as forks share a cache. What left is seen by what was
written before it did and by nothing later, as in the cache it leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from agentbench_kv.training.sidequest.rows import SideQuestFork, SideQuestRow


@dataclass(frozen=True)
class Layout:
    """What a network is called with."""

    ids: list[int]
    positions: list[int]
    seen: Tensor  # bool [of, by]: which tokens each one attends to

    def inputs(self, network: Any, begin: int = 0) -> dict[str, Tensor]:
        """Return the tensors for all tokens from `begin` on, those before it being cached."""
        if self.seen.equal(torch.ones_like(self.seen).tril()):
            mask = torch.ones(1, len(self.ids))  # attention is faster without a mask
        else:
            seen = self.seen[None, None, begin:]
            mask = torch.zeros(seen.shape, dtype=network.dtype)
            mask.masked_fill_(~seen, torch.finfo(network.dtype).min)
        return {
            "input_ids": torch.tensor([self.ids[begin:]], device=network.device),
            "position_ids": torch.tensor([self.positions[begin:]], device=network.device),
            "attention_mask": mask.to(network.device),
        }

    def then(self, token: int) -> Layout:
        """Return the layout with one more token, which sees what the last one does."""
        size = len(self.ids)
        seen = torch.zeros(size + 1, size + 1, dtype=torch.bool)
        seen[:size, :size] = self.seen
        seen[size, :size], seen[size, size] = self.seen[-1], True
        return Layout([*self.ids, token], [*self.positions, self.positions[-1] + 1], seen)


def lay_out(row: SideQuestRow, forks: Sequence[SideQuestFork], length: int) -> Layout:
    """Lay out the first `length` tokens of a session, and forks of it behind them."""
    ids, positions = row.ids[:length], list(range(length))
    size = length + sum(len(fork.ids) for fork in forks)
    seen = torch.zeros(size, size, dtype=torch.bool)
    seen[:length, :length] = torch.ones(length, length, dtype=torch.bool).tril()
    for begin, end, since in row.left:
        seen[since:length, begin:end] = False
    for fork in forks:
        first, last = len(ids), len(ids) + len(fork.ids)
        seen[first:last, : fork.at] = True
        for begin, end, since in row.left:
            if since <= fork.at:
                seen[first:last, begin:end] = False
        seen[first:last, first:last] = torch.ones(last - first, last - first).tril().bool()
        ids = [*ids, *fork.ids]
        positions += range(fork.at, fork.at + len(fork.ids))
    return Layout(ids, positions, seen)
