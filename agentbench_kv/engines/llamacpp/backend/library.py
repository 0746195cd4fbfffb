"""The llama-cpp-python binding, checked for the version that this backend was written against."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from agentbench_kv.errors import PrerequisiteError

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
_SIGNATURES: dict[str, tuple[Any, ...]] = {
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
    declare(base, _SIGNATURES)
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
