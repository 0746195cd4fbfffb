"""What an engine says while it is measured: the most KV memory in use, and its restarts."""

from __future__ import annotations

from contextlib import suppress
from threading import Event, Thread
from types import TracebackType
from typing import Self

from agentbench_kv.engines.base import Engine
from agentbench_kv.errors import KVBenchError

_EVERY_S = 0.25


class PoolWatch:
    """Asks an engine again and again, from a thread of its own, from `begin` to the `with`'s end.

    `peak` is in bytes; None of no engine, of one that does not say, and of one that cannot look
    back and was never seen to hold anything.
    """

    def __init__(self, engine: Engine | None, every_s: float = _EVERY_S) -> None:
        self.peak: int | None = None
        self.kept = ""  # why prefixes of before are still there
        self.restarts = 0  # of its backend, which died meanwhile
        self._engine = engine
        self._before = 0
        self._every_s = every_s
        self._over = Event()
        self._thread = Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        return self

    def begin(self) -> None:
        """Drop the prefixes that nobody reads; what came before does not count."""
        if self._engine is not None:
            try:
                self._engine.drop_prefixes()
            except (KVBenchError, OSError) as error:
                self.kept = " ".join(str(error).split()) or type(error).__name__
        self._ask()
        self._before = self._restarts()
        self._thread.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._thread.ident is None:
            return
        self._over.set()
        self._thread.join()
        self._note(self._ask())
        self.restarts = self._restarts() - self._before

    def _restarts(self) -> int:
        return 0 if self._engine is None else self._engine.restarts

    def _watch(self) -> None:
        while not self._over.wait(self._every_s):
            self._note(self._ask())

    def _ask(self) -> int | None:
        if self._engine is None:
            return None
        with suppress(KVBenchError, OSError):  # its server is gone, which its sessions say
            return self._engine.pool_peak()
        return None

    def _note(self, used: int | None) -> None:
        if used:
            self.peak = max(used, self.peak or 0)
