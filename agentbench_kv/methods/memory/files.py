"""Rows of past sessions in files, so that a run need not read again what an earlier one has read.

A file holds one session and does not depend on blocks: any setting of the method reads it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

_FORMAT = "kvbench past session 1"  # to be raised when other rows come of the same session
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PastRows:
    """A past session's rows [layers, kv_heads, n, head_dim], and what they cost.

    Keys are float32 and before RoPE, values in the model's dtype. The rows of a file are mapped.
    """

    keys: Tensor
    values: Tensor
    seconds: float  # that the model took to read the session


class PastFiles:
    """A folder of past sessions, each in a file that is named by all that its rows depend on.

    `about` is what they depend on besides the session's tokens: model, precision, software. A file
    is written whole or not at all, and one that is damaged, or of something else, is as none.
    """

    def __init__(
        self,
        folder: Path,
        about: Mapping[str, str],
        shape: tuple[int, int, int],
        dtype: torch.dtype,
    ) -> None:
        self.folder = folder
        self._about = dict(about)
        self._shape = shape  # layers, KV heads, head_dim
        self._dtype = dtype
        self._full = False

    def path(self, tokens: Sequence[int]) -> Path:
        """Return where the rows of a session of these tokens lie, if they do."""
        return self.folder / f"{_sha(self._key(tokens).encode())[:32]}.safetensors"

    def find(self, tokens: Sequence[int]) -> PastRows | None:
        """Map the rows of a session of these tokens; None if they have to be computed."""
        path = self.path(tokens)
        if not path.exists():
            return None
        try:
            return self._read(path, tokens)
        except (OSError, SafetensorError, ValueError, KeyError, RuntimeError) as error:
            said = str(error).strip().splitlines()[:1]
            _log.warning(
                "kvbench: %s is no file of this past session (%s): the model reads it again",
                *(path, *(said or [type(error).__name__])),
            )
            return None

    def keep(self, tokens: Sequence[int], rows: PastRows) -> None:
        """Write a session's rows; where that fails it is said once, and nothing more is written."""
        if self._full:
            return
        path, key = self.path(tokens), self._key(tokens)
        seconds = repr(rows.seconds)
        about = {"format": _FORMAT, "about": key, "seconds": seconds}
        about["sha256"] = _digest(key, seconds, rows.keys, rows.values)
        # What a killed process leaves of it, `results.files.sweep` removes when it is old.
        partial = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
        try:
            parts = {"keys": rows.keys.contiguous(), "values": rows.values.contiguous()}
            save_file(parts, partial, about)
            partial.chmod(0o644)
            with partial.open("rb") as file:
                os.fsync(file.fileno())
            partial.replace(path)
        except (OSError, SafetensorError) as error:
            self._full = True
            _log.warning(
                "kvbench: cannot write %s (%s): what is read from now on is kept for this run only",
                *(path, str(error).strip()),
            )
        finally:
            with suppress(OSError):
                partial.unlink(missing_ok=True)

    def _read(self, path: Path, tokens: Sequence[int]) -> PastRows:
        key = self._key(tokens)
        with safe_open(path, framework="pt") as file:
            said: dict[str, Any] = file.metadata() or {}
            keys, values = file.get_tensor("keys"), file.get_tensor("values")
        if said.get("format") != _FORMAT:
            raise ValueError("it is of another kind")
        if said.get("about") != key:
            raise ValueError("it is of another model, session or version")
        layers, heads, width = self._shape
        wanted = (layers, heads, len(tokens), width)
        if not keys.shape == values.shape == wanted:
            raise ValueError(f"it has rows of shape {[*keys.shape]}, not {[*wanted]}")
        if (keys.dtype, values.dtype) != (torch.float32, self._dtype):
            raise ValueError(f"its rows are {keys.dtype} and {values.dtype}")
        if said.get("sha256") != _digest(key, said["seconds"], keys, values):
            raise ValueError("its content is not what was written")
        seconds = float(said["seconds"])
        if not 0 <= seconds < math.inf:
            raise ValueError(f"it took {seconds} s")
        return PastRows(keys, values, seconds)

    def _key(self, tokens: Sequence[int]) -> str:
        ids = _sha(",".join(map(str, tokens)).encode())
        return json.dumps({**self._about, "tokens": len(tokens), "ids": ids}, sort_keys=True)


def _digest(key: str, seconds: str, *rows: Tensor) -> str:
    found = hashlib.sha256(f"{key}\n{seconds}\n".encode())
    for each in rows:
        found.update(each.detach().to("cpu").contiguous().view(torch.uint8).numpy().data)
    return found.hexdigest()


def _sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
