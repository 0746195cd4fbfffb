"""Rows in llama.cpp's state format: how a context stores them, the bytes of a saved sequence."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentbench_kv.engines.llamacpp.models import ModelShape
from agentbench_kv.engines.llamacpp.server import library
from agentbench_kv.errors import KVBenchError
from agentbench_kv.kernels import rope_rotate

_DTYPES = {0: torch.float32, 1: torch.float16}  # by ggml's number

# The state format of one sequence (llama_kv_cache::state_write at the pinned version), in order:
MAGIC = 0xAF143CD8
_HEADER = struct.Struct("<IiII")  # magic number, sequence, number of streams, of cells
CELL_NUMBERS = 3  # int32 per cell: its position, the number of its sequences, its sequence
_KIND = struct.Struct("<II")  # whether values are transposed, number of layers
_ROWS = struct.Struct("<iQ")  # per layer, before the keys and again before the values: type, size
_COLUMNS = struct.Struct("<iII")  # before transposed values instead: type, element size, channels


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

    @classmethod
    def blank(cls, form: RowFormat, positions: Tensor) -> Self:
        """Return rows of zeros at some positions [tokens], for what is written in the cache."""
        tokens, data = len(positions), bytearray(_size(form, len(positions)))
        _HEADER.pack_into(data, 0, MAGIC, 0, 1, tokens)
        count = CELL_NUMBERS * tokens
        cells = torch.frombuffer(data, dtype=torch.int32, offset=_HEADER.size, count=count)
        cells.view(tokens, CELL_NUMBERS)[:, 1] = 1
        _KIND.pack_into(data, _HEADER.size + 4 * count, form.transposed, form.shape.layers)
        size = form.dtype.itemsize
        for layer in range(form.shape.layers):
            keys, values = (at(form, tokens, layer) for at in (_keys_at, _values_at))
            _ROWS.pack_into(data, keys - _ROWS.size, form.row_type, form.row_bytes)
            if form.transposed:
                _COLUMNS.pack_into(data, values - _COLUMNS.size, form.row_type, size, form.width)
            else:
                _ROWS.pack_into(data, values - _ROWS.size, form.row_type, form.row_bytes)
        made = cls(form, data)
        made.set_positions(positions)
        return made

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

    def rotate(self, by: int | Tensor) -> None:
        """Move all tokens by so many positions, or each by its own [tokens]: keys turn, too."""
        plugin = library.find_plugin()
        if plugin is None or not isinstance(by, int):
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

    def _rotate_by_kernels(self, by: int | Tensor) -> None:
        frequencies, interleaved = self.form.frequencies, self.form.shape.interleaved
        rope_rotate(self._all_keys(), torch.as_tensor(by), frequencies, interleaved=interleaved)

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
