"""Requests beside a session: what a method asks the model by itself, while the session goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from agentbench_kv.engines.base import KVStats
from agentbench_kv.errors import KVBenchError


@dataclass(frozen=True)
class AsideAnswer:
    """What the model said, and the account of asking it."""

    text: str
    stats: KVStats
    seconds: float
    error: str = ""  # why there is no answer


class Aside:
    """A request under way in a thread of its own; `close` ends its session and has the account.

    `reads` are the tokens it has to read, what the session holds left out.
    """

    def __init__(
        self,
        ask: Callable[[], str],
        close: Callable[[], KVStats] = KVStats,
        cancel: Callable[[], None] = lambda: None,
        reads: int = 0,
    ) -> None:
        self.cancel = cancel
        self.reads = reads
        self._ask = ask
        self._close = close
        self._answer: AsideAnswer | None = None
        self._broke: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="kvbench-aside", daemon=True)
        self._thread.start()

    def result(self) -> AsideAnswer:
        """Wait for the answer; raises what is no error of ours."""
        self._thread.join()
        if self._answer is None:
            raise self._broke or RuntimeError("the thread of an aside ended without a word")
        return self._answer

    def _run(self) -> None:
        began = time.perf_counter()
        text, stats, errors = "", KVStats(), list[str]()
        try:
            try:
                text = self._ask()
            except KVBenchError as problem:
                errors.append(str(problem))
            finally:
                try:
                    stats = self._close()
                except KVBenchError as problem:
                    errors.append(str(problem))
        except BaseException as problem:  # noqa: BLE001  raised where the answer is wanted
            self._broke = problem
            return
        self._answer = AsideAnswer(text, stats, time.perf_counter() - began, "; ".join(errors))
