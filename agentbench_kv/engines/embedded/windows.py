"""KV rows of layers that see a window of the last tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from agentbench_kv.engines.embedded.slots import CachePools, SlotCache
from agentbench_kv.kernels import rope_rotate


class WindowCache(SlotCache):
    """The last rows of one session in layers that see a window: a ring, from position 0 on.

    Position p lies in row p modulo the window. Evictions leave it alone.
    """

    def __init__(self, pools: CachePools, window: int) -> None:
        super().__init__(pools)
        self._window = window
        self.fed = 0
        # Last rows of a prefill, by layer. They wait for `advance`, or a forward that fails halfway
        # would have overwritten what it needs when it is tried again.
        self._waiting: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def held(self) -> int:
        return min(self.fed, self._window)

    @property
    def window(self) -> int | None:
        return self._window

    @property
    def next_row(self) -> int:
        return self.fed % self._window

    @property
    def rows_with_next(self) -> int:
        return min(self.fed + 1, self._window)

    def rows_with(self, n: int) -> int:
        return min(self.held, self._window - 1) + n

    def reserve(self, rows: int) -> None:
        """Make room for more rows, of which a full window needs none."""
        self._reserve(min(self.fed + rows, self._window))

    def share(self, source: WindowCache) -> None:
        """Start with the rows of another cache, which is at rest, where they are."""
        self._join(source)
        self.fed = source.fed

    def _overwrites(self, other: SlotCache) -> bool:  # noqa: ARG002
        return True  # a ring's next row is one that others still see

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Take new rows [kv_heads, n, head_dim]; return those that they see, and themselves."""
        first = self.fed - self.rows_with(0)
        before = self._rows(first, self.fed)
        self._waiting[layer] = (keys[:, -self._window :], values[:, -self._window :])
        both = ((self.keys[layer], keys), (self.values[layer], values))
        seen_keys, seen_values = (torch.cat([old[:, before], new], 1) for old, new in both)
        return seen_keys, seen_values

    def copy_rows(self, other: WindowCache) -> None:
        """Take all rows of another cache; an empty one."""
        self._reserve(other.held)
        for own, held in zip(self.pool.tensors, other.pool.tensors, strict=True):
            own[self.slot, :, :, : other.held] = held[other.slot, :, :, : other.held]
        self.fed = other.fed

    def advance(self, rows: int) -> None:
        self.fed += rows
        for layer, (keys, values) in self._waiting.items():
            places = self._rows(self.fed - keys.shape[1], self.fed)
            self.keys[layer][:, places] = keys
            self.values[layer][:, places] = values
        self._waiting.clear()

    def rewind(self, fed: int) -> None:
        """Forget the rows from position `fed` on; none has been written over yet."""
        self.fed = self.claimed = fed

    def turn(self, by: int, frequencies: Tensor) -> None:
        """Turn all keys by some positions: what comes next is that much nearer to the start."""
        if self.slot >= 0 and self.held:
            self.own_slot()
            shifts = torch.full((1, 1, 1), by, device=self.shape.device)
            keys = self.keys[:, :, : self.held]
            rope_rotate(keys, shifts, frequencies, interleaved=self.shape.interleaved)

    def _rows(self, first: int, last: int) -> Tensor:
        return torch.arange(first, last, device=self.shape.device) % self._window
