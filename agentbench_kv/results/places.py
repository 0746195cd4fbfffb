"""Files and folders anywhere fsspec reaches: local paths, memory://, s3://, https:// and others."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import fsspec

from agentbench_kv.errors import PrerequisiteError, UsageError

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
    """Return the folders directly below a folder, sorted; none below a file.

    A FileNotFoundError if there is nothing at the path.
    """
    try:
        entries = fs.ls(path, detail=True)
    except NotADirectoryError:
        return []
    return sorted(each["name"] for each in entries if each["type"] == "directory")
