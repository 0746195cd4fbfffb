"""Cached rows and the order of their positions, by PyTorch's operations on any device."""

from __future__ import annotations

import torch
from torch import Tensor

SPARSE = 16
"""Positions seen per row held, above which sorting rows is cheaper than a table of positions."""


def by_position(positions: Tensor) -> tuple[Tensor, Tensor]:
    """Sort every head's rows by position.

    Parameters
    ----------
    positions : Tensor [layers, kv_heads, tokens], int64
        Distinct in every head, not negative.

    Returns
    -------
    positions, order : Tensor [layers, kv_heads, tokens], int64
        Ascending positions, and the row of each.
    """
    layers, heads, tokens = positions.shape
    seen = int(positions.max()) + 1 if positions.numel() else 0
    if seen <= SPARSE * tokens:
        # Without comparisons: write every row's number at its position, and read them in order.
        rows = torch.arange(tokens, device=positions.device).expand_as(positions)
        table = torch.full((layers, heads, seen), -1, dtype=torch.int64, device=positions.device)
        there = (table.scatter_(-1, positions, rows) >= 0).nonzero()[:, -1]
        if len(there) == positions.numel():
            ordered = there.reshape(positions.shape)
            return ordered, table.gather(-1, ordered)
    ordered, order = positions.sort(-1)
    return ordered, order


def ascending_rows(rows: Tensor, tokens: int) -> Tensor:
    """Sort distinct rows [layers, kv_heads, n], int64, below `tokens`."""
    marks = torch.zeros((*rows.shape[:2], tokens), dtype=torch.bool, device=rows.device)
    return marks.scatter_(-1, rows, True).nonzero()[:, -1].reshape(rows.shape)
