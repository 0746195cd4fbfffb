"""A session's KV rows: a slot of a pool, compacted in place."""

from __future__ import annotations

import torch
from torch import Tensor

from agentbench_kv.engines.embedded.pool import SMALLEST, CachePools
from agentbench_kv.kernels import compact
from agentbench_kv.methods.base import LayerView


class SessionCache:
    """Rows of one session.

    `length` is physical: rows held per (layer, KV head). Logical positions are kept row by row,
    because after an eviction heads hold different tokens. The slot is taken by the first `reserve`,
    so that only the thread that runs forwards ever touches a pool.
    """

    def __init__(self, pools: CachePools) -> None:
        self.shape = pools.shape
        self.length = 0
        self._pools = pools
        self.pool = pools.for_rows(SMALLEST)
        self.slot = -1

    @property
    def keys(self) -> Tensor:
        """Keys [layers, kv_heads, capacity, head_dim]."""
        return self.pool.keys[self.slot]

    @property
    def values(self) -> Tensor:
        """Values [layers, kv_heads, capacity, head_dim]."""
        return self.pool.values[self.slot]

    @property
    def positions(self) -> Tensor:
        """Original positions [layers, kv_heads, capacity], int64."""
        return self.pool.positions[self.slot]

    @property
    def nbytes(self) -> int:
        """Bytes of the session's slot for keys and values."""
        return 0 if self.slot < 0 else self.pool.capacity * self.shape.bytes_per_token

    def reserve(self, rows: int) -> None:
        """Make room for `rows` more rows."""
        if self.slot < 0:
            self.pool = self._pools.for_rows(rows)
            self.slot = self.pool.take()
        elif self.length + rows > self.pool.capacity:
            self._move(self.length + rows)

    def write(self, layer: int, keys: Tensor, values: Tensor) -> int:
        """Put new rows [kv_heads, n, head_dim] behind the last one; return the end.

        All layers are written before `advance` makes the rows count.
        """
        end = self.length + keys.shape[1]
        self.pool.keys[self.slot, layer, :, self.length : end] = keys
        self.pool.values[self.slot, layer, :, self.length : end] = values
        return end

    def advance(self, first_position: int, rows: int) -> None:
        """Count `rows` written rows, at logical positions from `first_position`."""
        end = self.length + rows
        if rows == 1:
            self.positions[:, :, self.length] = first_position
        else:
            self.positions[:, :, self.length : end] = torch.arange(
                first_position, first_position + rows, device=self.shape.device
            )
        self.length = end

    def layer_views(self) -> list[LayerView]:
        """Return the live rows of every layer."""
        end = self.length
        keys, values, positions = self.keys, self.values, self.positions
        return [
            LayerView(keys[i, :, :end], values[i, :, :end], positions[i, :, :end])
            for i in range(self.shape.layers)
        ]

    def keep(self, kept: Tensor) -> int:
        """Drop all rows but `kept` [layers, kv_heads, budget]; return rows moved.

        The session moves to a smaller slot if it now fills a quarter of its own or less.
        """
        moved = compact(self.keys, self.values, self.positions, kept, self.length)
        self.length = kept.shape[-1]
        if 4 * self.length <= self.pool.capacity:
            self._move(2 * self.length)
        return moved

    def free(self) -> None:
        """Give the slot back; the cache is unusable afterwards."""
        if self.slot >= 0:
            self.pool.give_back(self.slot)
            self.slot = -1

    def _move(self, rows: int) -> None:
        target = self._pools.for_rows(rows)
        if target is self.pool:
            return
        slot, end = target.take(), self.length
        target.keys[slot, :, :, :end] = self.keys[:, :, :end]
        target.values[slot, :, :, :end] = self.values[:, :, :end]
        target.positions[slot, :, :, :end] = self.positions[:, :, :end]
        self.pool.give_back(self.slot)
        self.pool, self.slot = target, slot
