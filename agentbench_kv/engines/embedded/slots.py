"""Slots of equal capacity that sessions' KV rows lie in, so that decodes batch.

A session moves to a slot of twice the capacity when it outgrows its own, and to a smaller one when
an event left it nearly empty: allocated memory follows live memory within a small factor.

A fork shares its source's slot. Whoever appends behind all rows that others hold stays in it;
whoever would write over another's rows, or change rows in place, moves to one of its own first.
"""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import Tensor

from agentbench_kv.engines.core.rings import RowShape

SMALLEST = 256  # rows of a slot


class CachePool:
    """Slots of one capacity."""

    def __init__(self, shape: RowShape, capacity: int) -> None:
        self.shape = shape
        self.capacity = capacity
        self._users: dict[int, list[SlotCache]] = {}
        self.keys, self.values, self.positions, self.sums = self._zeros(0)

    @property
    def slots(self) -> int:
        return self.keys.shape[0]

    @property
    def used(self) -> int:
        """Bytes of keys and values in slots that somebody uses."""
        return len(self._users) * self.capacity * self.shape.bytes_per_token

    def take(self, user: SlotCache) -> int:
        """Take the lowest free slot, doubling the pool if there is none."""
        slot = next(i for i in range(self.slots + 1) if i not in self._users)
        if slot == self.slots:
            self._resize(max(1, 2 * self.slots))
        self._users[slot] = [user]
        return slot

    def join(self, slot: int, user: SlotCache) -> None:
        """Use a slot that others use."""
        self._users[slot].append(user)

    def others(self, slot: int, user: SlotCache) -> list[SlotCache]:
        """Return who else uses a slot."""
        return [other for other in self._users.get(slot, ()) if other is not user]

    def give_back(self, slot: int, user: SlotCache) -> None:
        """Free a slot unless others use it.

        Memory goes back to the allocator when the pool's upper part is empty.
        """
        self._users[slot] = self.others(slot, user)
        if self._users[slot]:
            return
        del self._users[slot]
        needed = max(self._users, default=-1) + 1
        if 4 * needed <= self.slots:
            # The smaller pool is a new one: without memory for it the large one does as well.
            with suppress(RuntimeError, MemoryError):
                self._resize(needed)

    def clear(self, slot: int, first: int) -> None:
        """Zero the rows of a slot, from `first` on, that may hold what is no number."""
        for held in self.tensors:
            held[slot, :, :, first:].zero_()

    def _zeros(self, slots: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return keys, values, and of each row its original position and the attention it got."""
        s, heads = self.shape, (slots, self.shape.layers, self.shape.kv_heads)
        # Zeros, not garbage: a masked row counts 0 times its value, and 0 times NaN is NaN.
        keys = torch.zeros(*heads, self.capacity, s.head_dim, dtype=s.dtype, device=s.device)
        positions = torch.zeros(*heads, self.capacity, dtype=torch.int64, device=s.device)
        sums = torch.zeros(*heads, self.capacity if s.with_sums else 0, device=s.device)
        return keys, torch.zeros_like(keys), positions, sums

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.keys, self.values, self.positions, self.sums

    def _resize(self, slots: int) -> None:
        # All of it, then the change: no memory for a part of it must not cost the others' rows.
        new = self._zeros(slots)
        kept = min(slots, self.slots)
        for source, target in zip(self.tensors, new, strict=True):
            target[:kept] = source[:kept]
        self.keys, self.values, self.positions, self.sums = new


class CachePools:
    """All pools of an engine, by capacity: powers of two from `SMALLEST`."""

    def __init__(self, shape: RowShape) -> None:
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

    @property
    def used(self) -> int:
        return sum(pool.used for pool in list(self._pools.values()))  # safe from any thread


class SlotCache:
    """A session's slot in a pool; taken by the first `reserve`, on the scheduler's thread."""

    def __init__(self, pools: CachePools) -> None:
        self.shape = pools.shape
        self._pools = pools
        self.pool = pools.for_rows(SMALLEST)
        self.slot = -1
        self.claimed = 0  # rows that are held, or that the next forward writes

    @property
    def keys(self) -> Tensor:
        return self.pool.keys[self.slot]

    @property
    def values(self) -> Tensor:
        return self.pool.values[self.slot]

    @property
    def nbytes(self) -> int:
        return 0 if self.slot < 0 else self.pool.capacity * self.shape.bytes_per_token

    @property
    def held(self) -> int:
        """Rows held per (layer, KV head) in the slot."""
        raise NotImplementedError

    @property
    def window(self) -> int | None:
        """Rows that a query sees, its own included; None: all that are held."""
        return None

    @property
    def next_row(self) -> int:
        """Row that the next token gets."""
        return self.held

    @property
    def rows_with_next(self) -> int:
        """Rows that the next token sees, itself included, from row 0 on."""
        return self.held + 1

    def rows_with(self, n: int) -> int:
        """Rows that the next n tokens see among them, themselves included."""
        raise NotImplementedError

    def _reserve(self, rows: int) -> None:
        """Take a slot for so many rows in all, or move to one."""
        if self.slot < 0:
            self.pool = self._pools.for_rows(rows)
            self.slot = self.pool.take(self)
        elif rows > self.pool.capacity or any(map(self._overwrites, self.others)):
            self._move(rows)
        self.claimed = rows

    @property
    def others(self) -> list[SlotCache]:
        """Who else uses the slot: forks, and what this one is a fork of."""
        return self.pool.others(self.slot, self)

    def _overwrites(self, other: SlotCache) -> bool:
        """Whether the next rows would be written over those of another cache in the slot."""
        raise NotImplementedError

    def _join(self, source: SlotCache) -> None:
        """Use the slot of another cache, which is at rest."""
        self.pool, self.slot = source.pool, source.slot
        self.claimed = source.claimed = source.held
        if self.slot >= 0:
            self.pool.join(self.slot, self)

    def own_slot(self) -> None:
        """Move to a slot of one's own, whose rows may be changed in place."""
        if self.others:
            self._move(self.held)

    def free(self, *, clear: bool = False) -> None:
        """Give the slot back, as zeros if asked to; the cache is unusable afterwards."""
        if self.slot >= 0:
            if clear:
                self.pool.clear(self.slot, max((other.claimed for other in self.others), default=0))
            slot, self.slot = self.slot, -1
            self.pool.give_back(slot, self)

    def _move(self, rows: int) -> None:
        target = self._pools.for_rows(rows)
        if target is self.pool and not self.others:
            return
        slot, end = target.take(self), self.held
        for old, new in zip(self.pool.tensors, target.tensors, strict=True):
            new[slot, :, :, :end] = old[self.slot, :, :, :end]
        self.pool.give_back(self.slot, self)
        self.pool, self.slot = target, slot
