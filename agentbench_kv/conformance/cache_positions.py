"""Attention where a key's position is its row in the cache: what `positions=cache` has to equal.

Keys are stored before RoPE. Whenever a query is computed, every key it may see is rotated by its
row in the cache, and the query by its own, the last one, as StreamingLLM's authors do. Keys and
values themselves stay what they were when their token was read.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Rope(NamedTuple):
    """A model's rotary embedding."""

    frequencies: Tensor  # inverse, [head_dim / 2], float64
    factor: float  # its attention scaling


class _Unrotated(nn.Module):
    """Replaces a model's rotary embedding: cosines and sines of angle 0."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim

    def forward(self, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        ones = torch.ones(*position_ids.shape, self.head_dim, dtype=hidden.dtype)
        return ones, torch.zeros_like(ones)


def remove_rotary(model: Any) -> Rope:
    """Make a model's layers hand over queries and keys before RoPE; return what it was."""
    rotary = model.model.rotary_emb
    frequencies = rotary.inv_freq.double()
    model.model.rotary_emb = _Unrotated(2 * len(frequencies))
    return Rope(frequencies, float(getattr(rotary, "attention_scaling", 1.0)))


def relative_logits(query: Tensor, key: Tensor, rows: Tensor, rope: Rope) -> Tensor:
    """Return unscaled q·k [heads, n, n] in float64, every pair rotated by its distance.

    `query` and `key` [heads, n, head_dim] are before RoPE. `rows` [heads, n, n] is the position of
    each key when each query was computed; a query's own key is the last one.
    """
    own = rows.diagonal(dim1=-2, dim2=-1)[..., None]
    # Keys behind the query are not seen; their distance must only be an index.
    distance = (own - rows).clamp(min=0)
    q, k = _pairs(query), _pairs(key)
    angles = torch.arange(rows.shape[-1]).double()[:, None] * rope.frequencies
    total = torch.zeros(rows.shape, dtype=torch.float64)
    for f, table in enumerate(torch.polar(torch.ones_like(angles), angles).unbind(1)):
        product = q[..., f][:, :, None] * k[..., f].conj()[:, None, :]
        total += (product * table[distance]).real
    return total * rope.factor**2


def turn(vectors: Tensor, positions: Tensor, rope: Rope) -> Tensor:
    """Apply RoPE at `positions` [..., n] to vectors [..., n, head_dim], in float64."""
    angles = positions[..., None].double() * rope.frequencies
    turned = _pairs(vectors) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], -1) * rope.factor


def _pairs(vectors: Tensor) -> Tensor:
    first, second = vectors.double().chunk(2, -1)
    return torch.complex(first.contiguous(), second.contiguous())
