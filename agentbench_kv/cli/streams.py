"""Standard streams that are closed, full, of another encoding or without a reader do no harm."""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress
from io import TextIOWrapper
from typing import Any, TextIO


class Notes:
    """Standard error, on which nothing depends: where nobody reads it any more, notes are lost."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except (OSError, ValueError):
            silence(self._stream)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except (OSError, ValueError):
            silence(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def mend_streams() -> None:
    """Make streams that are closed, of another encoding or left by their reader do no harm."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:  # closed: the next file to be opened would get its number and its output
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, number)
            if null != number:
                os.close(null)
        if getattr(sys, name) is None:
            mode = "w" if number else "r"
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if not isinstance(sys.stderr, Notes):
        sys.stderr = Notes(sys.stderr)


def silence(stream: TextIO) -> None:
    """Send what a stream cannot write nowhere, or it would fail again at the interpreter's end."""
    try:
        stream.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError):
            number = stream.fileno()  # some have none, and a file opened for them would stay open
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, number)
            os.close(null)


def explained(error: OSError) -> str:
    """Say what the system refused, and of which file."""
    reason = error.strerror or str(error) or type(error).__name__
    if error.filename is not None:
        return f"{os.fsdecode(error.filename)[:200]}: {reason}"
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO)
    return f"cannot write the output: {reason}" if full else reason
