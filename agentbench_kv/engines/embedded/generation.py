"""A running generation, fed by the scheduler's thread and read by the caller's."""

from __future__ import annotations

from agentbench_kv.engines.base import FinishReason, Sampling
from agentbench_kv.engines.embedded.session import EmbeddedSession
from agentbench_kv.engines.sampling import Sampler
from agentbench_kv.engines.streamed import StreamedGeneration


class EmbeddedGeneration(StreamedGeneration):
    """A generation that the scheduler thread feeds; that thread waits for no reader."""

    def __init__(self, session: EmbeddedSession, sampling: Sampling) -> None:
        super().__init__(sampling)
        self.session = session
        self.sampler = Sampler(sampling)

    def finish(self, reason: FinishReason) -> None:
        self.finish_reason = reason
        self._hand_over(None)

    def fail(self, error: BaseException) -> None:
        self._hand_over(error)
