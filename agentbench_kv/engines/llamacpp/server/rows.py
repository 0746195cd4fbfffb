"""Rows of keys and values: in llama.cpp's state format, in the cells of its cache, per session."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentbench_kv.engines.llamacpp.models import ModelShape
from agentbench_kv.engines.llamacpp.server import library
from agentbench_kv.engines.llamacpp.server.context import Context
from agentbench_kv.errors import KVBenchError
from agentbench_kv.kernels import paged, rope_rotate
from agentbench_kv.kernels.layout import PagedRows

_DTYPES = {0: torch.float32, 1: torch.float16}  # by ggml's number

# The state format of one sequence (llama_kv_cache::state_write at the pinned version), in order:
MAGIC = 0xAF143CD8
_HEADER = struct.Struct("<IiII")  # magic number, sequence, number of streams, of cells
CELL_NUMBERS = 3  # int32 per cell: its position, the number of its sequences, its sequence
_KIND = struct.Struct("<II")  # whether values are transposed, number of layers
_ROWS = struct.Struct("<iQ")  # per layer, before the keys and again before the values: type, size
_COLUMNS = struct.Struct("<iII")  # before transposed values instead: type, element size, channels

# Marks the rows of a blob, so that they are found again in the cache: high half of 8 bytes.
TAG = 0x6B76_6265 << 32
LOST = "a restored block is not where it was put"
SEARCHED = 1024  # cells that are searched at once; llama.cpp takes low ones first


@dataclass(frozen=True)
class RowFormat:
    """How a context stores rows."""

    shape: ModelShape
    row_type: int  # ggml's number of the element type
    row_bytes: int  # the keys (or values) of one token in one layer, all heads
    transposed: bool  # values lie channel by channel instead of token by token

    @property
    def dtype(self) -> torch.dtype:
        # Arithmetic on quantised rows would quantise twice, and their keys may be stored rotated
        # by a Hadamard matrix.
        if self.row_type not in _DTYPES:
            raise KVBenchError("rows of a quantised cache cannot be read; only saved and restored")
        return _DTYPES[self.row_type]

    @property
    def width(self) -> int:
        """Channels of a token in one layer, all KV heads."""
        return self.shape.kv_heads * self.shape.head_dim

    @property
    def values_header(self) -> int:
        """Bytes before a layer's values in a state."""
        return _COLUMNS.size if self.transposed else _ROWS.size

    @cached_property
    def frequencies(self) -> Tensor:
        """Inverse RoPE frequencies [head_dim / 2], float64."""
        pairs = torch.arange(self.shape.head_dim // 2, dtype=torch.float64)
        exponents: Tensor = -2.0 * pairs / self.shape.head_dim
        plain: Tensor = self.shape.rope_base**exponents
        factors = self.shape.rope_factors
        return plain / torch.tensor(factors, dtype=torch.float64) if factors else plain


class Blob:
    """Rows of some tokens in the bytes that llama.cpp wrote, read and written in place."""

    def __init__(self, form: RowFormat, data: bytearray) -> None:
        self.form = form
        self.data = data
        magic, _sequence, streams, self.tokens = _HEADER.unpack_from(data)
        if (magic, streams) != (MAGIC, 1) or len(data) != _size(form, self.tokens):
            raise KVBenchError("llama.cpp's state format is not the pinned version's")

    @property
    def positions(self) -> Tensor:
        """Position of every token [tokens], int64; a copy."""
        return self._cells[:, 0].long()

    def set_positions(self, positions: Tensor) -> None:
        """Give the tokens other positions [tokens]; keys are not rotated."""
        self._cells[:, 0] = positions

    @property
    def _cells(self) -> Tensor:
        count = CELL_NUMBERS * self.tokens
        flat = torch.frombuffer(self.data, dtype=torch.int32, offset=_HEADER.size, count=count)
        return flat.reshape(self.tokens, CELL_NUMBERS)

    def keys(self, layer: int) -> Tensor:
        """Return a layer's keys [tokens, kv_heads, head_dim], a view."""
        return self._rows(_keys_at(self.form, self.tokens, layer))

    def values(self, layer: int) -> Tensor:
        """Return a layer's values [tokens, kv_heads, head_dim], a view."""
        at, shape = _values_at(self.form, self.tokens, layer), self.form.shape
        if not self.form.transposed:
            return self._rows(at)
        size = (shape.kv_heads, shape.head_dim, self.tokens)
        return self._elements(at).reshape(size).permute(2, 0, 1)

    def row_marks(self) -> NDArray[np.int64]:
        """Return the first eight bytes of every token's keys in the first layer, a view."""
        at, step = _keys_at(self.form, self.tokens, 0), self.form.row_bytes
        return np.ndarray((self.tokens,), np.int64, self.data, at, (step,))

    def reordered(self, order: Tensor) -> Blob:
        """Return a blob with the tokens in another order [tokens], int64."""
        made = Blob(self.form, bytearray(self.data))
        made.set_positions(self.positions[order])
        for layer in range(self.form.shape.layers):
            made.keys(layer).copy_(self.keys(layer)[order])
            made.values(layer).copy_(self.values(layer)[order])
        return made

    def rotate(self, by: int) -> None:
        """Move the tokens by some positions: keys rotate, labels follow."""
        plugin = library.find_plugin()
        if plugin is None:
            self._rotate_by_kernels(by)
        else:
            form, shape = self.form, self.form.shape
            first = _address(self.data) + _keys_at(form, self.tokens, 0)
            layer_bytes = _ROWS.size + self.tokens * form.row_bytes
            keys = library.PluginKeys(
                *(first, shape.layers, layer_bytes, self.tokens, shape.kv_heads, shape.head_dim),
                *(form.dtype is torch.float16, shape.interleaved),
            )
            plugin.kvb_turn(ctypes.byref(keys), by, form.frequencies.data_ptr())
        self._cells[:, 0] += by

    def _rotate_by_kernels(self, by: int) -> None:
        frequencies, interleaved = self.form.frequencies, self.form.shape.interleaved
        rope_rotate(self._all_keys(), torch.tensor(by), frequencies, interleaved=interleaved)

    def described(self) -> library.PluginState:
        """Return where the blob lies, for the plug-in; valid while the blob lives."""
        first = _keys_at(self.form, self.tokens, 0)
        return library.PluginState(_address(self.data), len(self.data), first, self.tokens)

    def _all_keys(self) -> Tensor:
        """Return every layer's keys [layers, kv_heads, tokens, head_dim], a view."""
        form, shape = self.form, self.form.shape
        first = _keys_at(form, self.tokens, 0)
        step = (_keys_at(form, self.tokens, 1) - first) // form.dtype.itemsize
        count = (shape.layers - 1) * step + self.tokens * form.width
        flat = torch.frombuffer(self.data, dtype=form.dtype, offset=first, count=count)
        size = (shape.layers, shape.kv_heads, self.tokens, shape.head_dim)
        return flat.as_strided(size, (step, shape.head_dim, form.width, 1))

    def _rows(self, at: int) -> Tensor:
        shape = self.form.shape
        return self._elements(at).reshape(self.tokens, shape.kv_heads, shape.head_dim)

    def _elements(self, at: int) -> Tensor:
        count = self.tokens * self.form.width
        return torch.frombuffer(self.data, dtype=self.form.dtype, offset=at, count=count)


def _address(data: bytearray) -> int:
    """Return where bytes lie; they may not be resized while it is used."""
    return ctypes.addressof(ctypes.c_uint8.from_buffer(data))


def _keys_at(form: RowFormat, count: int, layer: int) -> int:
    """Return where a layer's keys start; every layer's header precedes its rows."""
    before = layer * (_ROWS.size + count * form.row_bytes)
    cells_end = _HEADER.size + 4 * CELL_NUMBERS * count
    return cells_end + _KIND.size + before + _ROWS.size


def _values_at(form: RowFormat, count: int, layer: int) -> int:
    keys_end = _keys_at(form, count, form.shape.layers) - _ROWS.size
    return keys_end + layer * (form.values_header + count * form.row_bytes) + form.values_header


def _size(form: RowFormat, count: int) -> int:
    return _values_at(form, count, form.shape.layers) - form.values_header


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


class SequenceRows:
    """Rows of one session, by ascending label: a `RowStore` of `engines.core.rows`.

    Three numbers belong to a row. Its *logical* position counts the tokens the session has ever
    seen; its *RoPE* position is what its key is rotated to; its *label* is the position llama.cpp
    knows of the cell. Labels only serve the mask (a query sees labels up to its own position), so
    they may differ from the other two, except that the largest must precede the next token's
    position.

    After a per-head compaction a row's heads hold different tokens, so that `rope` and `logical`
    mean nothing any more; cells and labels do.

    A fork has its source's cells. To drop one or to decode behind them changes nothing for others;
    whoever writes to a cell, or gives it another label, copies it first if others have it.
    """

    def __init__(self, cells: Cells) -> None:
        self._cells = cells
        self.sequence = -1  # llama.cpp's number; -1 while the rows are parked outside of the cache
        self._clear()

    def _clear(self) -> None:
        self.next = 0  # RoPE position of the next token
        self._table = torch.zeros(4, 0, dtype=torch.int64)  # cells, labels, RoPE, logical
        self._stand_ins = False
        self._parked: Blob | None = None

    @property
    def cells(self) -> Tensor:
        return self._table[0]

    @property
    def labels(self) -> Tensor:
        return self._table[1]

    @property
    def rope(self) -> Tensor:
        return self._table[2]

    @property
    def logical(self) -> Tensor:
        return self._table[3]

    @property
    def live(self) -> int:
        """Rows held, in the cache or parked."""
        return self._table.shape[1]

    @property
    def resident(self) -> int:
        """Rows held in the cache."""
        return 0 if self._parked is not None else self.live

    @property
    def shared(self) -> int:
        """Rows in cells that other sessions have too."""
        return 0 if self._parked is not None else int((self._cells.holders[self.cells] > 1).sum())

    @property
    def stand_ins(self) -> int:
        """Rows whose label is another one's; of sessions whose heads hold the same tokens."""
        return int((self.labels != self.rope).sum())

    def append(self, cells: Tensor, first_logical: int) -> None:
        """Add rows that a decode wrote at the next positions."""
        each = torch.arange(len(cells))
        places = self.next + each
        self._insert(self.live, cells, places, places, first_logical + each)
        self.next += len(cells)

    def _insert(self, row: int, *columns: Tensor) -> None:
        table = self._table
        self._cells.holders[columns[0]] += 1
        self._table = torch.cat([table[:, :row], torch.stack(columns), table[:, row:]], 1)

    def fork(self, sequence: int) -> SequenceRows:
        """Return the rows of a session that goes on from here, in the same cells.

        `sequence` is its own, -1 if there is none left: then it starts parked, with a copy.
        """
        twin = SequenceRows(self._cells)
        twin.next, twin._table, twin._stand_ins = self.next, self._table.clone(), self._stand_ins
        twin._parked = self._parked
        if self._parked is not None or not self.live:
            return twin
        if sequence < 0:
            twin._parked = self._cells.save(self.sequence, [(-1, -1)])
            return twin
        twin.sequence = sequence
        self._cells.context.share(self.sequence, sequence)
        self._cells.holders[self.cells] += 1
        return twin

    def park(self) -> None:
        """Move all rows out of the cache, to the last bit; what others share stays in it too."""
        if self.live:
            self._parked = self._cells.save(self.sequence, [(-1, -1)])
            self._leave()
        self.sequence = -1

    def _leave(self) -> None:
        """Let go of all cells."""
        self._cells.context.remove(self.sequence)
        self._cells.holders[self.cells] -= 1

    def unpark(self, sequence: int) -> None:
        """Move all rows back, under another sequence."""
        self.sequence = sequence
        blob, self._parked = self._parked, None
        if blob is not None:
            # Rows of a blob are in the order of the cells they came from.
            cells = self._cells.load(sequence, blob)
            self._cells.holders[cells] += 1
            self._table[0] = cells[blob.positions.argsort()]

    def free(self) -> None:
        if self.sequence >= 0:
            self._leave()
        self._clear()

    def keys(self, layer: int) -> Tensor:
        return self._cells.form.shape.in_halves(self._cells.keys[layer][:, self.cells])

    def values(self, layer: int) -> Tensor:
        return self._cells.values[layer][:, self.cells]

    def keep(self, kept: Tensor, positions: Tensor, extras: Sequence[Tensor], *, sort: bool) -> int:
        """Move the kept rows to the session's last cells and let go of the others."""
        self._own(self._written(kept, sort=sort))
        moved = self._cells.compact(self.cells, kept, (positions, *extras), sort=sort)
        self.keep_last(kept.shape[-1])
        return moved

    def keep_last(self, budget: int) -> None:
        """Drop all rows but those with the largest labels, which a compaction filled."""
        self._select(torch.arange(self.live) >= self.live - budget)

    def _written(self, kept: Tensor, *, sort: bool) -> Tensor:
        """Return which rows a compaction writes to, in any head: places of others' tokens."""
        live, budget = self.live, kept.shape[-1]
        last = torch.arange(live - budget, live)
        if sort:
            stay = (kept == last).flatten(0, -2).all(0)
        else:
            stay = torch.bincount(kept.flatten(), minlength=live)[last] == kept[..., 0].numel()
        return last[~stay]

    def _own(self, rows: Tensor) -> None:
        """Move those of the rows whose cells others have too to cells of their own."""
        rows = rows[self._cells.holders[self.cells[rows]] > 1]
        if len(rows):
            self._put_back(rows, self.labels[rows])

    def _put_back(self, rows: Tensor, labels: Tensor) -> None:
        """Move rows, ascending, to free cells under other labels: no others in the session have.

        llama.cpp itself would turn the keys, and for everybody.
        """
        blob, left = self._save(rows), runs(self.labels[rows].tolist())
        blob.set_positions(labels)
        for start, end in left:
            self._cells.context.remove(self.sequence, start, end)
        self._cells.holders[self.cells[rows]] -= 1
        cells = self._cells.load(self.sequence, blob)
        self._cells.holders[cells] += 1
        self._table[0, rows], self._table[1, rows] = cells, labels

    def rotate(self, shifts: Tensor, frequencies: Tensor | None = None) -> None:  # noqa: ARG002
        """Turn the keys to the positions of their places, and number rows by them."""
        places = torch.arange(self.live)
        if self.live:
            self._put_back(places, places)
            self._cells.rotate(self.cells, shifts)
        self._table[1:3] = places
        self.next = self.live

    def drop(self, gone: Tensor) -> None:
        """Drop rows [live], bool."""
        self._select(~gone)
        self._anchor()

    def rewind(self, length: int) -> None:
        """Drop rows from logical position `length` on, and go on behind all that stay."""
        gone = self.logical >= length
        self.next = max([length, *(self.rope[~gone] + 1).tolist()])
        self.drop(gone)

    def save(self, chosen: Tensor) -> Blob:
        """Copy some rows [live], bool, out of the cache, by ascending label."""
        return self._save(chosen.nonzero()[:, 0])

    def _save(self, rows: Tensor) -> Blob:
        blob = self._cells.save(self.sequence, runs(self.labels[rows].tolist()))
        # Rows of a blob are in the order of the cells they came from.
        order = blob.positions.argsort()
        return blob if bool((order.diff() > 0).all()) else blob.reordered(order)

    def restore(self, blob: Blob, logical: Tensor) -> None:
        """Put the rows of tokens `logical` back at the blob's positions, neighbours and free."""
        rope = blob.positions
        if self._stand_ins:
            self._free_labels(rope)
        cells = self._cells.load(self.sequence, blob)
        first, end = int(rope[0]), int(rope[0]) + len(rope)
        behind = first >= self.next
        row = self.live if behind else int(torch.searchsorted(self.labels, first))
        self._insert(row, cells, rope, rope, logical)
        self.next = max(self.next, end)
        if not behind:
            self._anchor()

    def pack(self) -> None:
        """Turn every key to the position of its row in the cache, and number rows by it."""
        places = torch.arange(self.live)
        shape = self._cells.form.shape
        shifts = (places - self.rope).expand(shape.layers, shape.kv_heads, -1)
        self.rotate(shifts)

    def _select(self, kept: Tensor) -> None:
        for start, end in runs(self.labels[~kept].tolist()):
            self._cells.context.remove(self.sequence, start, end)
        self._cells.holders[self.cells[~kept]] -= 1
        self._table = self._table[:, kept]

    def _anchor(self) -> None:
        """Let the last row stand in for a last position that has gone: llama.cpp goes on there."""
        if self.live and int(self.labels[-1]) != self.next - 1:
            self._relabel(self.live - 1, self.next - 1)
            self._stand_ins = True

    def _free_labels(self, wanted: Tensor) -> None:
        """Give rows their own labels back that stand in for one that returns."""
        for row in ((self.labels != self.rope) & torch.isin(self.labels, wanted)).nonzero():
            self._relabel(int(row), int(self.rope[row]))
        self._table = self._table[:, self.labels.argsort()]

    def _relabel(self, row: int, label: int) -> None:
        self._put_back(torch.tensor([row]), torch.tensor([label]))


def runs(labels: Iterable[int]) -> list[tuple[int, int]]:
    """Return ascending numbers as spans [start, end)."""
    spans: list[tuple[int, int]] = []
    for label in labels:
        if spans and spans[-1][1] == label:
            spans[-1] = (spans[-1][0], label + 1)
        else:
            spans.append((label, label + 1))
    return spans
