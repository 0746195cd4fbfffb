"""Data sets that users bring: where they are and whether they are the published ones."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from agentbench_kv.environments import home
from agentbench_kv.errors import PrerequisiteError

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
