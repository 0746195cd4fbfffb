"""KV rows that lie in blocks: the memory layouts of the engines, as views of one form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

SPARSE = 16  # positions seen per row, above which sorting rows is cheaper than a table of positions


@dataclass(frozen=True)
class RowsBefore:
    """A session's first rows in one layer, which lie elsewhere: other sessions read them too."""

    keys: Tensor  # [kv_heads, rows, head_dim], a head's rows one behind the other
    values: Tensor

    def __post_init__(self) -> None:
        size = self.keys.shape[2]
        wanted = (self.keys.shape, (self.keys.stride(0), size, 1))
        for part in (self.keys, self.values):
            if (part.shape, part.stride()) != wanted:
                raise ValueError(f"rows {tuple(part.shape)} do not lie one behind the other")


@dataclass(frozen=True)
class SeenRows:
    """Which cached rows each query sees: those up to its own, of its session's last ones.

    Session s holds `lengths[s]` rows in rows 0.., at least `queries`, its queries' own last. Rows
    that lie before them elsewhere are counted, and come first.
    """

    lengths: Tensor  # [sessions], int64
    longest: int
    queries: int  # of each session
    window: int | None = None  # rows that a query sees, its own included; None: all before it

    @cached_property
    def mask(self) -> Tensor:
        """True where a query sees a row, [sessions, 1, queries, longest]."""
        rows = torch.arange(self.longest, device=self.lengths.device)
        ends = torch.arange(1, self.queries + 1, device=rows.device) - self.queries
        ends = (self.lengths[:, None] + ends)[..., None]  # [sessions, queries, 1]
        seen = rows < ends
        if self.window is not None:
            seen &= rows >= ends - self.window
        return seen[:, None]


@dataclass(frozen=True)
class PagedRows:
    """Keys, values, positions, or anything else of which every cached token has a row per head.

    Row `r` of a session lies in block `table[session, r // block_size]`. vLLM's
    `[blocks, heads, block, 2·d]` is `of(cache[..., :d], "bhrd")` for keys, SGLang's
    `[slots, heads, d]` is `of(cache[:, None], "brhd")` with blocks of one row (or
    `cache.unflatten(0, (-1, page))` with pages), and a contiguous
    `[sessions, heads, capacity, d]` is a cache whose sessions have one block each.
    """

    # One view [kv_heads, blocks, block_size, ...] per layer, all of the same strides; dimensions
    # after the third are contiguous.
    layers: tuple[Tensor, ...]

    def __post_init__(self) -> None:
        first = self.layers[0]
        if first.dim() < 3:
            raise ValueError(f"rows need [heads, blocks, block_size, ...]; got {first.shape}")
        alike = (first.shape, first.stride(), first.dtype, first.device)
        for layer in self.layers[1:]:
            if (layer.shape, layer.stride(), layer.dtype, layer.device) != alike:
                raise ValueError("layers of one cache must have equal shapes, strides and dtypes")
        inner = first.shape[3:]
        if first.numel() and inner.numel() > 1 and not first[0, 0, 0].is_contiguous():
            raise ValueError("a row must be contiguous in memory")
        _ = self.layer_offsets

    @classmethod
    def of(cls, layers: Tensor | Sequence[Tensor], order: str) -> PagedRows:
        """Build from one tensor per layer, or one of all layers, with dimensions in any order.

        `order` has a letter for each dimension: `l` layer (one tensor of all layers only), `h`
        head, `b` block, `r` row in the block, `d` what a row holds (may be absent).
        """
        wanted, left = "hbrd" if "d" in order else "hbr", order.replace("l", "")
        if sorted(left) != sorted(wanted):
            raise ValueError(
                f"order {order!r}: expected h, b, r, and if present d and l, once each"
            )
        if isinstance(layers, Tensor):
            layers = layers.unbind(order.index("l")) if "l" in order else [layers]
        places = [left.index(letter) for letter in wanted]
        return cls(tuple(layer.permute(places) for layer in layers))

    @property
    def layer_step(self) -> int:
        """Bytes from the first layer to the second."""
        return self._offsets[1] if len(self.layers) > 1 else 0

    @cached_property
    def layer_offsets(self) -> Tensor | None:
        """Bytes from the first layer to each, int64 on the device; None if they are evenly spaced.

        Copied to a GPU once, when the cache is described, as a graph that is being captured may not
        copy from the host.
        """
        offsets = self._offsets
        if all(offset == i * self.layer_step for i, offset in enumerate(offsets)):
            return None
        return torch.tensor(offsets, device=self.layers[0].device)

    @cached_property
    def _offsets(self) -> list[int]:
        return [layer.data_ptr() - self.layers[0].data_ptr() for layer in self.layers]

    @cached_property
    def in_bytes(self) -> tuple[int, int | None, int, int, int, int, int]:
        """Addresses of the first row and of the layers' offsets; bytes of steps and of a row.

        The steps are from one layer, head, block and row of a block to the next.
        """
        first, offsets = self.layers[0], self.layer_offsets
        head, block, row = (stride * first.itemsize for stride in first.stride()[:3])
        where = None if offsets is None else offsets.data_ptr()
        return first.data_ptr(), where, self.layer_step, head, block, row, self.row_bytes

    @property
    def kv_heads(self) -> int:
        return self.layers[0].shape[0]

    @property
    def block_size(self) -> int:
        return self.layers[0].shape[2]

    @property
    def row_bytes(self) -> int:
        first = self.layers[0]
        return first.shape[3:].numel() * first.itemsize


def check_blocks(table: Tensor, lengths: Tensor, block_size: int) -> None:
    """Refuse tables that use a block twice: moving its rows would spoil the other use."""
    needed = (lengths + block_size - 1) // block_size
    if bool((needed > table.shape[1]).any()):
        raise ValueError(f"a session has more rows than {table.shape[1]} blocks of {block_size}")
    used = table[torch.arange(table.shape[1], device=table.device) < needed[:, None]]
    blocks, times = torch.unique(used, return_counts=True)
    if bool((times > 1).any()):
        shared = int(blocks[times > 1][0])
        raise ValueError(
            f"block {shared} is used more than once; copy shared blocks before they are compacted"
        )


def gather_layer(layer: Tensor, table: Tensor, session: int, length: int) -> Tensor:
    """Return a session's rows of one of `PagedRows.layers`, [kv_heads, length, ...]; a copy."""
    block, place = places_of(table, layer.shape[2], session, length)
    return layer[:, block, place]


def gather_rows(rows: PagedRows, table: Tensor, session: int, length: int) -> Tensor:
    """Return a session's rows in order, [layers, kv_heads, length, ...]; a copy."""
    return torch.stack([gather_layer(layer, table, session, length) for layer in rows.layers])


def scatter_layer(layer: Tensor, table: Tensor, session: int, values: Tensor) -> None:
    """Write rows [kv_heads, length, ...] back where `gather_layer` found them."""
    block, place = places_of(table, layer.shape[2], session, values.shape[1])
    layer[:, block, place] = values


def places_of(table: Tensor, size: int, session: int, length: int) -> tuple[Tensor, Tensor]:
    """Return in which block, and where in it, a session's first rows are; `size` rows a block."""
    index = torch.arange(length, device=table.device)
    return table[session, index // size].long(), index % size


def by_position(positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return every head's positions ascending, and the row of each.

    All are [layers, kv_heads, tokens], int64; positions are distinct in every head, not negative.
    """
    layers, heads, tokens = positions.shape
    if positions.device.type != "cpu":  # the host would wait for what it needs to know below
        ordered, order = positions.sort(-1)
        return ordered, order
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
    if rows.device.type != "cpu":
        return rows.sort(-1).values
    marks = torch.zeros((*rows.shape[:2], tokens), dtype=torch.bool, device=rows.device)
    return marks.scatter_(-1, rows, True).nonzero()[:, -1].reshape(rows.shape)
