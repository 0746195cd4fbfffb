"""A session's KV rows, compacted in place: a slot of a pool of equal ones, so that decodes batch.

A session moves to a slot of twice the capacity when it outgrows its own, and to a smaller one when
an event left it nearly empty: allocated memory follows live memory within a small factor.

A fork shares its source's slot. Whoever appends behind all rows that others hold stays in it;
whoever would write over another's rows, or change rows in place, moves to one of its own first.

Sessions with a `SharedPrefix` have a slot for the rows behind it only. Who would change the
prefix's rows copies them first.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial

import torch
from torch import Tensor

from agentbench_kv.engines.core.rings import RowShape
from agentbench_kv.engines.core.rows import StoredLayer
from agentbench_kv.kernels import RowsBefore, compact, rope_rotate
from agentbench_kv.methods.base import LayerView

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
    def prefix(self) -> SharedPrefix | None:
        """Rows that come before those in the slot."""
        return None

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


class SharedPrefix:
    """The first rows of several sessions, held once and never changed; who leaves last frees them.

    `cache` is at rest, in a slot that nobody else uses once the sessions that read it stand behind.
    """

    def __init__(self, cache: SessionCache) -> None:
        self.cache = cache
        self.rows = cache.length
        self.readers = 0
        self._stored = True

    def join(self) -> SharedPrefix:
        self.readers += 1
        return self

    def leave(self) -> None:
        self.readers -= 1
        self._free_unread()

    def give_up(self) -> None:
        """Let the last reader free the rows: no session will begin with them any more."""
        self._stored = False
        self._free_unread()

    def _free_unread(self) -> None:
        if not self._stored and not self.readers:
            self.cache.free()

    def layer(self, layer: int) -> RowsBefore:
        cache, rows = self.cache, self.rows
        return RowsBefore(cache.keys[layer, :, :rows], cache.values[layer, :, :rows])


class SessionCache(SlotCache):
    """Rows of one session; `length` is physical: rows held per (layer, KV head), shared ones first.

    `keys` and `values` are [layers, kv_heads, capacity, head_dim], `positions` (original ones,
    int64) and `sums` (attention every row has got, if the shape has them) without the last axis.
    Logical positions are kept row by row, because after an eviction heads hold different tokens.
    """

    def __init__(self, pools: CachePools) -> None:
        super().__init__(pools)
        self.length = 0
        self._prefix: SharedPrefix | None = None

    @property
    def prefix(self) -> SharedPrefix | None:
        return self._prefix

    @property
    def shared(self) -> int:
        """First rows that are not in the slot."""
        return 0 if self._prefix is None else self._prefix.rows

    @property
    def held(self) -> int:
        return self.length - self.shared

    @property
    def rows_with_next(self) -> int:
        return self.length + 1

    @property
    def positions(self) -> Tensor:
        return self.pool.positions[self.slot]

    @property
    def sums(self) -> Tensor | None:
        return self.pool.sums[self.slot] if self.shape.with_sums else None

    def rows_with(self, n: int) -> int:
        return self.length + n

    def reserve(self, rows: int) -> None:
        """Make room for more rows."""
        self._reserve(self.held + rows)

    def share(self, source: SessionCache) -> None:
        """Start with the rows of another cache, which is at rest, where they are."""
        self._join(source)
        self.length = source.length
        self._prefix = None if source.prefix is None else source.prefix.join()

    def stand_behind(self, prefix: SharedPrefix) -> None:
        """Hold the rows of a prefix and none of one's own."""
        super().free()
        self._prefix, self.length, self.claimed = prefix.join(), prefix.rows, 0

    def take_in(self) -> None:
        """Copy shared first rows into a slot of one's own, before those behind them."""
        prefix = self._prefix
        if prefix is None:
            return
        target, first, end = self._pools.for_rows(self.length), prefix.rows, self.length
        slot = target.take(self)
        for shared, old, new in zip(
            prefix.cache.pool.tensors, self.pool.tensors, target.tensors, strict=True
        ):
            new[slot, :, :, :first] = shared[prefix.cache.slot, :, :, :first]
            if self.slot >= 0:
                new[slot, :, :, first:end] = old[self.slot, :, :, : end - first]
        super().free()
        self.pool, self.slot, self.claimed, self._prefix = target, slot, end, None
        prefix.leave()

    def own(self) -> None:
        """Have all rows in a slot of one's own: those of a shared prefix are copied."""
        self.take_in()
        self.own_slot()

    def free(self, *, clear: bool = False) -> None:
        super().free(clear=clear)
        if self._prefix is not None:
            self._prefix.leave()
            self._prefix = None

    def _overwrites(self, other: SlotCache) -> bool:
        # Every forward adds to the sums of all rows.
        return self.shape.with_sums or other.claimed > self.held

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Put new rows [kv_heads, n, head_dim] at the end; return all that are in the slot."""
        first, end = self.held, self.held + keys.shape[1]
        self.pool.keys[self.slot, layer, :, first:end] = keys
        self.pool.values[self.slot, layer, :, first:end] = values
        if self.shape.with_sums:
            self.pool.sums[self.slot, layer, :, first:end] = 0.0
        return self.keys[layer, :, :end], self.values[layer, :, :end]

    def advance(self, first_position: int, rows: int) -> None:
        first, end = self.held, self.held + rows
        if rows == 1:
            self.positions[:, :, first] = first_position
        else:
            self.positions[:, :, first:end] = torch.arange(
                first_position, first_position + rows, device=self.shape.device
            )
        self.length += rows

    def copy_rows(self, other: SessionCache) -> None:
        """Take all rows of another cache; an empty one of as many heads, or one per query head."""
        other.take_in()
        end, heads = other.length, self.shape.kv_heads // other.shape.kv_heads
        self._reserve(end)
        for own, held in zip(self.pool.tensors, other.pool.tensors, strict=True):
            if own.shape[3]:  # not the sums of a shape without them
                rows = held[other.slot, :, :, :end]
                own[self.slot, :, :, :end] = rows.repeat_interleave(heads, 1)
        self.length = end

    def row_positions(self) -> Tensor:
        """Return the original position of every row [layers, kv_heads, length], in cache order."""
        own = self.positions[:, :, : self.held]
        if self._prefix is None:
            return own
        cache = self._prefix.cache
        return torch.cat([cache.positions[:, :, : self.shared], own], 2)

    def _whole(self, part: str, layer: int) -> Tensor:
        """Return a layer's keys or values [kv_heads, length, head_dim], copied together."""
        shared = [] if self._prefix is None else [getattr(self._prefix.layer(layer), part)]
        return torch.cat([*shared, getattr(self, part)[layer, :, : self.held]], 1)

    def layer_views(self) -> list[LayerView]:
        end = self.length
        if self._prefix is not None:
            keys, values = partial(self._whole, "keys"), partial(self._whole, "values")
            return [
                StoredLayer(partial(keys, layer), partial(values, layer), positions)
                for layer, positions in enumerate(self.row_positions())
            ]
        held = [part[:, :, :end] for part in (self.keys, self.values, self.positions)]
        if self.sums is not None:
            held.append(self.sums[:, :, :end])
        return [LayerView(*rows) for rows in zip(*held, strict=True)]

    def keep(
        self, kept: Tensor, frequencies: Tensor | None = None, *, ordered: bool = False
    ) -> int:
        """Drop all rows but `kept` [layers, kv_heads, budget], ascending; return rows moved.

        With RoPE `frequencies` rows stay in order and keys turn to the position of their row;
        `ordered` alone keeps the order too, at the price of more moves. A shared prefix stays
        shared where all of it is kept as it is.
        """
        if frequencies is None and self._keeps_prefix(kept):
            self.own_slot()
            kept = kept[:, :, self.shared :] - self.shared
        else:
            self.own()
        extras = () if self.sums is None else (self.sums,)
        ordered = ordered or frequencies is not None
        moved = compact(
            self.keys, self.values, self.positions, kept, self.held, extras=extras, sort=ordered
        )
        self.length = self.shared + kept.shape[-1]
        if frequencies is not None:
            rows = torch.arange(self.length, device=kept.device)
            keys, turned = self.keys[:, :, : self.length], self.shape.interleaved
            rope_rotate(keys, rows - kept, frequencies, interleaved=turned)
        if 4 * self.held <= self.pool.capacity:
            self._move(2 * self.held)
        return moved

    def _keeps_prefix(self, kept: Tensor) -> bool:
        """Whether ascending rows [layers, kv_heads, n] begin with all that are shared, if any."""
        last = self.shared - 1
        return last < 0 or (kept.shape[-1] > self.shared and bool((kept[:, :, last] == last).all()))

    def cut(self, rows: int) -> None:
        """Drop all rows behind the first ones, in place: others in the slot see no change."""
        if rows < self.shared:
            self.take_in()
        self.length, self.claimed = rows, rows - self.shared
        if not self.others and 4 * self.claimed <= self.pool.capacity:
            self._move(2 * self.claimed)

    def insert(self, row: int, keys: Tensor, values: Tensor, first_position: int) -> int:
        """Put rows [layers, kv_heads, n, head_dim] before `row`; return how many others moved.

        Their logical positions count up from `first_position`.
        """
        n, end = keys.shape[2], self.length
        self.own()
        self.reserve(n)
        for held in (self.keys, self.values, self.positions):
            held[:, :, row + n : end + n] = held[:, :, row:end].clone()
        new = slice(row, row + n)
        self.keys[:, :, new], self.values[:, :, new] = keys, values
        labels = torch.arange(first_position, first_position + n, device=self.shape.device)
        self.positions[:, :, new] = labels
        self.length = end + n
        return (end - row) * self.shape.layers * self.shape.kv_heads


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
