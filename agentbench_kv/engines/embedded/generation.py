"""A running generation, fed by the scheduler's thread and read by the caller's."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator

from agentbench_kv.engines.base import FinishReason, Generation, Sampling
from agentbench_kv.engines.embedded.sampling import Sampler
from agentbench_kv.engines.embedded.session import EmbeddedSession


class EmbeddedGeneration(Generation):
    """A generation that the scheduler thread feeds through a queue."""

    def __init__(self, session: EmbeddedSession, sampling: Sampling) -> None:
        self.session = session
        self.sampling = sampling
        self.sampler = Sampler(sampling)
        self.produced = 0
        self.cancelled = False
        self._started = time.perf_counter()
        self._tokens: queue.SimpleQueue[int | BaseException | None] = queue.SimpleQueue()

    def __iter__(self) -> Iterator[int]:
        """Yield tokens as they come; re-raise what broke the generation."""
        while (item := self._tokens.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item

    def cancel(self) -> None:
        """End after the token in flight."""
        self.cancelled = True

    def push(self, token: int) -> None:
        """Hand a token to the reader."""
        now = time.perf_counter() - self._started
        if self.produced == 0:
            self.first_token_s = now
        self.last_token_s = now
        self.produced += 1
        self._tokens.put(token)

    def finish(self, reason: FinishReason) -> None:
        """End the stream."""
        self.finish_reason = reason
        self._tokens.put(None)

    def fail(self, error: BaseException) -> None:
        """End the stream with an error."""
        self._tokens.put(error)
