"""One generation of a serving engine: a thread that streams, a queue the caller reads."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator

from agentbench_kv.engines.base import FinishReason, Generation, Sampling

__all__ = ["ServingGeneration"]

_AHEAD = 4
"""Tokens the stream may be ahead of its reader, so that a cancel is felt where it was meant."""
_PATIENCE_S = 30.0


class ServingGeneration(Generation):
    """Tokens on their way from a backend.

    Parameters
    ----------
    sampling : Sampling
    play : callable
        Runs the generation to its end on a thread; it calls `push` for every token.
    """

    def __init__(
        self, sampling: Sampling, play: Callable[[ServingGeneration], FinishReason]
    ) -> None:
        self.sampling = sampling
        self.produced = 0
        self.cancelled = False
        self._play = play
        self._started = time.perf_counter()
        self._tokens: queue.Queue[int | BaseException | None] = queue.Queue(_AHEAD)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[int]:
        """Yield the generated ids; raises what ended the generation early."""
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
        self._hand_over(token)

    def _run(self) -> None:
        try:
            self.finish_reason = self._play(self)
        except BaseException as error:  # noqa: BLE001  the reader is told, on its own thread
            self._hand_over(error)
            return
        self._hand_over(None)

    def _hand_over(self, item: int | BaseException | None) -> None:
        """Wait for the reader; one that cancelled may never come back for the rest."""
        handed = False
        while not handed:
            with contextlib.suppress(queue.Full):
                self._tokens.put(item, timeout=_PATIENCE_S)
                handed = True
            handed = handed or self.cancelled
