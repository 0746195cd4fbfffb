"""Where evicted EVOKE blocks wait: host memory up to a limit, then files, then nowhere."""

from __future__ import annotations

import tempfile
import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from agentbench_kv.methods.spans import Block

__all__ = ["HostStore"]

Key = tuple[str, int]
"""Session and first logical position."""


@dataclass(frozen=True)
class _Spilled:
    """A block whose bytes are in a file."""

    block: Block
    file: Path
    nbytes: int


class HostStore:
    """Blocks of all sessions, the least recently stored leaving first. Thread-safe.

    A block over the memory limit goes to a file if there is room for it there, else it is lost.

    Parameters
    ----------
    memory, disk : int
        Limits in bytes; no disk with 0.
    """

    def __init__(self, memory: int, disk: int = 0) -> None:
        self.memory = memory
        self.disk = disk
        self.nbytes = 0
        self.spilled_bytes = 0
        self._held: OrderedDict[Key, Block] = OrderedDict()
        self._spilled: OrderedDict[Key, _Spilled] = OrderedDict()
        self._lock = threading.Lock()
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._files = 0

    def __contains__(self, key: Key) -> bool:
        """Whether a block is in memory or on disk."""
        with self._lock:
            return key in self._held or key in self._spilled

    def put(self, key: Key, block: Block) -> None:
        """Take a block; others, or itself, may have to leave for it."""
        with self._lock:
            self._forget(key)
            self._held[key] = block
            self.nbytes += block.nbytes
            while self.nbytes > self.memory:
                oldest, leaving = self._held.popitem(last=False)
                self.nbytes -= leaving.nbytes
                self._spill(oldest, leaving)

    def take(self, key: Key) -> Block | None:
        """Give a block back and forget it; None if it was lost."""
        with self._lock:
            block = self._held.get(key)
            if block is None and key in self._spilled:
                block = _read(self._spilled[key])
            self._forget(key)
            return block

    def drop(self, session: str) -> None:
        """Forget the blocks of a session."""
        with self._lock:
            for key in [key for key in (*self._held, *self._spilled) if key[0] == session]:
                self._forget(key)

    def close(self) -> None:
        """Forget everything and remove the files."""
        with self._lock:
            for key in [*self._held, *self._spilled]:
                self._forget(key)
            if self._folder is not None:
                self._folder.cleanup()
                self._folder = None

    def _forget(self, key: Key) -> None:
        block = self._held.pop(key, None)
        if block is not None:
            self.nbytes -= block.nbytes
        spilled = self._spilled.pop(key, None)
        if spilled is not None:
            self.spilled_bytes -= spilled.nbytes
            spilled.file.unlink(missing_ok=True)

    def _spill(self, key: Key, block: Block) -> None:
        """Write a block to a file, the oldest files making room for it; or lose it."""
        if block.nbytes > self.disk:
            return
        while self.spilled_bytes + block.nbytes > self.disk:
            self._forget(next(iter(self._spilled)))
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="kvbench-blocks-")
        self._files += 1
        file = Path(self._folder.name) / f"{self._files}.kv"
        block.data.tofile(file)
        empty = Block(block.start, block.end, block.at, np.empty(0, np.uint8))
        self._spilled[key] = _Spilled(empty, file, block.nbytes)
        self.spilled_bytes += block.nbytes


def _read(spilled: _Spilled) -> Block:
    block = spilled.block
    return Block(block.start, block.end, block.at, np.fromfile(spilled.file, np.uint8))
