"""One generation of a serving engine, streamed on a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable

from agentbench_kv.engines.base import FinishReason, Sampling
from agentbench_kv.engines.streamed import StreamedGeneration

# Tokens the stream may be ahead of its reader, so that a cancel takes effect where it was meant.
_AHEAD = 4


class ServingGeneration(StreamedGeneration):
    """Tokens on their way from a backend; `play` runs to the end and calls `push` per token."""

    def __init__(
        self, sampling: Sampling, play: Callable[[ServingGeneration], FinishReason]
    ) -> None:
        super().__init__(sampling, ahead=_AHEAD)
        self._play = play
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            self.finish_reason = self._play(self)
        except BaseException as error:  # noqa: BLE001  the reader is told, on its own thread
            self._hand_over(error)
            return
        self._hand_over(None)
