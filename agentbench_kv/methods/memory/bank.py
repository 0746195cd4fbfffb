"""Past sessions as KV rows without positions, in blocks with a bounding box each (MemArt, 3.2).

Blocks never straddle two sessions, so that the last one of a session may be shorter.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from agentbench_kv.errors import UsageError
from agentbench_kv.kernels import aabb

_FORMAT = "kvbench memory bank 1"
_ROWS = ("keys", "values")
_PARTS = (*_ROWS, "lows", "highs", "starts", "sizes")


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
            shape[self._axis] = max(end, 2 * self.length)
            grown = rows.new_empty(shape)
            if self._held is not None:
                grown.narrow(self._axis, 0, self.length).copy_(self.whole)
            self._held = grown
        self._held.narrow(self._axis, self.length, count).copy_(rows)
        self.length = end

    def hold(self, rows: Tensor) -> None:
        """Hold rows as they are, which may be mapped from a file."""
        self._held, self.length = rows, rows.shape[self._axis]


class MemoryBank:
    """Rows of past sessions, in order, with an index.

    `keys` are float32 and before RoPE, `values` in the model's dtype: [layers, kv_heads, rows,
    head_dim]. `lows` and `highs` [layers, kv_heads, blocks, head_dim], float32, are the boxes of
    the blocks; `starts` and `sizes` [blocks], int64, say which rows a block has.
    """

    def __init__(self, block: int) -> None:
        self.block = block
        self._parts = {name: _Growing(2) for name in _PARTS[:4]}
        self._parts.update({name: _Growing(0) for name in _PARTS[4:]})

    @property
    def rows(self) -> int:
        return self._parts["keys"].length

    @property
    def blocks(self) -> int:
        return self._parts["starts"].length

    @property
    def keys(self) -> Tensor:
        return self._parts["keys"].whole

    @property
    def values(self) -> Tensor:
        return self._parts["values"].whole

    @property
    def lows(self) -> Tensor:
        return self._parts["lows"].whole

    @property
    def highs(self) -> Tensor:
        return self._parts["highs"].whole

    @property
    def starts(self) -> Tensor:
        return self._parts["starts"].whole

    @property
    def sizes(self) -> Tensor:
        return self._parts["sizes"].whole

    @property
    def nbytes(self) -> int:
        """Bytes of the rows held, without the index."""
        return sum(self._parts[name].whole.nbytes for name in _ROWS) if self.rows else 0

    @property
    def index_nbytes(self) -> int:
        return self.lows.nbytes + self.highs.nbytes if self.rows else 0

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Add a session's rows [layers, kv_heads, n, head_dim], its keys before RoPE."""
        count = keys.shape[2]
        if count == 0:
            return
        boxes = [aabb(layer, self.block) for layer in keys]
        starts = torch.arange(0, count, self.block)
        sizes = (count - starts).clamp(max=self.block)
        new = {
            "lows": torch.stack([lows for lows, _ in boxes]),
            "highs": torch.stack([highs for _, highs in boxes]),
            "starts": starts + self.rows,
            "sizes": sizes,
            "keys": keys.float(),
            "values": values,
        }
        for name, rows in new.items():
            self._parts[name].add(rows)

    def save(self, path: Path) -> None:
        """Write the bank to a safetensors file; UsageError if it is empty."""
        parts = {name: part.whole.contiguous() for name, part in self._parts.items()}
        save_file(parts, path, {"format": _FORMAT, "block": str(self.block)})

    @classmethod
    def open(cls, path: Path) -> MemoryBank:
        """Map a file that `save` wrote; its rows are read as they are needed.

        UsageError for a file that is cut or of something else.
        """
        try:
            with safe_open(path, framework="pt") as file:
                about = file.metadata() or {}
                if about.get("format") != _FORMAT:
                    raise UsageError(f"{path} is no memory bank; build it again")
                bank = cls(int(about["block"]))
                for name, part in bank._parts.items():
                    part.hold(file.get_tensor(name))
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            raise UsageError(f"{path} is a damaged memory bank: {error}; build it again") from error
        bank._check(path)
        return bank

    def _check(self, path: Path) -> None:
        starts, sizes = self.starts, self.sizes
        follow = torch.equal(starts[1:], (starts + sizes)[:-1]) and int(starts[0]) == 0
        fits = int(starts[-1] + sizes[-1]) == self.rows == self.values.shape[2]
        boxed = (
            self.lows.shape
            == self.highs.shape
            == (*self.keys.shape[:2], self.blocks, self.keys.shape[3])
        )
        if not (follow and fits and boxed):
            raise UsageError(f"{path} is a damaged memory bank: its blocks are not its rows")
