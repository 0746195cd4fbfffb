"""Ending a request from another thread."""

from __future__ import annotations

import threading

from agentbench_kv.engines.base import Generation
from agentbench_kv.engines.text import TextRequest


class Cancellation:
    """Lets another thread end a request; safe before, during and after its generation."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._generation: Generation | TextRequest | None = None
        self._asked = False

    def cancel(self) -> None:
        """End the generation after the token in flight."""
        with self._lock:
            self._asked = True
            generation = self._generation
        if generation is not None:
            generation.cancel()

    def attach(self, generation: Generation | TextRequest) -> None:
        """Name the generation that `cancel` ends."""
        with self._lock:
            self._generation = generation
            asked = self._asked
        if asked:
            generation.cancel()
