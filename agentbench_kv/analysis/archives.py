"""Named arrays with a JSON note in one file: `.npz` or `.safetensors`, never pickles."""

from __future__ import annotations

import json
import os
import zipfile
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from agentbench_kv.errors import UsageError
from agentbench_kv.results.files import writing

SUFFIXES = (".npz", ".safetensors")
_UNREADABLE = (
    OSError,
    EOFError,
    KeyError,
    MemoryError,
    NotImplementedError,
    ValueError,
    SafetensorError,
    zipfile.BadZipFile,
    zlib.error,
)


@dataclass(frozen=True)
class Archive:
    """What a file holds."""

    arrays: dict[str, Tensor]  # those asked for; of a safetensors file they are memory-mapped
    names: tuple[str, ...]  # all arrays of the file
    meta: dict[str, Any]  # the JSON note; empty if the file has none


def check_suffix(path: Path) -> str:
    """Return the suffix of a path; UsageError if it is none we read and write."""
    if path.suffix not in SUFFIXES:
        raise UsageError(f"{path}: expected a file name that ends in .npz or .safetensors")
    return path.suffix


def read_archive(path: Path, wanted: Collection[str]) -> Archive:
    """Read the arrays in `wanted`, as far as the file has them; UsageError if it is no archive."""
    reader = {".npz": _read_npz, ".safetensors": _read_safetensors}[check_suffix(path)]
    if not path.is_file():
        raise UsageError(f"{path} {'is not a file' if path.exists() else 'does not exist'}")
    try:
        return reader(path, wanted)
    except _UNREADABLE as error:
        reason = str(error).strip() or type(error).__name__
        raise UsageError(
            f"cannot read {path}: {reason.splitlines()[0]}; expected a {path.suffix} file as "
            "docs/analysis.md describes"
        ) from None


def _read_npz(path: Path, wanted: Collection[str]) -> Archive:
    # Opened here: numpy leaves a damaged archive open.
    with path.open("rb") as handle:
        file = np.load(handle, allow_pickle=False)
        if not isinstance(file, np.lib.npyio.NpzFile):
            raise ValueError("it holds a single array, not an archive of named arrays")
        names = tuple(name for name in file.files if name != "meta")
        arrays = {name: _as_tensor(path, name, file[name]) for name in names if name in wanted}
        note = np.asarray(file["meta"]).reshape(-1).tolist() if "meta" in file.files else []
    return Archive(arrays, names, _parse_note(path, str(note[0]) if note else ""))


def _as_tensor(path: Path, name: str, array: np.ndarray[Any, Any] | bytes) -> Tensor:
    if isinstance(array, bytes):
        raise ValueError(f"its member {name!r} is not an array")
    if array.dtype.kind not in "biuf":
        raise UsageError(f"{path}: array {name!r} has dtype {array.dtype}, expected numbers")
    if array.dtype.kind == "u":
        array = array.astype(np.int64)
    return torch.from_numpy(np.asarray(array, array.dtype.newbyteorder("="), order="C"))


def _read_safetensors(path: Path, wanted: Collection[str]) -> Archive:
    with safe_open(path, "pt") as file:
        names = tuple(file.keys())
        arrays = {name: _signed(file.get_tensor(name)) for name in names if name in wanted}
        note = (file.metadata() or {}).get("meta", "")
    return Archive(arrays, names, _parse_note(path, note))


def _signed(tensor: Tensor) -> Tensor:
    """Return int64 for the unsigned types that torch can hardly compute with."""
    unsigned = tensor.dtype in (torch.uint16, torch.uint32, torch.uint64)
    return tensor.to(torch.int64) if unsigned else tensor


def _parse_note(path: Path, note: str) -> dict[str, Any]:
    if not note:
        return {}
    try:
        meta = json.loads(note)
    except (ValueError, RecursionError):
        meta = None
    if not isinstance(meta, dict):
        raise UsageError(f"{path}: meta is not a JSON object")
    return meta


def write_archive(path: Path, arrays: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
    """Write arrays and note; `path` is replaced when all of it is written.

    UsageError if the suffix is not one we write, PrerequisiteError if the place cannot be written.
    """
    writer = {".npz": _write_npz, ".safetensors": _write_safetensors}[check_suffix(path)]
    temporary = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in arrays.items()}
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            writer(temporary, plain, json.dumps(dict(meta)))
            temporary.replace(path)
        except SafetensorError as error:
            # safetensors wraps the operating system's errors in a type of its own.
            raise OSError(str(error)) from error
        finally:
            temporary.unlink(missing_ok=True)


def _write_npz(path: Path, arrays: dict[str, Tensor], note: str) -> None:
    members: dict[str, Any] = {name: tensor.numpy() for name, tensor in arrays.items()}
    with path.open("wb") as file:
        np.savez(file, meta=np.array(note), **members)


def _write_safetensors(path: Path, arrays: dict[str, Tensor], note: str) -> None:
    # safetensors writes files that only their owner can read, whatever the umask.
    path.touch()
    mode = path.stat().st_mode
    save_file(arrays, path, metadata={"meta": note})
    path.chmod(mode)
