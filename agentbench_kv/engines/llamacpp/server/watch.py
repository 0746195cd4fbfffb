"""Watching llama.cpp evaluate a graph: the cells that tokens went to, and queries behind RoPE.

`NativeWatch` is the plug-in (csrc/watch.cpp), `PythonWatch` the same without a compiler; a decode
step costs the latter about a millisecond more.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import torch

from agentbench_kv.engines.llamacpp.server import library

CACHE_NAME = re.compile(rb"cache_([kv])_l(\d+)$")
Told = Callable[[int, torch.Tensor], None]
QUERY_NAME = re.compile(rb"Qcur-(\d+)$")
_NUMPY = {0: np.float32, 1: np.float16, 27: np.int64}  # by ggml's number of the type


class _Listening:
    """Tells somebody of a layer's queries before its attention is computed."""

    # What that raised: nothing may be raised through llama.cpp.
    _problem: Exception | None = None
    _told: Told | None = None

    def _tell(self, layer: int, queries: torch.Tensor) -> None:
        if self._told is not None and self._problem is None:
            try:
                self._told(layer, queries)
            except Exception as error:  # noqa: BLE001
                self._problem = error

    def raise_problem(self) -> None:
        """Raise what who listened raised since this was last asked."""
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem


class NativeWatch(_Listening):
    """The plug-in's watch; PrerequisiteError where that cannot be built.

    It sees what `llama_decode` does with the tokens of its batch, in the order of the batch.
    """

    def __init__(self, layers: int, queries: bool) -> None:
        self._plugin = library.load_plugin()
        self._watch = self._plugin.kvb_watch_new(layers)
        kind = library.llama().ggml_backend_sched_eval_callback
        self.callback = ctypes.cast(self._plugin.kvb_watch_callback(), kind)
        asked = library.llama().ggml_abort_callback
        self.abort_callback = ctypes.cast(self._plugin.kvb_watch_abort_callback(), asked)
        self.data = int(self._watch)
        self.want_queries(queries)

    def listen(self, told: Told | None, heads: int, head_dim: int) -> None:
        """Tell of each layer's queries [heads, tokens, head_dim], float32, or no longer."""

        def hear(layer: int, first: Any, count: int) -> None:
            rows = _copied(first, count, torch.float32)
            self._tell(layer, rows.reshape(-1, heads, head_dim).transpose(0, 1))

        self._told = told
        self._listener = library.LISTENER() if told is None else library.LISTENER(hear)
        self._plugin.kvb_watch_listen(self._watch, ctypes.cast(self._listener, ctypes.c_void_p))

    def want_queries(self, wanted: bool) -> None:
        """Keep queries from the next decode on, or no longer."""
        self.wants_queries = wanted
        self._plugin.kvb_watch_want_queries(self._watch, int(wanted))

    def abort(self, wanted: bool) -> None:
        """See `Context.abort`."""
        self._plugin.kvb_watch_abort(self._watch, int(wanted))

    def begin(self) -> None:
        """Forget the last batch."""
        self._plugin.kvb_watch_begin(self._watch)

    def base(self, kind: str, layer: int) -> int:
        """Return the address of the cache tensor of `kind` `k` or `v`; 0 before a first decode."""
        return int(self._plugin.kvb_watch_base(self._watch, int(kind == "v"), layer) or 0)

    def cells(self) -> torch.Tensor:
        """Return the cell of every token since `begin`, int64."""
        count = ctypes.c_int64()
        first = self._plugin.kvb_watch_cells(self._watch, ctypes.byref(count))
        return _copied(first, count.value, torch.int64)

    def queries(self, layer: int, heads: int) -> torch.Tensor:
        """Return queries [heads, tokens, head_dim] of the tokens since `begin`, float32."""
        count = ctypes.c_int64()
        first = self._plugin.kvb_watch_queries(self._watch, layer, ctypes.byref(count))
        rows = _copied(first, count.value, torch.float32)
        return rows.reshape(self.cells().numel(), heads, -1).transpose(0, 1)


def _copied(first: Any, count: int, dtype: torch.dtype) -> torch.Tensor:
    if not count:
        return torch.zeros(0, dtype=dtype)
    return torch.from_numpy(np.ctypeslib.as_array(first, (count,)).copy())


class PythonWatch(_Listening):
    """The watch in Python. In `kept` it has further tensors by `names`, `kq_soft_max-0` say."""

    def __init__(self, layers: int, queries: bool, names: Collection[str] = ()) -> None:  # noqa: ARG002
        self.wants_queries = queries
        self.data = None
        self.names = frozenset(name.encode() for name in names)
        self.kept: dict[str, list[Any]] = {}
        self._ggml = library.ggml()
        self._set_rows, self._rope = library.op_number("SET_ROWS"), library.op_number("ROPE")
        self._bases: dict[tuple[str, int], int] = {}
        self._cells: list[Any] = []
        self._queries: dict[int, list[Any]] = {}
        self.callback = library.llama().ggml_backend_sched_eval_callback(
            lambda address, asking, _: self._ask(address) if asking else self._take(address)
        )
        self._aborted = False
        self.abort_callback = library.llama().ggml_abort_callback(lambda _: self._aborted)

    def want_queries(self, wanted: bool) -> None:
        self.wants_queries = wanted

    def listen(self, told: Told | None, heads: int, head_dim: int) -> None:  # noqa: ARG002
        self._told = told

    def abort(self, wanted: bool) -> None:
        self._aborted = wanted

    def begin(self) -> None:
        self._cells.clear()
        self._queries.clear()
        self.kept.clear()

    def base(self, kind: str, layer: int) -> int:
        return self._bases.get((kind, layer), 0)

    def cells(self) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *self._cells]))

    def queries(self, layer: int, heads: int) -> torch.Tensor:  # noqa: ARG002
        return torch.from_numpy(np.concatenate(self._queries[layer])).transpose(0, 1)

    def _ask(self, address: int) -> bool:
        """Return whether a tensor that is about to be computed is wanted."""
        name: bytes = self._ggml.ggml_get_name(address)
        if name in self.names:
            return True
        if name.startswith(b"cache_"):
            return self._holds_cells(library.tensor_at(address))
        return self._query_layer(address, name) >= 0

    def _holds_cells(self, tensor: library.GgmlTensor) -> bool:
        """Learn where a cache lies; True if the tensor holds the cells of the batch."""
        if tensor.op != self._set_rows or not tensor.view_src:
            return False
        match = CACHE_NAME.match(library.tensor_at(tensor.view_src).name)
        if match is None:
            return False
        kind, layer = match[1].decode(), int(match[2])
        self._bases[kind, layer] = tensor.view_src
        return kind == "k" and layer == 0

    def _query_layer(self, address: int, name: bytes) -> int:
        """Return the layer whose rotated queries a tensor holds; three tensors share the name."""
        match = QUERY_NAME.match(name) if self.wants_queries or self._told is not None else None
        return int(match[1]) if match and library.tensor_at(address).op == self._rope else -1

    def _take(self, address: int) -> bool:
        name: bytes = self._ggml.ggml_get_name(address)
        if name.startswith(b"cache_"):
            self._cells.append(self._array(library.tensor_at(address).src[1]).reshape(-1))
            return True
        if name in self.names:
            self.kept.setdefault(name.decode(), []).append(self._array(address))
        layer = self._query_layer(address, name)
        if layer >= 0:
            self._queries.setdefault(layer, []).append(rows := self._array(address)[0])
            self._tell(layer, torch.from_numpy(rows).transpose(0, 1))
        return True

    def _array(self, address: int) -> Any:
        """Copy a tensor; numpy's dimensions are ggml's in reverse."""
        tensor = library.tensor_at(address)
        raw = np.empty(tensor.nb[3] * tensor.ne[3], np.uint8)
        self._ggml.ggml_backend_tensor_get(address, raw.ctypes.data, 0, raw.nbytes)
        shape, steps = tuple(tensor.ne)[::-1], tuple(tensor.nb)[::-1]
        elements = raw.view(_NUMPY[tensor.type])
        return np.lib.stride_tricks.as_strided(elements, shape, steps).copy()


Watch = NativeWatch | PythonWatch


def make_watch(layers: int, queries: bool) -> Watch:
    kind = PythonWatch if library.find_plugin() is None else NativeWatch
    return kind(layers, queries)
