"""Where KV rows live: pools of equal slots, one per capacity, so that decode attention batches.

A session has one slot. It moves to a slot of twice the capacity when it outgrows its own, and to a
smaller one when an event left it nearly empty, so allocated memory follows live memory within a
small factor and pools shrink when their slots are given back.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SMALLEST = 256


@dataclass(frozen=True)
class CacheShape:
    """What a model's cache rows look like."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    with_sums: bool = False  # whether every row carries the attention it has got

    @property
    def bytes_per_token(self) -> int:
        """Keys and values of one token over all layers and heads."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize


class CachePool:
    """Slots of one capacity."""

    def __init__(self, shape: CacheShape, capacity: int) -> None:
        self.shape = shape
        self.capacity = capacity
        self._used: set[int] = set()
        self._allocate(0)

    @property
    def slots(self) -> int:
        return self.keys.shape[0]

    def take(self) -> int:
        """Take the lowest free slot, doubling the pool if there is none."""
        slot = next(i for i in range(self.slots + 1) if i not in self._used)
        if slot == self.slots:
            self._resize(max(1, 2 * self.slots))
        self._used.add(slot)
        return slot

    def give_back(self, slot: int) -> None:
        """Free a slot; memory goes back to the allocator when the pool's upper part is empty."""
        self._used.discard(slot)
        needed = max(self._used, default=-1) + 1
        if 4 * needed <= self.slots:
            self._resize(needed)

    def _allocate(self, slots: int) -> None:
        s, heads = self.shape, (slots, self.shape.layers, self.shape.kv_heads)
        # Zeros, not garbage: a masked row counts 0 times its value, and 0 times NaN is NaN.
        self.keys = torch.zeros(*heads, self.capacity, s.head_dim, dtype=s.dtype, device=s.device)
        self.values = torch.zeros_like(self.keys)
        # Original position of each row, and the attention it has got, if the shape has sums.
        self.positions = torch.zeros(*heads, self.capacity, dtype=torch.int64, device=s.device)
        self.sums = torch.zeros(*heads, self.capacity if s.with_sums else 0, device=s.device)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.keys, self.values, self.positions, self.sums

    def _resize(self, slots: int) -> None:
        old = self.tensors
        kept = min(slots, self.slots)
        self._allocate(slots)
        for source, target in zip(old, self.tensors, strict=True):
            target[:kept] = source[:kept]


class CachePools:
    """All pools of an engine, by capacity: powers of two from `SMALLEST`."""

    def __init__(self, shape: CacheShape) -> None:
        self.shape = shape
        self._pools: dict[int, CachePool] = {}

    def for_rows(self, rows: int) -> CachePool:
        """Return the pool whose slots are the smallest that hold `rows`."""
        capacity = SMALLEST
        while capacity < rows:
            capacity *= 2
        if capacity not in self._pools:
            self._pools[capacity] = CachePool(self.shape, capacity)
        return self._pools[capacity]

    @property
    def nbytes(self) -> int:
        return sum(pool.keys.nbytes + pool.values.nbytes for pool in self._pools.values())
