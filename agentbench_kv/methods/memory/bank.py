"""Past sessions as KV rows without positions, in blocks with a bounding box each (MemArt, 3.2).

Blocks never straddle two sessions, so that the last one of a session may be shorter.
"""

from __future__ import annotations

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

    @property
    def nbytes(self) -> int:
        """Bytes of the rows held, without the index."""
        return sum(keys.nbytes + values.nbytes for keys, values in self._sessions)

    @property
    def index_nbytes(self) -> int:
        return self.lows.nbytes + self.highs.nbytes if self.rows else 0

    @property
    def newest(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the session that was added last."""
        return self._sessions[-1]

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Add a session's rows [layers, kv_heads, n, head_dim], its keys before RoPE."""
        count = keys.shape[2]
        if count == 0:
            return
        keys = keys.float()
        boxes = [aabb(layer, self.block) for layer in keys]
        starts = torch.arange(0, count, self.block)
        self._index["lows"].add(torch.stack([lows for lows, _ in boxes]).to(self._device))
        self._index["highs"].add(torch.stack([highs for _, highs in boxes]).to(self._device))
        self._index["starts"].add(starts + self.rows)
        self._index["sizes"].add((count - starts).clamp(max=self.block))
        self._sessions.append((keys, values))
        self._firsts.append(self.rows)
        self.rows += count

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
