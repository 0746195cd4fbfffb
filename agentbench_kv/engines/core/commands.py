"""Work that any thread may ask of the one thread that owns an engine's cache."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
_Command = tuple[Callable[[], Any], Future[Any]]


class CommandQueue:
    """Takes commands on any thread; the owner runs them between two steps."""

    def __init__(self, wake: Callable[[], Any]) -> None:
        self._wake = wake  # called by whoever has queued a command
        self._waiting: list[_Command] = []
        self._lock = threading.Lock()
        self._closed: Exception | None = None
        self._running = False

    @property
    def busy(self) -> bool:
        """Whether a command waits or is under way."""
        return self._running or bool(self._waiting)

    def __len__(self) -> int:
        return len(self._waiting)

    def call(self, work: Callable[[], T], timeout: float | None = None) -> T:
        """Wait until the owner has run `work`; return or raise what it did.

        TimeoutError if it has not begun by then, and never will, or is still at it.
        """
        done: Future[T] = Future()
        with self._lock:
            if self._closed is not None:
                raise self._closed
            self._waiting.append((work, done))
        self._wake()
        try:
            return done.result(timeout)
        except TimeoutError:
            done.cancel()  # who is told that it was not done must not have it done later
            raise

    def run(self) -> None:
        """Run what is waiting; on the owner's thread."""
        self._running = True
        for work, done in self._take():
            if not done.set_running_or_notify_cancel():
                continue
            try:
                done.set_result(work())
            except BaseException as error:  # noqa: BLE001  handed to the caller, who raises it
                done.set_exception(error)
        self._running = False

    def close(self, error: Exception) -> None:
        """Raise `error` in those who wait, and in whoever calls from now on."""
        with self._lock:
            self._closed = error
        for _, done in self._take():
            if done.set_running_or_notify_cancel():
                done.set_exception(error)

    def _take(self) -> list[_Command]:
        with self._lock:
            taken, self._waiting = self._waiting, []
        return taken
