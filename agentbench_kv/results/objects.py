"""Small objects that many processes share: in a local folder, or anywhere that fsspec reaches.

An object is written whole or not at all, and of several processes that create one, one succeeds.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from agentbench_kv.errors import PrerequisiteError, UsageError
from agentbench_kv.results import files

T = TypeVar("T")
_TAKERS = 8  # that try to create one object at a time
_ROUNDS = 3
_MEMORY = threading.Lock()  # memory:// looks first and writes then
_WHO_CAN = (
    "local folders, s3:// (s3fs), gs:// (gcsfs), abfs:// (adlfs) and memory:// can; name one of "
    "those as --out"
)


class Objects(ABC):
    """Objects by their names, which are relative paths."""

    @abstractmethod
    def read(self, name: str) -> bytes | None:
        """Return an object's content; None if there is no such object."""

    @abstractmethod
    def write(self, name: str, data: bytes) -> None:
        """Write or replace an object."""

    @abstractmethod
    def create(self, name: str, data: bytes) -> bool:
        """Write an object that does not exist; false if it does, whoever made it just now."""

    @abstractmethod
    def names(self, folder: str) -> list[str]:
        """Return the names of a folder's objects, sorted, without the folder's."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Remove an object, if it exists."""


class FolderObjects(Objects):
    """Files below a local folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def read(self, name: str) -> bytes | None:
        try:
            return (self.root / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def write(self, name: str, data: bytes) -> None:
        files.write_atomic(self._place(name), data)

    def create(self, name: str, data: bytes) -> bool:
        path = self._place(name)
        whole = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
        with files.writing(path):
            try:
                whole.write_bytes(data)
                os.link(whole, path)
            except FileExistsError:
                return False
            finally:
                whole.unlink(missing_ok=True)
        return True

    def names(self, folder: str) -> list[str]:
        try:
            inside = list((self.root / folder).iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(path.name for path in inside if path.is_file() and path.name[0] != ".")

    def delete(self, name: str) -> None:
        with files.writing(self.root / name):
            (self.root / name).unlink(missing_ok=True)

    def _place(self, name: str) -> Path:
        path = self.root / name
        with files.writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        return path


class RemoteObjects(Objects):
    """Objects of a file system of fsspec's, which must be able to create exclusively."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._fs, root = files.locate(url)
        memory = type(self._fs).__name__ == "MemoryFileSystem"
        self._creating = _MEMORY if memory else contextlib.nullcontext()
        self._root = root.rstrip("/")

    def read(self, name: str) -> bytes | None:
        def found() -> bytes | None:
            with contextlib.suppress(FileNotFoundError):
                return bytes(self._fs.cat_file(self._path(name)))
            return None

        return self._reach(found)

    def write(self, name: str, data: bytes) -> None:
        self._reach(lambda: self._fs.pipe_file(self._path(name), data))

    def create(self, name: str, data: bytes) -> bool:
        def made() -> bool:
            with self._creating:
                try:
                    self._fs.pipe_file(self._path(name), data, mode="create")
                except FileExistsError:
                    return False
            return True

        return self._reach(made)

    def names(self, folder: str) -> list[str]:
        def listed() -> list[str]:
            self._fs.invalidate_cache()
            with contextlib.suppress(FileNotFoundError):
                found = self._fs.ls(self._path(folder), detail=True)
                inside = (each["name"] for each in found if each["type"] == "file")
                return sorted(name.rstrip("/").rpartition("/")[2] for name in inside)
            return []

        return self._reach(listed)

    def delete(self, name: str) -> None:
        def removed() -> None:
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(self._path(name))

        self._reach(removed)

    def check(self) -> None:
        """Refuse a file system on which two processes could create one object.

        What fsspec does for file systems that have no way of their own is to look and then to
        write; others are seen at work.
        """
        if not (self._is_own("pipe_file") or self._is_own("_pipe_file")) or not self._one_creates():
            kind = type(self._fs).__name__
            raise PrerequisiteError(
                f"{self.url}: {kind} of fsspec cannot create an object exclusively, so two "
                f"workers could play one run; {_WHO_CAN}"
            )

    def _is_own(self, name: str) -> bool:
        method = getattr(type(self._fs), name, None)
        if method is None or method.__module__ in ("fsspec.spec", "fsspec.asyn"):
            return False
        return "mode" in inspect.signature(method).parameters

    def _one_creates(self) -> bool:
        """Whether of several threads that create an object one succeeds, every time."""
        with ThreadPoolExecutor(_TAKERS) as pool:
            for _ in range(_ROUNDS):
                name = f".probe/{uuid.uuid4().hex}"
                made = list(pool.map(lambda _, n=name: self.create(n, b"?"), range(_TAKERS)))
                self.delete(name)
                if sum(made) != 1:
                    return False
        return True

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _reach(self, act: Callable[[], T]) -> T:
        try:
            return act()
        except ImportError as error:
            raise PrerequisiteError(f"{self.url}: {error}; pip install that package") from error
        except Exception as error:
            text = " ".join(str(error).split())[:200]
            raise UsageError(f"{self.url}: {type(error).__name__}: {text}") from error


def objects_at(out: str) -> Objects:
    """Return the objects of a local folder or a URL; a `UsageError` if nobody knows the protocol.

    A PrerequisiteError if no object can be created exclusively there.
    """
    if (folder := local_folder(out)) is not None:
        return FolderObjects(folder)
    remote = RemoteObjects(out)
    remote.check()
    return remote


def local_folder(out: str) -> Path | None:
    """Return the folder that a path or URL names on this machine; None for a remote one."""
    scheme, separator, rest = out.partition("://")
    if not separator:
        return Path(out).expanduser()
    return Path(rest) if scheme in ("file", "local") else None
