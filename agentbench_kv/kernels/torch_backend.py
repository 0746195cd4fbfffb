"""The reference implementation in PyTorch; runs on any device."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


class TorchBackend:
    """PyTorch operations, no compilation."""

    name = "torch"

    def ring_write(self, ring: Tensor, rows: Tensor, slots: Tensor) -> None:
        """Scatter `rows` to `slots`."""
        ring.index_copy_(0, slots, rows.to(ring.dtype))

    def attention_mass(
        self,
        queries: Tensor,
        keys: Tensor,
        gqa: str,
        query_positions: Tensor | None,
        key_positions: Tensor | None,
    ) -> Tensor:
        """Score keys by the mean attention they get."""
        kv_heads, _, head_dim = keys.shape
        heads, n, _ = queries.shape
        grouped = queries.reshape(kv_heads, heads // kv_heads, n, head_dim)
        logits = _logits(grouped.float(), keys.float())
        causal = query_positions is not None and key_positions is not None
        if query_positions is not None and key_positions is not None:
            later = key_positions[:, None, None, :] > query_positions[None, None, :, None]
            logits = logits.masked_fill(later, float("-inf"))
        if gqa == "max_logit":
            logits = logits.amax(1, keepdim=True)
        probs = torch.softmax(logits, -1)
        if causal:
            # A query that sees no key gives no mass; its softmax alone would be NaN.
            probs = probs.masked_fill(torch.isneginf(logits), 0.0)
        return _merge_group(probs.sum(2) / max(n, 1), gqa)

    def select_top(self, scores: Tensor, budget: int, always: Tensor | None) -> Tensor:
        """Take the rows above the threshold, then the first of those that equal it."""
        ranked = _sortable(scores)
        if always is not None:
            ranked = ranked.masked_fill(always, torch.iinfo(torch.int64).max)
        if budget >= ranked.shape[-1]:
            every = torch.arange(ranked.shape[-1], device=scores.device)
            return every.expand(*ranked.shape[:-1], -1).contiguous()
        threshold = ranked.topk(budget, -1).values[..., -1:]
        above = ranked > threshold
        level = ranked == threshold
        room = budget - above.sum(-1, keepdim=True)
        kept = above | (level & (level.cumsum(-1) <= room))
        return kept.nonzero()[:, -1].reshape(*ranked.shape[:-1], budget)

    def compact(self, caches: Sequence[Tensor], kept: Tensor, length: int, sort: bool) -> int:
        """Move rows by advanced indexing over flattened (layer, head)s."""
        layers, heads, budget = kept.shape
        flat = kept.reshape(layers * heads, budget)
        row, source, target = _sorted_moves(flat) if sort else _hole_moves(flat, length)
        layer, head = row // heads, row % heads
        for cache in caches:
            cache[layer, head, target] = cache[layer, head, source]
        return int(row.numel())


def _logits(grouped: Tensor, keys: Tensor) -> Tensor:
    """[kv_heads, group, n, d] x [kv_heads, tokens, d] -> [kv_heads, group, n, tokens]."""
    kv_heads, group, n, head_dim = grouped.shape
    flat = grouped.reshape(kv_heads, group * n, head_dim) / math.sqrt(head_dim)
    return torch.bmm(flat, keys.transpose(1, 2)).reshape(kv_heads, group, n, keys.shape[1])


def _sortable(scores: Tensor) -> Tensor:
    """Map scores to int64 of the same order: exact for float64, one zero, NaN below everything."""
    bits = (scores.double() + 0.0).view(torch.int64)
    ordered = bits ^ ((bits >> 63) & torch.iinfo(torch.int64).max)
    return ordered.masked_fill(torch.isnan(scores), torch.iinfo(torch.int64).min)


def _merge_group(mass: Tensor, gqa: str) -> Tensor:
    if gqa == "per_head":
        return mass
    return mass.amax(1) if gqa == "max_prob" else mass.mean(1)


_Moves = tuple[Tensor, Tensor, Tensor]


def _hole_moves(kept: Tensor, length: int) -> _Moves:
    """Pair the kept rows past the new end with the holes before it: (row of kept, from, to)."""
    budget = kept.shape[1]
    is_kept = torch.zeros(kept.shape[0], length, dtype=torch.bool, device=kept.device)
    is_kept.scatter_(1, kept, True)
    row, hole = (~is_kept[:, :budget]).nonzero(as_tuple=True)
    _, late = is_kept[:, budget:].nonzero(as_tuple=True)
    return row, late + budget, hole


def _sorted_moves(kept: Tensor) -> _Moves:
    """Every kept row whose index changes: (row of kept, from, to)."""
    index = torch.arange(kept.shape[1], device=kept.device).expand_as(kept)
    row, slot = (kept != index).nonzero(as_tuple=True)
    return row, kept[row, slot], slot
