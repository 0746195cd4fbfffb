"""GGUF files: what stands in their headers."""

from __future__ import annotations

import hashlib
import math
import os
import struct
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

from agentbench_kv.errors import PrerequisiteError, UsageError

SUFFIX = ".gguf"
MAGIC = b"GGUF"
VERSIONS = (2, 3)  # https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; equal as read here
STRING, ARRAY = 8, 9
ROPE_FACTORS = "rope_freqs.weight"
_FLOAT32, _MOST_PAIRS = 0, 4096
_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q",
    12: "<d",
}  # fmt: skip
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5  # types of tokens
_MANY = 1 << 20


def file_sha(path: Path) -> str:
    """Return the hash of a file, computed once as long as it does not change."""
    state = path.stat()
    return _sha(path, state.st_size, state.st_mtime_ns)


@lru_cache(maxsize=8)
def _sha(path: Path, size: int, modified_ns: int) -> str:  # noqa: ARG001  the cache's key
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_metadata(path: Path) -> Mapping[str, Any]:
    """Return the keys and values of a GGUF file; arrays become lists.

    The package gguf makes a numpy view of every string and needs 8.6 s for a model with 152,000
    tokens, this 0.2 s; and outside of the environment `llamacpp` it need not be installed.
    """
    try:
        with path.open("rb") as file:
            magic, version = file.read(4), _scalar(file, 4)
            if magic != MAGIC or version not in VERSIONS:
                raise PrerequisiteError(
                    f"{path} is no GGUF file; kvbench convert FOLDER OUT makes one"
                )
            _tensors, pairs = _scalar(file, 10), _scalar(file, 10)
            return {_string(file): _value(file, _scalar(file, 4)) for _ in range(pairs)}
    except OSError as error:
        raise PrerequisiteError(f"cannot read {path}: {error.strerror}") from error
    except (struct.error, UnicodeDecodeError, KeyError, RecursionError):
        raise damaged(path) from None


def damaged(path: Path) -> PrerequisiteError:
    return PrerequisiteError(f"{path} is damaged or cut short; make or download it again")


def read_rope_factors(path: Path) -> tuple[float, ...]:
    """Return what a GGUF file divides the frequencies of RoPE by, pair by pair; () if by nothing.

    So llama.cpp's converter writes the scaled RoPE of Llama 3.1 and later, in a tensor instead of
    the header. The file is one that `read_metadata` has read.
    """
    try:
        with path.open("rb") as file:
            file.seek(8)
            tensors, pairs = _scalar(file, 10), _scalar(file, 10)
            metadata = {_string(file): _value(file, _scalar(file, 4)) for _ in range(pairs)}
            places = dict(_tensor(file) for _ in range(tensors))
            if ROPE_FACTORS not in places:
                return ()
            sizes, kind, offset = places[ROPE_FACTORS]
            if kind != _FLOAT32 or len(sizes) != 1 or sizes[0] > _MOST_PAIRS:
                raise UsageError(f"{path}: {ROPE_FACTORS} is no vector of float32")
            step = int(metadata.get("general.alignment", 32))
            file.seek(-(-file.tell() // step) * step + offset)
            return struct.unpack(f"<{sizes[0]}f", file.read(4 * sizes[0]))
    except OSError as error:
        raise PrerequisiteError(f"cannot read {path}: {error.strerror}") from error
    except (struct.error, ArithmeticError, LookupError, MemoryError, TypeError, ValueError):
        raise PrerequisiteError(
            f"{path} is damaged or cut short; make or download it again"
        ) from None


# What llama.cpp takes where the header does not say; other values are not understood.
_NEUTRAL = {
    "alpha": 0.0,
    "yarn_ext_factor": 1.0,
    "yarn_attn_factor": 1.0,
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
    "yarn_log_multiplier": 0.0,
}


def rope_parameters(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return how a header scales RoPE, in Hugging Face's words; UsageError if not understood.

    A tensor of the file may scale it too: `read_rope_factors`.
    """
    name = str(metadata["general.architecture"])
    prefix = f"{name}.rope.scaling."
    given = {k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix)}
    kind = str(given.get("type", "linear"))
    factor = float(given.get("factor") or metadata.get(f"{name}.rope.scale_linear") or 1.0)
    odd = [key for key, usual in _NEUTRAL.items() if given.get(key, usual) != usual]
    attention = float(given.get("attn_factor", 1.0))
    if kind not in ("none", "linear", "yarn") or odd or (kind != "yarn" and attention != 1):
        raise UsageError(
            f"{name} scales RoPE in a way that is not understood "
            f"({', '.join([f'type {kind[:20]}', *odd])})"
        )
    theta = {"rope_theta": float(metadata.get(f"{name}.rope.freq_base", 10000.0))}
    if kind == "none" or factor == 1:
        return {"rope_type": "default", **theta}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor, **theta}
    original = given.get("original_context_length") or metadata[f"{name}.context_length"]
    scale = (0.1 * math.log(factor) + 1.0) * attention
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": int(original),
        "attention_factor": scale,
        **theta,
    }


def _tensor(file: BinaryIO) -> tuple[str, tuple[list[int], int, int]]:
    """Read a tensor's name, and its sizes, its type's number and where it begins."""
    name = _string(file)
    sizes = [_scalar(file, 10) for _ in range(_scalar(file, 4))]
    return name, (sizes, _scalar(file, 4), _scalar(file, 10))


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == STRING:
        return _string(file)
    if kind != ARRAY:
        return _scalar(file, kind)
    inner, count = _scalar(file, 4), _scalar(file, 10)
    if inner in (STRING, ARRAY):
        return [_value(file, inner) for _ in range(count)]
    form = _SCALARS[inner]
    data = _read(file, count * struct.calcsize(form))
    return [value for (value,) in struct.iter_unpack(form, data)]


def _string(file: BinaryIO) -> str:
    return _read(file, _scalar(file, 10)).decode()


def _read(file: BinaryIO, size: int) -> bytes:
    """Read so many bytes; for many, no room is made unless the file has them."""
    if size > _MANY and size > os.fstat(file.fileno()).st_size:
        raise struct.error("cut short")
    data = file.read(size)
    if len(data) != size:
        raise struct.error("cut short")
    return data


def _scalar(file: BinaryIO, kind: int) -> Any:
    form = _SCALARS[kind]
    return struct.unpack(form, _read(file, struct.calcsize(form)))[0]
