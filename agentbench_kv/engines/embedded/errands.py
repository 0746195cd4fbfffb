"""Work on a session's cache between two of its turns."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from agentbench_kv.engines.embedded.session import EmbeddedSession


class Errand:
    """Work on one session's cache that waits for the engine's thread."""

    def __init__(
        self, session: EmbeddedSession, work: Callable[[EmbeddedSession], Any], more: int
    ) -> None:
        self.session = session
        self.more = more
        self.done: Future[Any] = Future()
        self._work = work

    def run(self) -> None:
        """Do it; the caller gets the result or the exception."""
        try:
            self.done.set_result(self._work(self.session))
        except Exception as error:  # noqa: BLE001  handed to the caller, who raises it
            self.done.set_exception(error)
