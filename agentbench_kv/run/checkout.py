"""Which commit of a git checkout a folder's code is, and whether it was changed since."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

_WAIT_S = 30


def commit_of(package: Path) -> str | None:
    """Return the commit that a package is checked out at; None if git does not track it.

    Of a package with changes that are not committed, new files included, it is followed by a `+`
    and eight digits that name what they made of it.
    """
    inside = str(package / "__init__.py")
    try:
        # An environment may lie in someone else's checkout, whose commit says nothing of us.
        _git(package, "ls-files", "--error-unmatch", "--", inside)
        root, commit = _git(package, "rev-parse", "--show-toplevel", "HEAD").splitlines()
        listed = _git(
            package, "status", "--porcelain", "-z", "--no-renames", "--untracked-files=all", "."
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    changed = sorted(line[3:] for line in listed.split("\0") if line)
    return f"{commit}+{_digest(Path(root), changed)}" if changed else commit


def _git(folder: Path, *words: str) -> str:
    # A lock on the index would be in the way of whoever commits meanwhile.
    command = ["git", "--no-optional-locks", "-C", str(folder), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_WAIT_S, check=True)
    return done.stdout.removesuffix("\n")


def _digest(root: Path, names: list[str]) -> str:
    found = hashlib.sha256()
    for name in names:
        path = root / name
        held = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "gone"
        found.update(f"{name}\0{held}\0".encode())
    return found.hexdigest()[:8]
