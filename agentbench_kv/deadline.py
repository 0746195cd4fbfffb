"""A time limit that ends what is running, not only what comes next."""

from __future__ import annotations

import threading
from collections.abc import Callable
from threading import Timer
from typing import Self

__all__ = ["Deadline"]


class Deadline:
    """Calls `end` once when the time of a `with` block is up; never after the block.

    Leaving the block waits for a call of `end` that has begun, so `passed` is final then, and no
    thread is left.

    Parameters
    ----------
    seconds : float
        From the start of the block; nothing or less is up at once.
    end : callable
        Makes the block's work stop soon. Called in a thread of its own, so it must not block.
    """

    def __init__(self, seconds: float, end: Callable[[], None]) -> None:
        self.seconds = seconds
        self._end = end
        self._passed = threading.Event()
        self._timer = Timer(min(seconds, threading.TIMEOUT_MAX), self._fire)
        self._timer.name = "kvbench-deadline"
        # A process that is interrupted must not wait for a time limit.
        self._timer.daemon = True

    @property
    def passed(self) -> bool:
        """Whether the time was up before the block was left."""
        return self._passed.is_set()

    @property
    def message(self) -> str:
        """What to tell the user when it has passed."""
        return f"the trial took more than {self.seconds:g} s"

    def check(self) -> None:
        """Raise TimeoutError if the time is up."""
        if self.passed:
            raise TimeoutError(self.message)

    def __enter__(self) -> Self:
        """Start the clock."""
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the clock."""
        self._timer.cancel()
        self._timer.join()

    def _fire(self) -> None:
        # First of all: whoever sees the work end must see why.
        self._passed.set()
        self._end()
