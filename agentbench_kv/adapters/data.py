"""Data sets that users bring: where they are and whether they are the published ones."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agentbench_kv.environments import home
from agentbench_kv.errors import PrerequisiteError, UsageError

VARIABLE = "KVBENCH_DATA"


def data_folder() -> Path:
    """Return `$KVBENCH_DATA`, or the folder `data` in kvbench's home."""
    chosen = os.environ.get(VARIABLE)
    return Path(chosen).expanduser().absolute() if chosen else home() / "data"


def data_file(name: str, sha256: str | None, hint: str) -> Path:
    """Return a file (or folder, without a hash) of the data folder.

    PrerequisiteError, with the hint where users get it, if it is missing or has another hash.
    """
    path = data_folder() / name
    if not path.exists():
        raise PrerequisiteError(f"no {name} in {path.parent}: {hint}, then set {VARIABLE}")
    if sha256 is None:
        return path
    found = file_sha256(path)
    if found != sha256:
        raise PrerequisiteError(
            f"{path} is not the published file: sha256 {found[:12]}, expected {sha256[:12]}; {hint}"
        )
    return path


def file_sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def json_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the numbers and objects of a JSON lines file (.gz too); UsageError for other lines."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8", errors="replace") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise UsageError(f"{path} line {number} is not JSON: {error}") from error
            if not isinstance(row, dict):
                raise UsageError(f"{path} line {number} is not a JSON object")
            yield number, row
