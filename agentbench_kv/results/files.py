"""Files that survive a kill, and files and folders anywhere that fsspec reaches."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import fsspec

from agentbench_kv.errors import PrerequisiteError, UsageError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}
_UNSUPPORTED = {errno.EINVAL, errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS}
_CHUNK = 1 << 16
LOCK_S = 30.0  # waited for a lock that is held for milliseconds
_POLL_S = 0.02


class LockedError(PrerequisiteError):
    """Another process, which may be stopped, holds a lock for long."""


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError raised while `path` is written into a PrerequisiteError of one clear line."""
    try:
        yield
    except OSError as error:
        why = f"cannot write {path}: {error.strerror or error}"
        if error.errno in _FULL:
            why = (
                f"no space left to write {path}; finished trials are safe on disk: "
                "free some space and run the same command again"
            )
        elif error.errno in _READ_ONLY:
            why = f"cannot write {path} ({error.strerror}); choose a place that can be written"
        raise PrerequisiteError(why) from error


def json_bytes(data: Any, indent: int | None = None) -> bytes:
    """Encode as UTF-8 JSON; unknown objects as text, lone surrogates as escapes."""
    text = json.dumps(data, ensure_ascii=False, indent=indent, default=str)
    return text.encode("utf-8", "backslashreplace")


def leaves(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield `a.b` and its value for every leaf of nested mappings; an empty one is a leaf."""
    for name, value in data.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def write_atomic(path: Path, data: bytes) -> None:
    """Replace `path` by `data`: after a crash it holds the old bytes or the new, never a mixture.

    A PrerequisiteError if it cannot be written; the old content is then untouched. What is no file
    (`/dev/null`, a pipe) is written to.
    """
    if path.exists() and not path.is_file():
        with writing(path):
            path.write_bytes(data)
        return
    with replacing(path) as file:
        file.write(data)


@contextlib.contextmanager
def replacing(
    path: Path,
    holding: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> Iterator[IO[bytes]]:
    """Write a file in the block that takes the place of `path` when the block ends without error.

    As `write_atomic`, for what is written piece by piece; only the change of places, at the end,
    is within `holding`.
    """
    writer = f"{pid_space()}.{os.getpid()}.{threading.get_ident()}"
    temporary = path.with_name(f".{path.name}.{writer}.tmp")
    with writing(path):
        try:
            with temporary.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            with holding():
                temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        with _tolerate_unsupported():
            os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _tolerate_unsupported() -> Iterator[None]:
    """Network and FUSE file systems may lack folder fsync or flock; the run goes on without."""
    try:
        yield
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise


@contextlib.contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Hold the folder's `.lock` for a few milliseconds, to read and replace without a race.

    A PrerequisiteError that says who holds it if that takes `LOCK_S`: a stopped process may.
    """
    with _lock_file(folder) as (fd, path):
        end = time.monotonic() + LOCK_S
        while not _lock(fd, path):
            if time.monotonic() >= end:
                raise LockedError(
                    f"{path} was held for {LOCK_S:g} s by {_signature(fd)}: let that process go on "
                    "(kill -CONT) or end it, then run the same command again"
                )
            time.sleep(_POLL_S)
        yield


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold the folder's `.lock` for a whole command; a LockedError that names one that does."""
    with _lock_file(folder) as (fd, path):
        if not _lock(fd, path):
            who = _signature(fd)
            raise LockedError(f"{folder} is being written by {who}; wait for it or stop it")
        yield


@contextlib.contextmanager
def _lock_file(folder: Path) -> Iterator[tuple[int, Path]]:
    path = folder / ".lock"
    with writing(path):
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        yield fd, path
    finally:
        os.close(fd)


def _lock(fd: int, path: Path) -> bool:
    """Lock an open file and sign it; return False if another process holds it."""
    with writing(path), _tolerate_unsupported():
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    with contextlib.suppress(OSError):  # on a full disk nobody is named, and that is all
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"pid {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    return True


def _signature(fd: int) -> str:
    """Return who locked an open lock file last, as it says itself."""
    words = os.pread(fd, 300, 0).decode("utf-8", "replace").split()
    return " ".join(words) or "a process that does not say which"


def sweep(folder: Path, age_s: float) -> None:
    """Remove what killed processes of this machine left half-written in a folder, and what is old.

    Whether a process of another machine that shares the folder is alive, nobody here can tell.
    """
    for path in folder.glob(".*.tmp"):
        parts = path.name.rsplit(".", 4)  # as `replacing` makes them
        with contextlib.suppress(OSError):
            dead = len(parts) == 5 and parts[1] == pid_space() and _is_dead(parts[2])
            if dead or time.time() - path.stat().st_mtime >= age_s:
                path.unlink()


def machine() -> str:
    """Name the running kernel and the process namespace, in which a pid is one process.

    Two containers on a host may share its name, and have each a process of the same number.
    Empty where there is no /proc.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"  # noqa: PTH115
    except OSError:
        return ""


@functools.cache
def pid_space() -> str:
    """Return a short name of where a pid is one process, for names of temporary files."""
    return hashlib.sha256(f"{socket.gethostname()} {machine()}".encode()).hexdigest()[:8]


def _is_dead(pid: str) -> bool:
    """Whether this machine has no such process."""
    try:
        os.kill(int(pid), 0)
    except (ValueError, OverflowError, PermissionError):
        return False
    except ProcessLookupError:
        return True
    return False


def append_lines(path: Path, lines: Iterable[bytes]) -> None:
    """Append one line per item and force them to the disk; a torn end is repaired first.

    A failed append leaves the file as it was and is a PrerequisiteError. The file is opened anew
    every time, so that a deleted run directory is noticed instead of written to in vain.
    """
    data = b"".join(line + b"\n" for line in lines)
    if not data:
        return
    with writing(path):
        new = not path.exists()
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            _repair(fd)
            start = os.fstat(fd).st_size
            try:
                _write_all(fd, data)
                os.fsync(fd)
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(fd, start)
                raise
        finally:
            os.close(fd)
        if new:
            _sync_folder(path.parent)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _repair(fd: int) -> None:
    """End the file at a line's end: complete a whole last record, cut off a torn one."""
    tail = _unfinished_tail(fd)
    if not tail:
        return
    if is_json(tail):
        _write_all(fd, b"\n")
    else:
        os.ftruncate(fd, os.fstat(fd).st_size - len(tail))
    os.fsync(fd)


def _unfinished_tail(fd: int) -> bytes:
    position = os.fstat(fd).st_size
    tail = b""
    while position:
        step = min(_CHUNK, position)
        position -= step
        chunk = os.pread(fd, step, position)
        before, newline, after = chunk.rpartition(b"\n")
        tail = (after if newline else before + after) + tail
        if newline:
            break
    return tail


def file_sha(path: Path) -> str:
    """Return the SHA-256 of a file, empty if there is none."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
    return ""


def is_json(raw: bytes) -> bool:
    try:
        json.loads(raw)
    except (ValueError, RecursionError):
        return False
    return True


Target = str | os.PathLike[str]


def locate(target: Target) -> tuple[Any, str]:
    """Return the file system of a path or URL, and the path in it.

    A UsageError if fsspec knows no such protocol, a PrerequisiteError if that needs a package.
    """
    text = os.fspath(target)
    try:
        fs, path = fsspec.core.url_to_fs(os.path.expanduser(text))  # noqa: PTH111  also for URLs
    except ImportError as error:
        # fsspec's own message names the package.
        raise PrerequisiteError(f"{text}: {error}; pip install that package") from error
    except ValueError as error:
        raise UsageError(f"{text}: {error}") from error
    return fs, path


@contextlib.contextmanager
def reaching(target: Target) -> Iterator[None]:
    """Turn what goes wrong between here and a target into one line, a UsageError."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{os.fspath(target)}: {error.strerror or error}") from error


@contextlib.contextmanager
def writing_to(target: Target) -> Iterator[None]:
    """Turn what goes wrong while a target is written into one line, a PrerequisiteError."""
    try:
        yield
    except OSError as error:
        raise PrerequisiteError(
            f"cannot write {os.fspath(target)} ({error.strerror or error}); "
            "name a folder that exists and is writable"
        ) from error


def children(fs: Any, path: str) -> list[str]:
    """Return the folders in a folder, sorted, none in a file; else a FileNotFoundError."""
    try:
        entries = fs.ls(path, detail=True)
    except NotADirectoryError:
        return []
    return sorted(each["name"] for each in entries if each["type"] == "directory")
