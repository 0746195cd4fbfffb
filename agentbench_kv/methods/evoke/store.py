"""Where evicted EVOKE blocks wait: host memory up to a limit, then files, then nowhere."""

from __future__ import annotations

import tempfile
import threading
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import numpy as np

from agentbench_kv.methods.spans import Block

Key = tuple[str, int]  # session and first logical position


class HostStore:
    """Blocks of all sessions, the least recently stored leaving first. Thread-safe.

    A block over the `memory` limit goes to a file if there is room below `disk`, else it is lost;
    both limits are in bytes.
    """

    def __init__(self, memory: int, disk: int = 0) -> None:
        self.memory = memory
        self.disk = disk
        self.nbytes = 0
        self.spilled_bytes = 0
        self._held: OrderedDict[Key, Block] = OrderedDict()
        # Blocks whose bytes are in a file, as an empty block, the file and how many.
        self._spilled: OrderedDict[Key, tuple[Block, Path, int]] = OrderedDict()
        self._lock = threading.Lock()
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._files = 0

    def __contains__(self, key: Key) -> bool:
        with self._lock:
            return key in self._held or key in self._spilled

    def put(self, key: Key, block: Block) -> None:
        """Store a block; others, or itself, may have to leave for it."""
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
                empty, file, _ = self._spilled[key]
                block = replace(empty, data=np.fromfile(file, np.uint8))
            self._forget(key)
            return block

    def drop(self, session: str) -> None:
        with self._lock:
            for key in [key for key in (*self._held, *self._spilled) if key[0] == session]:
                self._forget(key)

    def close(self) -> None:
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
        if key in self._spilled:
            _, file, nbytes = self._spilled.pop(key)
            self.spilled_bytes -= nbytes
            file.unlink(missing_ok=True)

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
        empty = replace(block, data=np.empty(0, np.uint8))
        self._spilled[key] = empty, file, block.nbytes
        self.spilled_bytes += block.nbytes
