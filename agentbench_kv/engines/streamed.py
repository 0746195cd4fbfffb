"""A generation whose tokens come from another thread than the one that reads them."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Iterator

from agentbench_kv.engines.base import Generation, Sampling

_PATIENCE_S = 30.0


class StreamedGeneration(Generation):
    """Tokens in a queue, at most `ahead` of the reader if not 0, with the times they came at."""

    def __init__(self, sampling: Sampling, *, ahead: int = 0) -> None:
        self.sampling = sampling
        self.produced = 0
        self.cancelled = False
        self._started = time.perf_counter()
        self._tokens: queue.Queue[int | BaseException | None] = queue.Queue(ahead)

    def __iter__(self) -> Iterator[int]:
        """Yield tokens as they come; re-raise what ended the generation early."""
        while (item := self._tokens.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item

    def cancel(self) -> None:
        self.cancelled = True

    def push(self, token: int) -> None:
        """Hand a token to the reader."""
        now = time.perf_counter() - self._started
        if self.produced == 0:
            self.first_token_s = now
        self.last_token_s = now
        self.produced += 1
        self._hand_over(token)

    def _hand_over(self, item: int | BaseException | None) -> None:
        """Queue a token, the end (None) or an error; who cancelled may never read it."""
        handed = False
        while not handed:
            with contextlib.suppress(queue.Full):
                self._tokens.put(item, timeout=_PATIENCE_S)
                handed = True
            handed = handed or self.cancelled
