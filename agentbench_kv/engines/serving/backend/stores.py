"""Rows of a session in a paged cache whose rows are contiguous in memory, moved in place."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from agentbench_kv.kernels import compact as compact_rows
from agentbench_kv.kernels import paged, rope_rotate
from agentbench_kv.kernels.layout import PagedRows, gather_rows


class CopiedStore:
    """Copies [layers, kv_heads, live, head_dim] of rows in a layout that no kernel reads."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys = keys
        self.values = values

    def read(self) -> tuple[Tensor, Tensor]:
        return self.keys, self.values

    def keep(self, kept: Tensor, positions: Tensor, extras: Sequence[Tensor], *, sort: bool) -> int:
        moved = compact_rows(
            self.keys, self.values, positions, kept, positions.shape[-1], extras=extras, sort=sort
        )
        self.keys = self.keys[:, :, : kept.shape[-1]]
        self.values = self.values[:, :, : kept.shape[-1]]
        return moved

    def rotate(self, shifts: Tensor, frequencies: Tensor) -> None:
        rope_rotate(self.keys, shifts, frequencies)


class PagedStore:
    """Rows in blocks, found through a table [blocks], int32; kernels move them in place."""

    def __init__(self, keys: PagedRows, values: PagedRows, blocks: Tensor, live: int) -> None:
        self._keys = keys
        self._values = values
        self._table = blocks[None]
        self._live = live

    def read(self) -> tuple[Tensor, Tensor]:
        """Return copies of keys and values."""
        keys = gather_rows(self._keys, self._table, 0, self._live)
        return keys, gather_rows(self._values, self._table, 0, self._live)

    def keep(self, kept: Tensor, positions: Tensor, extras: Sequence[Tensor], *, sort: bool) -> int:
        lengths = torch.tensor([self._live], device=kept.device)
        # What goes along moves by the same plan, as one block per layer.
        along = [PagedRows.of(part[:, :, None].unbind(0), "hbr") for part in (positions, *extras)]
        one_block = torch.zeros(1, 1, dtype=torch.int32, device=kept.device)
        paged.compact(along, one_block, kept[None], lengths, sort=sort, check=False)
        moved = paged.compact(
            [self._keys, self._values], self._table, kept[None], lengths, sort=sort, check=False
        )
        self._live = kept.shape[-1]
        return int(moved)

    def rotate(self, shifts: Tensor, frequencies: Tensor) -> None:
        lengths = torch.tensor([shifts.shape[-1]], device=shifts.device)
        paged.rope_rotate(self._keys, self._table, lengths, shifts[None], frequencies)
