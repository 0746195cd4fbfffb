"""A generation of the embedded engine: what it is given, what is said of its next token."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from agentbench_kv.engines.base import Sampling
from agentbench_kv.engines.embedded.session import EmbeddedSession
from agentbench_kv.engines.sampling import Sampler, StreamedGeneration


class EmbeddedGeneration(StreamedGeneration):
    """A generation that the scheduler thread feeds; that thread waits for no reader."""

    def __init__(
        self,
        session: EmbeddedSession,
        sampling: Sampling,
        given: Sequence[int] = (),
        predict: bool = False,  # whether to say what would have been drawn instead
    ) -> None:
        super().__init__(sampling)
        self.session = session
        self.sampler = Sampler(sampling)
        self.logprobs = self.sampler.logprobs
        self.given = deque(given)  # tokens to be taken as drawn, one after the other
        self.stretch: list[int] = []  # those of them that the next forward is fed besides
        self.predict = predict
        self.best: list[int] = []

    def rows_wanted(self, end: int) -> range:
        """Return the rows whose predictions are asked for, of those that end before `end`."""
        return range(end - 1 - len(self.stretch) * self.predict, end)


@dataclass(frozen=True)
class Predicted:
    """What a forward says of a generation's next token."""

    generation: EmbeddedGeneration
    logits: Tensor  # [vocab]
    best: float  # lowest id of the largest logit
    value: float  # of that logit


def next_token(predicted: Predicted) -> int:
    """Return what comes next: the token that is given, or the one that is drawn."""
    generation = predicted.generation
    for token in generation.stretch:
        generation.push(token)
    generation.stretch = []
    if generation.given:
        return generation.given.popleft()
    greedy = generation.sampler.greedy
    return int(predicted.best) if greedy else generation.sampler.draw(predicted.logits)


def add_stretch(generation: EmbeddedGeneration, chunk: int) -> None:
    """Let the next forward take given tokens at once up to the one with which an event falls due.

    Until then the cache only grows, so that one forward says of each what a decode would.
    """
    session, left = generation.session, len(generation.given)
    longest = session.longest_stretch(chunk)
    rows = min(session.ledger.quiet(left) + 1, left, longest)
    generation.stretch = [generation.given.popleft() for _ in range(rows - 1)]
    session.add_drawn([(token, session.labeller.label(token)) for token in generation.stretch])
