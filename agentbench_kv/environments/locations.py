"""Where managed environments live, and the file lock that guards their building."""

from __future__ import annotations

import fcntl
import os
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from agentbench_kv.environments.profiles import Profile
from agentbench_kv.errors import PrerequisiteError

Report = Callable[[str], None]


def home() -> Path:
    """Return `$KVBENCH_HOME`, or the user's cache folder for kvbench."""
    if chosen := os.environ.get("KVBENCH_HOME"):
        return Path(chosen).expanduser().absolute()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser().absolute() / "kvbench"


def folder_of(profile: Profile) -> Path:
    return home() / "envs" / profile.folder_name()


def folders_of_name(name: str) -> list[Path]:
    """Return every folder built for `name`, of this lock and of earlier ones."""
    pattern = re.compile(rf"{re.escape(name)}-[0-9a-f]{{12}}")
    root = home() / "envs"
    return sorted(p for p in root.glob(f"{name}-*") if p.is_dir() and pattern.fullmatch(p.name))


def interpreter(folder: Path) -> Path:
    return folder / "bin" / "python"


def override_variable(name: str) -> str:
    """Return the environment variable that names a user's own Python for `name`."""
    return f"KVBENCH_ENV_{re.sub(r'[^A-Z0-9]', '_', name.upper())}"


def overridden(name: str) -> Path | None:
    """Return the user's own Python for `name`, if one is named; it must be an executable file."""
    variable = override_variable(name)
    if not (value := os.environ.get(variable)):
        return None
    # Not resolved: a virtual environment is recognised by the path of its link.
    path = Path(value).expanduser().absolute()
    if not (path.is_file() and os.access(path, os.X_OK)):
        raise PrerequisiteError(
            f"{variable}={value} is not an executable file; "
            f"set it to the Python of an environment (.../bin/python) or unset it"
        )
    return path


@contextmanager
def building(name: str, report: Report) -> Iterator[None]:
    """Hold the lock of `name` across processes; wait for whoever holds it."""
    root = home() / "envs"
    try:
        root.mkdir(parents=True, exist_ok=True)
        handle = _lock_file(name).open("a+")
    except OSError as error:
        raise PrerequisiteError(
            f"cannot write to {root} ({error.strerror}); "
            "set KVBENCH_HOME to a folder that can be written"
        ) from error
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(f"another process is working on {name} ({_signature(handle)}); waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        with suppress(OSError):  # on a full disk nobody is named, and that is all
            handle.truncate(0)
            handle.write(f"pid {os.getpid()} on {socket.gethostname()}\n")
            handle.flush()
        yield


def builder_of(name: str) -> str:
    """Say which process is working on an environment at this moment; empty if none is."""
    try:
        handle = _lock_file(name).open()
    except OSError:
        return ""
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _signature(handle)
    return ""


def _lock_file(name: str) -> Path:
    return home() / "envs" / f".{name}.lock"


def _signature(handle: TextIO) -> str:
    """Return who holds an open lock file, as it says itself."""
    handle.seek(0)
    return " ".join(handle.read(300).split()) or "it does not say which"
