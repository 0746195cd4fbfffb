"""Watching a graph being evaluated: which cells tokens went to, and the queries behind RoPE.

`NativeWatch` is the plug-in (csrc/watch.cpp), `PythonWatch` the same without a compiler; a decode
step costs the latter about a millisecond more.

The llama-cpp-python binding, checked for the version that this backend was written against.

The C++ plug-in: built once for every version of it and of llama.cpp, then loaded.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import re
import shlex
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from agentbench_kv.errors import PrerequisiteError
from agentbench_kv.kernels.build import cache_folder, find_compiler, run_compiler

# Version of llama-cpp-python; struct layouts and the state format are this one's.
PINNED = "0.3.36"


GGML_VERSION = "0.25.3"


TENSOR_OVERHEAD = 32  # bytes that a context adds to a tensor (sizeof(struct ggml_object))


ERROR_LEVEL = 4


MEND = "build the environment again: kvbench env create llamacpp --recreate"


class Tensor(ctypes.Structure):
    """`struct ggml_tensor` of ggml.h."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
        ("op", ctypes.c_int),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * 10),
        ("view_src", ctypes.c_void_p),
        ("view_offs", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
        ("name", ctypes.c_char * 64),
        ("extra", ctypes.c_void_p),
        ("padding", ctypes.c_char * 8),
    )


_POINTER, _TEXT, _SIZE = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t


_SIGNATURES_library: dict[str, tuple[Any, ...]] = {
    "ggml_version": (_TEXT,),
    "ggml_tensor_overhead": (_SIZE,),
    "ggml_op_name": (_TEXT, ctypes.c_int),
    "ggml_get_name": (_TEXT, _POINTER),
    "ggml_backend_buffer_is_host": (ctypes.c_bool, _POINTER),
    "ggml_backend_tensor_get": (None, _POINTER, _POINTER, _SIZE, _SIZE),
}


def declare(library: Any, signatures: Mapping[str, tuple[Any, ...]]) -> None:
    """Tell ctypes what functions return and take: name -> (result, argument, ...)."""
    for name, (result, *arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments


@cache
def llama() -> Any:
    """Import the binding, quiet but for errors, and check its version."""
    # Without it an assertion of ggml starts a debugger for the backtrace.
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")
    try:
        binding: Any = import_module("llama_cpp")
    except (ImportError, OSError, RuntimeError) as error:
        raise PrerequisiteError(f"cannot load llama-cpp-python ({error}); {MEND}") from error
    if binding.__version__ != PINNED:
        raise PrerequisiteError(f"llama-cpp-python is {binding.__version__}, not {PINNED}; {MEND}")
    binding.llama_log_set(_log, None)
    binding.llama_backend_init()
    return binding


@cache
def ggml() -> Any:
    """Load the tensor library that the binding loaded, and check that its structs are known."""
    llama()
    base: Any = ctypes.CDLL(str(library_folder() / "libggml-base.so"))
    declare(base, _SIGNATURES_library)
    found = base.ggml_version().decode()
    overhead = base.ggml_tensor_overhead() - TENSOR_OVERHEAD
    if found != GGML_VERSION or overhead != ctypes.sizeof(Tensor):
        raise PrerequisiteError(
            f"ggml {found} with tensors of {overhead} bytes, expected {GGML_VERSION} with "
            f"{ctypes.sizeof(Tensor)}; {MEND}"
        )
    return base


def library_folder() -> Path:
    """Return the folder of the shared libraries that the binding loads."""
    return Path(llama().__file__).parent / "lib"


@cache
def op_number(name: str) -> int:
    """Return the number of a ggml operation, `SET_ROWS` for example."""
    base = ggml()
    for number in range(256):
        if base.ggml_op_name(number).decode() == name:
            return number
    raise PrerequisiteError(f"ggml has no operation {name}; {MEND}")


def _print_error(level: int, text: bytes, _data: object) -> None:
    if level == ERROR_LEVEL:
        sys.stderr.write(text.decode(errors="replace"))


# llama.cpp keeps the pointer, so the object must live as long as the process.
_log = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(_print_error)


logger = logging.getLogger(__name__)


SOURCES = Path(__file__).parents[1] / "csrc"


NO_PLUGIN = "KVBENCH_LLAMACPP_PLUGIN"  # environment variable; `off` keeps to Python


FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared")


LIBRARIES = ("ggml-base", "ggml-cpu", "llama")


NO_ROOM = 1  # answer of `kvb_load`: the cache has not as many free cells


class State(ctypes.Structure):
    """`kvb_state`: a saved sequence."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("size", "keys", "tokens")),
    )


class Cells(ctypes.Structure):
    """`kvb_cells`: the first layer's keys of all cells."""

    _fields_ = (
        ("keys", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("count", "row_bytes")),
    )


class Keys(ctypes.Structure):
    """`kvb_keys`: keys of all layers of a saved sequence."""

    _fields_ = (
        ("first", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("layers", "layer_bytes", "tokens")),
        *((name, ctypes.c_int32) for name in ("heads", "head_dim", "halved", "interleaved")),
    )


_P, _I, _L = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64


_NUMBERS, _FLOATS = ctypes.POINTER(ctypes.c_int64), ctypes.POINTER(ctypes.c_float)


_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "kvb_tensor_size": (ctypes.c_size_t,),
    "kvb_watch_new": (_P, _I),
    "kvb_watch_want_queries": (None, _P, _I),
    "kvb_watch_callback": (_P,),
    "kvb_watch_begin": (None, _P),
    "kvb_watch_base": (_P, _P, _I, _I),
    "kvb_watch_cells": (_NUMBERS, _P, _NUMBERS),
    "kvb_watch_queries": (_FLOATS, _P, _I, _NUMBERS),
    "kvb_load": (_I, _P, ctypes.POINTER(State), ctypes.POINTER(Cells), _L, _I, _I, _P),
    "kvb_turn": (None, ctypes.POINTER(Keys), _L, _P),
}


@cache
def find_plugin() -> Any:
    """Return the plug-in, or None with one warning that says why there is none."""
    try:
        return load_plugin()
    except PrerequisiteError as error:
        logger.warning("llama.cpp is handled from Python, which is slower: %s", error)
        return None


@cache
def load_plugin() -> Any:
    """Return the compiled plug-in, building it if this machine has not yet.

    PrerequisiteError if it is switched off, without a compiler or headers, or if its structs are
    not the library's.
    """
    if os.environ.get(NO_PLUGIN, "").lower() == "off":
        raise PrerequisiteError(f"switched off by {NO_PLUGIN}=off")
    ggml()
    plugin: Any = ctypes.CDLL(str(_library()))
    declare(plugin, _SIGNATURES)
    if plugin.kvb_tensor_size() != ctypes.sizeof(Tensor):
        raise PrerequisiteError("the installed ggml headers are not those of the libraries")
    return plugin


def _library() -> Path:
    command = _command()
    target = cache_folder() / f"kvb-llamacpp-{_key(command)}.so"
    if not target.exists():
        try:
            _build(command, target)
        except OSError as error:
            raise PrerequisiteError(f"cannot write {target.parent}: {error.strerror}") from error
    return target


def _build(command: tuple[str, ...], target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".build-", dir=target.parent) as place:
        draft = Path(place) / target.name
        done = run_compiler((*command, "-o", str(draft)))
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if "error" in line] or [""]
            raise PrerequisiteError(f"{command[0]} could not compile the plug-in: {said[0][:300]}")
        draft.replace(target)


def _command() -> tuple[str, ...]:
    compiler = shlex.split(find_compiler())
    libraries = library_folder()
    headers = libraries.parents[1] / "include"
    if not (headers / "ggml.h").exists():
        raise PrerequisiteError(f"no ggml.h in {headers}")
    link = (f"-L{libraries}", *(f"-l{name}" for name in LIBRARIES), f"-Wl,-rpath,{libraries}")
    return (*compiler, *FLAGS, f"-I{headers}", *map(str, sorted(SOURCES.glob("*.cpp"))), *link)


def _key(command: tuple[str, ...]) -> str:
    """Name a build by what it is made of and from."""
    # Not where the sources lie: the backend finds them through a link of its own.
    words = [word.replace(str(SOURCES), "") for word in command]
    digest = hashlib.sha256(repr((words, platform.machine())).encode())
    for path in sorted(SOURCES.glob("*.cpp")):
        digest.update(path.read_bytes())
    for name in LIBRARIES:
        digest.update((library_folder() / f"lib{name}.so").read_bytes())
    return digest.hexdigest()[:16]


CACHE_NAME = re.compile(rb"cache_([kv])_l(\d+)$")


QUERY_NAME = re.compile(rb"Qcur-(\d+)$")


INT64 = 27


_NUMPY = {0: np.float32, 1: np.float16}


class Watch(ABC):
    """Sees what `llama_decode` does with the tokens of its batch, in the order of the batch."""

    callback: Any  # value of `llama_context_params.cb_eval`
    data: int | None = None  # value of `llama_context_params.cb_eval_user_data`
    wants_queries: bool

    def want_queries(self, wanted: bool) -> None:
        """Keep queries from the next decode on, or no longer."""
        self.wants_queries = wanted

    @abstractmethod
    def begin(self) -> None:
        """Forget the last batch."""

    @abstractmethod
    def base(self, kind: str, layer: int) -> int:
        """Return the address of the cache tensor of `kind` `k` or `v`; 0 before a first decode."""

    @abstractmethod
    def cells(self) -> torch.Tensor:
        """Return the cell of every token since `begin`, int64."""

    @abstractmethod
    def queries(self, layer: int, heads: int) -> torch.Tensor:
        """Return queries [heads, tokens, head_dim] of the tokens since `begin`, float32."""


def make_watch(layers: int, queries: bool) -> Watch:
    """Return the plug-in's watch, or the one in Python."""
    kind = PythonWatch if find_plugin() is None else NativeWatch
    return kind(layers, queries)


class NativeWatch(Watch):
    """The plug-in's watch; PrerequisiteError where that cannot be built."""

    def __init__(self, layers: int, queries: bool) -> None:
        self._plugin = load_plugin()
        self._watch = self._plugin.kvb_watch_new(layers)
        kind = llama().ggml_backend_sched_eval_callback
        self.callback = ctypes.cast(self._plugin.kvb_watch_callback(), kind)
        self.data = int(self._watch)
        self.want_queries(queries)

    def want_queries(self, wanted: bool) -> None:
        super().want_queries(wanted)
        self._plugin.kvb_watch_want_queries(self._watch, int(wanted))

    def begin(self) -> None:
        self._plugin.kvb_watch_begin(self._watch)

    def base(self, kind: str, layer: int) -> int:
        return int(self._plugin.kvb_watch_base(self._watch, int(kind == "v"), layer) or 0)

    def cells(self) -> torch.Tensor:
        count = ctypes.c_int64()
        first = self._plugin.kvb_watch_cells(self._watch, ctypes.byref(count))
        return _copied(first, count.value, torch.int64)

    def queries(self, layer: int, heads: int) -> torch.Tensor:
        count = ctypes.c_int64()
        first = self._plugin.kvb_watch_queries(self._watch, layer, ctypes.byref(count))
        rows = _copied(first, count.value, torch.float32)
        return rows.reshape(self.cells().numel(), heads, -1).transpose(0, 1)


def _copied(first: Any, count: int, dtype: torch.dtype) -> torch.Tensor:
    if not count:
        return torch.zeros(0, dtype=dtype)
    return torch.from_numpy(np.ctypeslib.as_array(first, (count,)).copy())


class PythonWatch(Watch):
    """The watch in Python. In `kept` it has further tensors by `names`, `kq_soft_max-0` say."""

    def __init__(self, layers: int, queries: bool, names: Collection[str] = ()) -> None:  # noqa: ARG002
        self.wants_queries = queries
        self.names = frozenset(name.encode() for name in names)
        self.kept: dict[str, list[Any]] = {}
        self._ggml = ggml()
        self._set_rows, self._rope = op_number("SET_ROWS"), op_number("ROPE")
        self._bases: dict[tuple[str, int], int] = {}
        self._cells: list[Any] = []
        self._queries: dict[int, list[Any]] = {}
        self.callback = llama().ggml_backend_sched_eval_callback(
            lambda address, asking, _: self._ask(address) if asking else self._take(address)
        )

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
        name: bytes = self._ggml.ggml_get_name(address)
        if name in self.names:
            return True
        if name.startswith(b"cache_"):
            return self._note_cache(_tensor(address))
        return self.wants_queries and self._query_layer(address, name) >= 0

    def _note_cache(self, tensor: Tensor) -> bool:
        """Learn where a cache lies; True if the tensor holds the cells of the batch."""
        if tensor.op != self._set_rows or not tensor.view_src:
            return False
        match = CACHE_NAME.match(_tensor(tensor.view_src).name)
        if match is None:
            return False
        kind, layer = match[1].decode(), int(match[2])
        self._bases[kind, layer] = tensor.view_src
        return kind == "k" and layer == 0

    def _query_layer(self, address: int, name: bytes) -> int:
        """Return the layer whose rotated queries a tensor holds; three tensors share the name."""
        match = QUERY_NAME.match(name)
        if match is None or _tensor(address).op != self._rope:
            return -1
        return int(match[1])

    def _take(self, address: int) -> bool:
        name: bytes = self._ggml.ggml_get_name(address)
        if name.startswith(b"cache_"):
            self._cells.append(self._array(_tensor(address).src[1]).reshape(-1))
            return True
        if name in self.names:
            self.kept.setdefault(name.decode(), []).append(self._array(address))
        layer = self._query_layer(address, name) if self.wants_queries else -1
        if layer >= 0:
            self._queries.setdefault(layer, []).append(self._array(address)[0])
        return True

    def _array(self, address: int) -> Any:
        """Copy a tensor; numpy's dimensions are ggml's in reverse."""
        tensor = _tensor(address)
        raw = np.empty(tensor.nb[3] * tensor.ne[3], np.uint8)
        self._ggml.ggml_backend_tensor_get(address, raw.ctypes.data, 0, raw.nbytes)
        kind = np.int64 if tensor.type == INT64 else _NUMPY[tensor.type]
        shape, steps = tuple(tensor.ne)[::-1], tuple(tensor.nb)[::-1]
        return np.lib.stride_tricks.as_strided(raw.view(kind), shape, steps).copy()


def _tensor(address: int) -> Tensor:
    return ctypes.cast(address, ctypes.POINTER(Tensor)).contents
