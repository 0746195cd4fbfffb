"""The C++ plug-in: built once for every version of it and of llama.cpp, then loaded."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from agentbench_kv.engines.llamacpp.backend.library import Tensor, declare, ggml, library_folder
from agentbench_kv.errors import PrerequisiteError
from agentbench_kv.kernels.build import cache_folder, find_compiler, run_compiler

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
