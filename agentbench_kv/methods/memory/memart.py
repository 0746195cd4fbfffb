"""MemArt: earlier sessions as KV blocks, found by attention and put before the prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from agentbench_kv.kernels import aabb_score
from agentbench_kv.methods.memory.bank import BlockIndex, MemoryBank
from agentbench_kv.methods.memory.base import Memory
from agentbench_kv.params import param

RANK_OFFSET = 60  # c of the reciprocal rank (MemArt, table 1, after Cormack et al., 2009)
_AT_ONCE = 1 << 24  # scores that are held at a time


@dataclass(frozen=True, kw_only=True)
class MemArt(Memory):
    """Before a prompt is read, every layer brings back the blocks that its tokens attend to most.

    A block is scored by the largest dot product that a query may have with one of its keys, both
    before RoPE; scores are normalised over the blocks for each query, and a mean over heads. In
    every layer the best blocks take positions from 0 on, in their old order, and the session comes
    behind them. Where the last of them does not fit, its first tokens do. One set for all layers is
    that of their mean relevance: the prompt is read once to find it, and again behind it.
    """

    name: ClassVar[str] = "memart"
    summary: ClassVar[str] = "earlier sessions as KV blocks, found by attention"
    source: ClassVar[str] = "MemArt, section 3.2"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "llama": {"topk": 128, "normalise": "softmax"},
        "qwen": {"topk": 256, "normalise": "rr"},
    }
    default_preset: ClassVar[str] = "llama"

    topk: int = param(128, "blocks that every layer brings back", low=1)
    block: int = param(16, "tokens of a block", low=1)
    normalise: str = param(
        "softmax", "over the blocks, of each query: softmax or 1 / (rank + 60)",
        choices=("softmax", "rr"),
    )  # fmt: skip
    aggregate: str = param("max", "over the prompt's tokens", choices=("max", "sum"))
    scale: str = param("off", "scores divided by sqrt(head_dim)", choices=("off", "on"))
    sets: str = param(
        "layer", "blocks of each layer's own, or one set for all, found by reading prompts twice",
        choices=("layer", "shared"), rare=True,
    )  # fmt: skip
    pick: str = param(
        "attention", "control: blocks by chance, or the last ones, instead",
        choices=("attention", "random", "last"), rare=True,
    )  # fmt: skip
    retrieval_rope: str = param(
        "raw", "queries as before RoPE, or at their last positions", choices=("raw", "last")
    )

    append: str = param(
        "off", "what finished turns read and wrote goes to the memory, too, for other sessions",
        choices=("off", "turns"), rare=True,
    )  # fmt: skip

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"memory_blocks", "force"})

    @property
    def passes(self) -> int:
        """How often a prompt is read; what controls pick is one set without reading it."""
        return 2 if self.sets == "shared" and self.pick == "attention" else 1

    def rows_of(self, bank: MemoryBank) -> int:
        """Return how many rows of a bank come back, in every layer."""
        return min(self.topk * self.block, bank.rows)

    def relevance(self, queries: Tensor, lows: Tensor, highs: Tensor) -> Tensor:
        """Score blocks for a prompt (equation 4): float32 [blocks].

        Queries [q_heads, n, head_dim]; boxes [kv_heads, blocks, head_dim].
        """
        if self.pick == "last":
            return torch.arange(lows.shape[1], dtype=torch.float32)
        if self.pick == "random":
            # By sizes, not values: those differ in their last bits from machine to machine.
            drawn = torch.Generator().manual_seed(queries.shape[1] << 32 | lows.shape[1])
            return torch.rand(lows.shape[1], generator=drawn)
        if self.scale == "on":
            queries = queries / queries.shape[-1] ** 0.5
        at_once = max(1, _AT_ONCE // (queries.shape[0] * lows.shape[1]))
        found = [
            self._normalised(aabb_score(part, lows, highs)).mean(0)
            for part in torch.split(queries, at_once, 1)
        ]
        return self._aggregated(torch.cat(found))

    def mean_relevance(self, layers: Sequence[Sequence[Tensor]]) -> Tensor:
        """Return the mean over layers of what they say of the parts of a prompt: [blocks]."""
        whole = [self._aggregated(torch.stack(list(parts))) for parts in layers]
        return torch.stack(whole).mean(0)

    def _aggregated(self, found: Tensor) -> Tensor:
        """Aggregate over tokens, or over parts of which each has been: [n, blocks] -> [blocks]."""
        return found.amax(0) if self.aggregate == "max" else found.sum(0)

    def _normalised(self, scores: Tensor) -> Tensor:
        if self.normalise == "softmax":
            return scores.softmax(-1)
        order = scores.argsort(dim=-1, descending=True, stable=True)
        ranks = torch.arange(1, scores.shape[-1] + 1, device=scores.device).expand_as(order)
        return torch.zeros_like(scores).scatter(-1, order, 1.0 / (ranks + RANK_OFFSET).float())

    def choose(self, relevance: Tensor, blocks: BlockIndex, rows: int) -> Tensor:
        """Return which rows [rows] of a bank come back, ascending; ties go to the older block."""
        order = relevance.argsort(descending=True, stable=True).cpu()
        sizes = blocks.sizes[order]
        left = (rows - (sizes.cumsum(0) - sizes)).clamp(min=0).minimum(sizes)
        starts, counts = blocks.starts[order][left > 0], left[left > 0]
        by_age = starts.argsort()
        starts, counts = starts[by_age], counts[by_age]
        firsts = counts.cumsum(0) - counts
        return torch.arange(rows) + (starts - firsts).repeat_interleave(counts)
