"""Past sessions as KV rows without positions, in blocks with a bounding box each (MemArt, 3.2).

Blocks never straddle two sessions, so that the last one of a session may be shorter. It goes on
where more of the session is appended before anything else is.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from agentbench_kv.errors import UsageError
from agentbench_kv.kernels import aabb

_INDEX = ("lows", "highs", "starts", "sizes")


class _Growing:
    """A tensor that rows are added to along one axis, in amortised constant time."""

    def __init__(self, axis: int) -> None:
        self._axis = axis
        self._held: Tensor | None = None
        self.length = 0

    @property
    def whole(self) -> Tensor:
        if self._held is None:
            raise UsageError("the memory is empty")
        return self._held.narrow(self._axis, 0, self.length)

    def add(self, rows: Tensor) -> None:
        count = rows.shape[self._axis]
        end = self.length + count
        if self._held is None or end > self._held.shape[self._axis]:
            shape = list(rows.shape)
            # A quarter more: what is held beyond the index must not make it large beside the bank.
            shape[self._axis] = max(end, self.length + self.length // 4)
            grown = rows.new_empty(shape)
            if self._held is not None:
                grown.narrow(self._axis, 0, self.length).copy_(self.whole)
            self._held = grown
        self._held.narrow(self._axis, self.length, count).copy_(rows)
        self.length = end

    def set_last(self, rows: Tensor, *, apart: bool) -> None:
        """Write the last row anew; `apart`: where nobody who has been given the rows sees it."""
        if self._held is not None and apart:
            self._held = self._held.clone()
        self.whole.narrow(self._axis, self.length - 1, 1).copy_(rows)


@dataclass(frozen=True)
class BlockIndex:
    """The blocks that a bank had at some time; see `MemoryBank` for the tensors."""

    lows: Tensor
    highs: Tensor
    starts: Tensor
    sizes: Tensor

    def without(self, blocks: Collection[int]) -> BlockIndex:
        """Return the index without some blocks, by number."""
        if not blocks:
            return self
        kept = torch.ones(len(self.starts), dtype=torch.bool)
        kept[[each for each in blocks if each < len(kept)]] = False
        on_device = kept.to(self.lows.device)
        lows, highs = (each[:, :, on_device] for each in (self.lows, self.highs))
        return BlockIndex(lows, highs, self.starts[kept], self.sizes[kept])


class MemoryBank:
    """Rows of past sessions, in order, with an index.

    Of each session `keys` are float32 and before RoPE, `values` in the model's dtype: [layers,
    kv_heads, rows, head_dim]; both stay where they are, which may be a mapped file. The index is on
    `device`: `lows` and `highs` [layers, kv_heads, blocks, head_dim], float32, are the boxes of the
    blocks; `starts` and `sizes` [blocks], int64 and on the CPU, say which rows a block has.
    """

    def __init__(self, block: int, device: torch.device | str = "cpu") -> None:
        self.block = block
        self.rows = 0
        self._device = device
        self._sessions: list[tuple[Tensor, Tensor]] = []
        self._firsts: list[int] = []  # rows of the bank before each session's
        self._index = {name: _Growing(2 if name in _INDEX[:2] else 0) for name in _INDEX}
        self._lent = False  # whether somebody was given the index as it is
        # Whose rows are the last ones, and how many of its rows are in the bank by now.
        self._last: tuple[object, int] | None = None

    @property
    def blocks(self) -> int:
        return self._index["starts"].length

    @property
    def lows(self) -> Tensor:
        return self._index["lows"].whole

    @property
    def highs(self) -> Tensor:
        return self._index["highs"].whole

    @property
    def starts(self) -> Tensor:
        return self._index["starts"].whole

    @property
    def sizes(self) -> Tensor:
        return self._index["sizes"].whole

    def index(self) -> BlockIndex:
        """Return the blocks as they are; what is appended later does not change them."""
        self._lent = True
        return BlockIndex(self.lows, self.highs, self.starts, self.sizes)

    @property
    def nbytes(self) -> int:
        """Bytes of the rows held, without the index."""
        return sum(keys.nbytes + values.nbytes for keys, values in self._sessions)

    @property
    def index_nbytes(self) -> int:
        return self.lows.nbytes + self.highs.nbytes if self.rows else 0

    @property
    def newest(self) -> tuple[Tensor, Tensor]:
        """Keys and values that were added last."""
        return self._sessions[-1]

    def append(self, keys: Tensor, values: Tensor, session: object = None, start: int = 0) -> range:
        """Add rows [layers, kv_heads, n, head_dim], keys before RoPE; return their blocks.

        They are those of a session from its token `start` on. Where those before them are the last
        that were added, the bank is as if all had been at once.
        """
        count = keys.shape[2]
        if count == 0:
            return range(0)
        keys = keys.float()
        goes_on = self._last is not None and self._last[0] is session and self._last[1] == start
        taken = self._fill_last(keys) if goes_on and session is not None else 0
        first = self.blocks - (taken > 0)
        if taken < count:
            self._add_blocks(keys[:, :, taken:], self.rows + taken)
        self._sessions.append((keys, values))
        self._firsts.append(self.rows)
        self._last = (session, start + count)
        self.rows += count
        return range(first, self.blocks)

    def _fill_last(self, keys: Tensor) -> int:
        """Have the last block go on with the first of these rows; return how many it takes."""
        size = int(self.sizes[-1])
        taken = min(self.block - size, keys.shape[2])
        if not taken:
            return 0
        lows, highs = self._boxes(keys[:, :, :taken])
        apart, self._lent = self._lent, False
        for name, rows in (
            ("lows", torch.minimum(self.lows[:, :, -1:], lows)),
            ("highs", torch.maximum(self.highs[:, :, -1:], highs)),
            ("sizes", torch.tensor([size + taken])),
        ):
            self._index[name].set_last(rows, apart=apart)
        return taken

    def _add_blocks(self, keys: Tensor, first: int) -> None:
        """Add blocks of rows [layers, kv_heads, n, head_dim], the first of which is row `first`."""
        count = keys.shape[2]
        starts = torch.arange(0, count, self.block)
        for name, rows in zip(_INDEX[:2], self._boxes(keys), strict=True):
            self._index[name].add(rows)
        self._index["starts"].add(starts + first)
        self._index["sizes"].add((count - starts).clamp(max=self.block))

    def _boxes(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        boxes = [aabb(layer, self.block) for layer in keys]
        lows, highs = (torch.stack(each).to(self._device) for each in zip(*boxes, strict=True))
        return lows, highs

    def gather(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return copies of a layer's keys and values [kv_heads, n, head_dim] at rows that ascend.

        They are on the bank's device.
        """
        ends = torch.searchsorted(rows, torch.tensor([*self._firsts, self.rows])).tolist()
        parts: list[tuple[Tensor, Tensor]] = []
        for number, (keys, values) in enumerate(self._sessions):
            own = rows[ends[number] : ends[number + 1]] - self._firsts[number]
            if len(own):
                own = own.to(keys.device)
                parts.append((keys[layer][:, own], values[layer][:, own]))
        found_keys, found_values = (
            torch.cat([part.to(self._device) for part in each], 1)
            for each in zip(*parts, strict=True)
        )
        return found_keys, found_values
