"""The cells of llama.cpp's cache: their keys and values, moved, saved and loaded."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentbench_kv.engines.llamacpp.server import library
from agentbench_kv.engines.llamacpp.server.blob import Blob, RowFormat
from agentbench_kv.engines.llamacpp.server.context import Context
from agentbench_kv.errors import KVBenchError
from agentbench_kv.kernels import paged
from agentbench_kv.kernels.layout import PagedRows

# Marks the rows of a blob, so that they are found again in the cache: high half of 8 bytes.
TAG = 0x6B76_6265 << 32
LOST = "a restored block is not where it was put"
PADDING = 256  # cells that llama.cpp's attention goes further by at a time
SEARCHED = 1024  # cells that are searched at once; llama.cpp takes low ones first


class Cells:
    """Keys and values of all cells, as views of llama.cpp's own memory."""

    def __init__(self, context: Context) -> None:
        self.context = context
        base = context.tensor("k", 0)
        self.count = int(base.ne[1])
        row_bytes = int(base.nb[1])
        self.form = RowFormat(context.shape, context.row_type, row_bytes, not context.flash)
        # How many sessions each cell is a row of; whoever changes one of several copies it first.
        self.holders = torch.zeros(self.count, dtype=torch.int32)

    @property
    def used(self) -> int:
        """Cells that are rows of any session."""
        return int(self.holders.count_nonzero())

    @property
    def attended(self) -> int:
        """Cells that the attention of every step goes over: up to the highest that is used."""
        used = self.holders.nonzero()
        return 0 if not len(used) else (int(used[-1]) // PADDING + 1) * PADDING

    @cached_property
    def keys(self) -> tuple[Tensor, ...]:
        """Keys [kv_heads, cells, head_dim] of every layer."""
        return self._views("k", by_channels=False)

    @cached_property
    def values(self) -> tuple[Tensor, ...]:
        """Values [kv_heads, cells, head_dim] of every layer."""
        return self._views("v", by_channels=self.form.transposed)

    def _views(self, kind: str, *, by_channels: bool) -> tuple[Tensor, ...]:
        shape, count = self.form.shape, self.count
        size = (shape.kv_heads, count, shape.head_dim)
        row = (shape.head_dim, self.form.width, 1)
        steps = (shape.head_dim * count, 1, count) if by_channels else row
        return tuple(self._elements(kind, i).as_strided(size, steps) for i in range(shape.layers))

    def _elements(self, kind: str, layer: int) -> Tensor:
        count = self.count * self.form.width
        return self._memory(kind, layer, count * self.form.dtype.itemsize).view(self.form.dtype)

    def _memory(self, kind: str, layer: int, size: int) -> Tensor:
        memory = (ctypes.c_uint8 * size).from_address(self.context.tensor(kind, layer).data)
        return torch.from_numpy(np.ctypeslib.as_array(memory))

    def read(self, cells: Tensor) -> tuple[Tensor, Tensor]:
        """Copy keys, RoPE pairs half a head apart, and values [layers, kv_heads, n, head_dim]."""
        keys = torch.stack([layer[:, cells] for layer in self.keys])
        values = torch.stack([layer[:, cells] for layer in self.values])
        return self.form.shape.in_halves(keys), values

    def write(self, layer: int, cells: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write a layer's rows [kv_heads, n, head_dim]; RoPE pairs are half a head apart."""
        self.keys[layer][:, cells] = self.form.shape.as_stored(keys).to(self.form.dtype)
        self.values[layer][:, cells] = values.to(self.form.dtype)

    def compact(
        self, cells: Tensor, kept: Tensor, extras: Sequence[Tensor] = (), *, sort: bool = False
    ) -> int:
        """Move the kept rows of a session to its last cells, in place; return the rows moved.

        `cells` [rows] are by ascending label; `kept` [layers, kv_heads, budget] are ascending rows.
        Of the tensors `extras` [layers, kv_heads, rows], what belongs to the last cells goes to the
        front. `sort` keeps the order of `kept` instead of filling holes.
        """
        # The last cells have the largest labels, so that the next position still follows them.
        rows, budget = len(cells), kept.shape[-1]
        # Compaction fills the first rows of its table: from behind, these are the last cells.
        plan = (rows - 1 - kept).flip(-1)[None].contiguous()
        table = cells.flip(0)[None].to(torch.int32)
        moved = _move([self._key_rows, *self._value_rows], table, plan, rows, sort)
        if self.form.transposed:
            channels = plan.repeat_interleave(self.form.shape.head_dim, 2)
            _move([self._channels], table, channels, rows, sort)
        for tensor in extras:
            mirrored = tensor.flip(-1)
            one_block = PagedRows(tuple(layer[:, None] for layer in mirrored.unbind()))
            _move([one_block], torch.zeros(1, 1, dtype=torch.int32), plan, rows, sort)
            tensor[..., :budget] = mirrored[..., :budget].flip(-1)
        return moved

    @cached_property
    def _key_rows(self) -> PagedRows:
        return PagedRows(tuple(layer.unsqueeze(2) for layer in self.keys))

    @cached_property
    def _value_rows(self) -> tuple[PagedRows, ...]:
        if self.form.transposed:
            return ()
        return (PagedRows(tuple(layer.unsqueeze(2) for layer in self.values)),)

    @cached_property
    def _channels(self) -> PagedRows:
        """Transposed values: every channel is a head with rows of one element."""
        size, layers = (self.form.width, self.count, 1), range(self.form.shape.layers)
        return PagedRows(
            tuple(self._elements("v", i).as_strided(size, (self.count, 1, 1)) for i in layers)
        )

    def rotate(self, cells: Tensor, shifts: Tensor) -> None:
        """Turn the keys of some cells by positions [layers, kv_heads, cells], in place."""
        lengths, table = torch.tensor([len(cells)]), cells[None].to(torch.int32)
        frequencies, interleaved = self.form.frequencies, self.form.shape.interleaved
        paged.rope_rotate(
            self._key_rows, table, lengths, shifts[None], frequencies, interleaved=interleaved
        )

    def save(self, sequence: int, spans: Sequence[tuple[int, int]]) -> Blob:
        """Copy a sequence's cells whose labels are in any of the spans out of the cache."""
        context = self.context
        context.remove(context.scratch)
        for start, end in spans:
            context.share(sequence, context.scratch, start, end)
        try:
            return Blob(self.form, context.state(context.scratch))
        finally:
            context.remove(context.scratch)

    def load(self, sequence: int, blob: Blob) -> Tensor:
        """Add a blob's rows to a sequence, all or CapacityError; return their cells, int64."""
        # By way of a scratch sequence: llama.cpp empties the one it writes to.
        plugin = library.find_plugin()
        if plugin is None:
            return self._load_by_python(sequence, blob)
        found = np.empty(blob.tokens, np.int64)
        code = plugin.kvb_load(
            *(self.context.handle, ctypes.byref(blob.described()), ctypes.byref(self._described)),
            *(TAG, self.context.scratch, sequence, found.ctypes.data),
        )
        if code == library.NO_ROOM:
            raise self.context.no_room()
        if code:
            raise KVBenchError(LOST)
        return torch.from_numpy(found)

    def _load_by_python(self, sequence: int, blob: Blob) -> Tensor:
        context, marks = self.context, blob.row_marks()
        heads = marks.copy()
        marks[:] = TAG + np.arange(blob.tokens)
        try:
            context.set_state(context.scratch, blob.data)
        finally:
            marks[:] = heads
        cells = self._tagged(blob.tokens)
        self._marks[cells] = heads
        context.share(context.scratch, sequence)
        context.remove(context.scratch)
        return torch.from_numpy(cells)

    @cached_property
    def _described(self) -> library.PluginCells:
        first = self._memory("k", 0, self.form.row_bytes).data_ptr()
        return library.PluginCells(first, self.count, self.form.row_bytes)

    @cached_property
    def _marks(self) -> NDArray[np.int64]:
        """The first eight bytes of every cell's keys in the first layer [cells], a view."""
        memory = self._memory("k", 0, self.count * self.form.row_bytes).numpy()
        return np.ndarray((self.count,), np.int64, memory, 0, (self.form.row_bytes,))

    def _tagged(self, tokens: int) -> NDArray[np.int64]:
        """Find the cells of a blob's tagged rows, in the order of the blob."""
        cells = np.full(tokens, -1)
        left = tokens
        for first in range(0, self.count, SEARCHED):
            marks = self._marks[first : first + SEARCHED] - TAG
            found = np.flatnonzero((marks >= 0) & (marks < tokens))
            cells[marks[found]] = first + found
            left -= len(found)
            if left <= 0:
                break
        if left or cells.min() < 0:
            raise KVBenchError(LOST)
        return cells


def _move(tensors: Sequence[PagedRows], table: Tensor, plan: Tensor, rows: int, sort: bool) -> int:
    return int(paged.compact(tensors, table, plan, torch.tensor([rows]), sort=sort, check=False))
