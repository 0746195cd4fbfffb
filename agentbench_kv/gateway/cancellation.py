"""Ending a request from another thread."""

from __future__ import annotations

import threading
from typing import Protocol


class Cancellable(Protocol):
    """What can be ended: a generation of tokens, a request to an endpoint."""

    def cancel(self) -> None:
        """End it; harmless when it has ended."""
        ...


class Cancellation:
    """Lets another thread end a request; safe before, during and after its generation."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._generation: Cancellable | None = None
        self._asked = False

    def cancel(self) -> None:
        """End the generation after the token in flight."""
        with self._lock:
            self._asked = True
            generation = self._generation
        if generation is not None:
            generation.cancel()

    def attach(self, generation: Cancellable) -> None:
        """Name the generation that `cancel` ends."""
        with self._lock:
            self._generation = generation
            asked = self._asked
        if asked:
            generation.cancel()
