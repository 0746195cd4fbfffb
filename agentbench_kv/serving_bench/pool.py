"""How much of an engine's KV memory sessions took up at the most while they were measured."""

from __future__ import annotations

from threading import Event, Thread
from types import TracebackType
from typing import Self

from agentbench_kv.engines.base import Engine
from agentbench_kv.errors import KVBenchError

_EVERY_S = 0.25


class PoolWatch:
    """Asks an engine again and again, from a thread of its own, as long as the `with` lasts.

    `peak` is in bytes; None of no engine, and of one that does not say.
    """

    def __init__(self, engine: Engine | None, every_s: float = _EVERY_S) -> None:
        self.peak: int | None = None
        self._engine = engine
        self._every_s = every_s
        self._over = Event()
        self._thread = Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while self._engine is not None and not self._over.wait(self._every_s):
            try:
                used = self._engine.pool_used()
            except (KVBenchError, OSError):  # its server is gone, which its sessions say
                continue
            if used is None:
                return
            self.peak = max(used, self.peak or 0)
