"""What a folder's code is: its files' digest, and the commit of the git checkout it is from."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

CHANGED = "+changes"
_WAIT_S = 30


def code_sha(package: Path) -> str | None:
    """Return 16 hex digits of a package's file names and bytes; None if one cannot be read.

    Compiled and hidden files are not among them, so that a wheel's are those of its checkout.
    """
    try:
        return _code_sha(package)
    except OSError:  # an editor's file that came and went
        return None


def _code_sha(package: Path) -> str:
    found = hashlib.sha256()
    for path in sorted(package.rglob("*")):
        name = path.relative_to(package)
        if path.is_file() and not any(
            part[0] == "." or part == "__pycache__" for part in name.parts
        ):
            held = hashlib.sha256(path.read_bytes()).hexdigest()
            found.update(f"{name.as_posix()}\0{held}\0".encode("utf-8", "surrogateescape"))
    return found.hexdigest()[:16]


def commit_of(package: Path) -> str | None:
    """Return the commit that a package is checked out at; None if git does not track it.

    Of a package with changes that are not committed, new files included, it ends with `CHANGED`.
    """
    inside = str(package / "__init__.py")
    try:
        # An environment may lie in someone else's checkout, whose commit says nothing of us.
        _git(package, "ls-files", "--error-unmatch", "--", inside)
        commit = _git(package, "rev-parse", "HEAD")
        changed = _git(package, "status", "--porcelain", "--untracked-files=all", ".")
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return commit + CHANGED * bool(changed)


def _git(folder: Path, *words: str) -> str:
    # A lock on the index would be in the way of whoever commits meanwhile.
    command = ["git", "--no-optional-locks", "-C", str(folder), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_WAIT_S, check=True)
    return done.stdout.strip()
