"""Building and loading the plug-in, once for every version of it and of llama.cpp."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from agentbench_kv.engines.llamacpp.backend.library import Tensor, ggml, library_folder
from agentbench_kv.errors import PrerequisiteError
from agentbench_kv.kernels.build import cache_folder

__all__ = ["NO_PLUGIN", "load_plugin"]

SOURCE = Path(__file__).parents[1] / "csrc" / "watch.cpp"
NO_PLUGIN = "KVBENCH_LLAMACPP_PLUGIN"
"""Environment variable; `off` keeps to Python."""
FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared")
TIMEOUT_S = 300


@cache
def load_plugin() -> Any:
    """Return the compiled plug-in, building it if this machine has not yet.

    Raises
    ------
    PrerequisiteError
        If it is switched off, without a compiler or headers, or if its structs are others than the
        library's.
    """
    if os.environ.get(NO_PLUGIN, "").lower() == "off":
        raise PrerequisiteError(f"switched off by {NO_PLUGIN}=off")
    ggml()
    plugin: Any = ctypes.CDLL(str(_library()))
    pointer, number = ctypes.c_void_p, ctypes.POINTER(ctypes.c_int64)
    plugin.kvb_tensor_size.restype = ctypes.c_size_t
    plugin.kvb_watch_new.restype = pointer
    plugin.kvb_watch_callback.restype = pointer
    plugin.kvb_watch_begin.argtypes, plugin.kvb_watch_begin.restype = (pointer,), None
    plugin.kvb_watch_base.argtypes = (pointer, ctypes.c_int, ctypes.c_int)
    plugin.kvb_watch_base.restype = pointer
    plugin.kvb_watch_cells.argtypes = (pointer, number)
    plugin.kvb_watch_cells.restype = number
    plugin.kvb_watch_queries.argtypes = (pointer, ctypes.c_int, number)
    plugin.kvb_watch_queries.restype = ctypes.POINTER(ctypes.c_float)
    if plugin.kvb_tensor_size() != ctypes.sizeof(Tensor):
        raise PrerequisiteError("the installed ggml headers are not those of the libraries")
    return plugin


def _library() -> Path:
    command = _command()
    target = cache_folder() / f"kvb-llamacpp-{_key(command)}.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".build-", dir=target.parent) as place:
            draft = Path(place) / target.name
            _compile((*command, "-o", str(draft)))
            draft.replace(target)
    return target


def _command() -> tuple[str, ...]:
    wanted = os.environ.get("CXX", "").strip() or next(
        filter(shutil.which, ("g++", "clang++", "c++")), ""
    )
    if not wanted:
        raise PrerequisiteError("no C++ compiler; install g++")
    libraries = library_folder()
    headers = libraries.parents[1] / "include"
    if not (headers / "ggml.h").exists():
        raise PrerequisiteError(f"no ggml.h in {headers}")
    link = (f"-L{libraries}", "-lggml-base", f"-Wl,-rpath,{libraries}")
    return (*shlex.split(wanted), *FLAGS, f"-I{headers}", str(SOURCE), *link)


def _key(command: tuple[str, ...]) -> str:
    digest = hashlib.sha256(repr((command, platform.machine())).encode())
    digest.update(SOURCE.read_bytes())
    digest.update((library_folder() / "libggml-base.so").read_bytes())
    return digest.hexdigest()[:16]


def _compile(command: tuple[str, ...]) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PrerequisiteError(f"cannot run {command[0]}: {error}") from error
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if "error" in line] or [""]
        raise PrerequisiteError(f"{command[0]} could not compile {SOURCE.name}: {said[0][:300]}")
