"""Rows of a session in a paged cache whose rows are contiguous in memory, moved in place."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from agentbench_kv.kernels import compact as compact_rows
from agentbench_kv.kernels import paged
from agentbench_kv.kernels.layout import PagedRows, gather_rows


class CopiedStore:
    """Rows copied out of a cache whose layout no kernel reads; `keys` and `values` go back packed."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys = keys
        self.values = values

    def read(self) -> tuple[Tensor, Tensor]:
        """Return keys and values."""
        return self.keys, self.values

    def keep(self, kept: Tensor, positions: Tensor, extras: Sequence[Tensor], *, sort: bool) -> int:
        """Move the kept rows of the copies to the front."""
        moved = compact_rows(
            self.keys, self.values, positions, kept, positions.shape[-1], extras=extras, sort=sort
        )
        self.keys = self.keys[:, :, : kept.shape[-1]]
        self.values = self.values[:, :, : kept.shape[-1]]
        return moved

    def rotate(self, shifts: Tensor, frequencies: Tensor) -> None:
        """Turn the copies' keys."""
        from agentbench_kv.kernels import rope_rotate

        rope_rotate(self.keys, shifts, frequencies)


class PagedStore:
    """Rows in blocks, found through a table; kernels move them where they lie."""

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
        """Move the kept rows to the front, block by block where they lie."""
        lengths = torch.tensor([self._live], device=kept.device)
        beside = [PagedRows.of(part[:, :, None].unbind(0), "hbr") for part in (positions, *extras)]
        _move_beside(beside, kept, lengths, sort)
        moved = paged.compact(
            [self._keys, self._values], self._table, kept[None], lengths, sort=sort, check=False
        )
        self._live = kept.shape[-1]
        return int(moved)

    def rotate(self, shifts: Tensor, frequencies: Tensor) -> None:
        """Turn the first rows' keys where they lie."""
        lengths = torch.tensor([shifts.shape[-1]], device=shifts.device)
        paged.rope_rotate(self._keys, self._table, lengths, shifts[None], frequencies)


def _move_beside(beside: Sequence[PagedRows], kept: Tensor, lengths: Tensor, sort: bool) -> None:
    """Move what lies beside the cache in one block per layer, by the same plan."""
    table = torch.zeros(1, 1, dtype=torch.int32, device=kept.device)
    paged.compact(beside, table, kept[None], lengths, sort=sort, check=False)
