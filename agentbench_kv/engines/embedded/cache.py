"""A session's KV rows, compacted in place in its slot.

Sessions with a `SharedPrefix` have a slot for the rows behind it only. Who would change the
prefix's rows copies them first.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from agentbench_kv.engines.core.rows import StoredLayer
from agentbench_kv.engines.embedded.slots import CachePools, SlotCache
from agentbench_kv.kernels import RowsBefore, compact, rope_rotate
from agentbench_kv.methods.base import LayerView


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
