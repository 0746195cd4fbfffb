"""The libraries that the server calls: llama-cpp-python, ggml below it, and our C++ plug-in.

The first two are checked for the version whose structs and formats are known here. The plug-in is
compiled once for every version of it and of llama.cpp.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import sys
import threading
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from agentbench_kv.errors import PrerequisiteError
from agentbench_kv.kernels.build import cached, find_compiler

logger = logging.getLogger(__name__)

# Version of llama-cpp-python; struct layouts and the state format are this one's.
PINNED = "0.3.36"
GGML_VERSION = "0.25.3"
OBJECT_BYTES = 32  # that a context adds to a tensor (sizeof(struct ggml_object))
ERROR_LEVEL = 4
MEND = "build the environment again: kvbench env create llamacpp --recreate"

SOURCES = Path(__file__).parents[1] / "csrc"
NO_PLUGIN = "KVBENCH_LLAMACPP_PLUGIN"  # environment variable; `off` keeps to Python
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared")
LIBRARIES = ("ggml-base", "ggml-cpu", "llama")
NO_ROOM = 1  # answer of `kvb_load`: too few cells of the cache are free

_P, _TEXT, _SIZE = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t
_I, _L = ctypes.c_int32, ctypes.c_int64
_NUMBERS, _FLOATS = ctypes.POINTER(_L), ctypes.POINTER(ctypes.c_float)
LISTENER = ctypes.CFUNCTYPE(None, ctypes.c_int, _FLOATS, _L)  # `kvb_listener`


class GgmlTensor(ctypes.Structure):
    """`struct ggml_tensor` of ggml.h."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("buffer", _P),
        ("ne", _L * 4),
        ("nb", _SIZE * 4),
        ("op", ctypes.c_int),
        ("op_params", _I * 16),
        ("flags", _I),
        ("src", _P * 10),
        ("view_src", _P),
        ("view_offs", _SIZE),
        ("data", _P),
        ("name", ctypes.c_char * 64),
        ("extra", _P),
        ("padding", ctypes.c_char * 8),
    )


class PluginState(ctypes.Structure):
    """`kvb_state`: a saved sequence."""

    _fields_ = (("data", _P), *((name, _L) for name in ("size", "keys", "tokens")))


class PluginCells(ctypes.Structure):
    """`kvb_cells`: the first layer's keys of all cells."""

    _fields_ = (("keys", _P), ("count", _L), ("row_bytes", _L))


class PluginKeys(ctypes.Structure):
    """`kvb_keys`: keys of all layers of a saved sequence."""

    _fields_ = (
        ("first", _P),
        *((name, _L) for name in ("layers", "layer_bytes", "tokens")),
        *((name, _I) for name in ("heads", "head_dim", "halved", "interleaved")),
    )


# Functions: name -> (result, argument, ...)
_GGML: dict[str, tuple[Any, ...]] = {
    "ggml_version": (_TEXT,),
    "ggml_tensor_overhead": (_SIZE,),
    "ggml_op_name": (_TEXT, ctypes.c_int),
    "ggml_get_name": (_TEXT, _P),
    "ggml_backend_buffer_is_host": (ctypes.c_bool, _P),
    "ggml_backend_tensor_get": (None, _P, _P, _SIZE, _SIZE),
}
_PLUGIN: dict[str, tuple[Any, ...]] = {
    "kvb_tensor_size": (_SIZE,),
    "kvb_watch_new": (_P, _I),
    "kvb_watch_want_queries": (None, _P, _I),
    "kvb_watch_listen": (None, _P, _P),
    "kvb_watch_callback": (_P,),
    "kvb_watch_abort": (None, _P, _I),
    "kvb_watch_abort_callback": (_P,),
    "kvb_watch_begin": (None, _P),
    "kvb_watch_base": (_P, _P, _I, _I),
    "kvb_watch_cells": (_NUMBERS, _P, _NUMBERS),
    "kvb_watch_queries": (_FLOATS, _P, _I, _NUMBERS),
    "kvb_load": (
        *(_I, _P, ctypes.POINTER(PluginState), ctypes.POINTER(PluginCells)),
        *(_L, _I, _I, _P),
    ),
    "kvb_turn": (None, ctypes.POINTER(PluginKeys), _L, _P),
}


def _load(path: Path, signatures: Mapping[str, tuple[Any, ...]]) -> Any:
    library: Any = ctypes.CDLL(str(path))
    for name, (result, *arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


@cache
def llama() -> Any:
    """Import the binding, quiet but for errors, and check its version."""
    # Without it an assertion of ggml starts a debugger for the backtrace.
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")
    # The binding imports it for a cache of prompts on disk that nobody makes here. Its last release
    # reads pickles from that folder (CVE-2025-69872), so the environment does not have it.
    sys.modules.setdefault("diskcache", ModuleType("diskcache"))
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
    base = _load(library_folder() / "libggml-base.so", _GGML)
    found, size = base.ggml_version().decode(), ctypes.sizeof(GgmlTensor)
    tensor_bytes = base.ggml_tensor_overhead() - OBJECT_BYTES
    if found != GGML_VERSION or tensor_bytes != size:
        raise PrerequisiteError(
            f"ggml {found} with tensors of {tensor_bytes} bytes, expected {GGML_VERSION} with "
            f"{size}; {MEND}"
        )
    return base


def library_folder() -> Path:
    """Return the folder of the shared libraries that the binding loads."""
    return Path(llama().__file__).parent / "lib"


@cache
def op_number(name: str) -> int:
    """Return the number of a ggml operation, `SET_ROWS` for example."""
    for number in range(256):
        if ggml().ggml_op_name(number).decode() == name:
            return number
    raise PrerequisiteError(f"ggml has no operation {name}; {MEND}")


def tensor_at(address: int) -> GgmlTensor:
    return ctypes.cast(address, ctypes.POINTER(GgmlTensor)).contents


muted = threading.Event()  # while what the library calls a failure was asked for


def _print_error(level: int, text: bytes, _data: object) -> None:
    if level == ERROR_LEVEL and not muted.is_set():
        sys.stderr.write(text.decode(errors="replace"))


# llama.cpp keeps the pointer, so the object must live as long as the process.
_log = ctypes.CFUNCTYPE(None, ctypes.c_int, _TEXT, _P)(_print_error)


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
    """Return the plug-in, built once per machine; PrerequisiteError if it is off or cannot be."""
    if os.environ.get(NO_PLUGIN, "").lower() == "off":
        raise PrerequisiteError(f"switched off by {NO_PLUGIN}=off")
    ggml()
    command = _command()
    plugin = _load(cached(f"kvb-llamacpp-{_key(command)}", command, "plug-in"), _PLUGIN)
    if plugin.kvb_tensor_size() != ctypes.sizeof(GgmlTensor):
        raise PrerequisiteError("the installed ggml headers are not those of the libraries")
    return plugin


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
