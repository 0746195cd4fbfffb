"""Which Python an environment is built from."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

Version = tuple[int, int]


def find_python(oldest: Version, newest: Version) -> Path:
    """Return a Python of a version from `oldest` to `newest`: kvbench's own if it is one.

    Else the first that runs of `python3.N` on the PATH and of pyenv's versions, older ones first;
    kvbench's own interpreter if there is none at all.
    """
    own = Path(sys.executable)
    if oldest <= sys.version_info[:2] <= newest:
        return own
    for candidate in _candidates(oldest, newest):
        found = version_of(candidate)
        if found is not None and oldest <= found <= newest:
            return candidate
    return own


def version_of(python: Path) -> Version | None:
    """Return the version of an interpreter, `(major, minor)`; None if it does not run."""
    code = "import sys; print(sys.version_info[0], sys.version_info[1])"
    try:
        run = subprocess.run(
            (str(python), "-I", "-c", code), capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    numbers = run.stdout.split()
    return (int(numbers[0]), int(numbers[1])) if run.returncode == 0 else None


def _candidates(oldest: Version, newest: Version) -> Iterator[Path]:
    names = [f"{newest[0]}.{minor}" for minor in range(oldest[1], newest[1] + 1)]
    for name in names:
        if found := shutil.which(f"python{name}"):
            yield Path(found)
    root = Path(os.environ.get("PYENV_ROOT") or "~/.pyenv").expanduser()
    for name in names:
        yield from sorted(root.glob(f"versions/{name}.*/bin/python"))
