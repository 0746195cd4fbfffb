"""How much an EVOKE block is worth: by recency, attention, and how like the task its tokens are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from agentbench_kv.encoders.loading import load_encoder
from agentbench_kv.methods.spans import Source, SpanCache

TOKENS, HASH = "tokens", "hash"
HASH_SIZE = 64
FLOOR_MODES = ("rescale", "clamp")
NO_COSINE = 0.0  # cosine where there is no task focus yet: a coherence of one half

Vector = NDArray[np.float32]
Floats = NDArray[np.float64]
# Makes one vector [size] of some ids of a session; equal ids give equal vectors.
Encoder = Callable[[Sequence[int], SpanCache], Vector]


def token_encoder(tokens: Sequence[int], cache: SpanCache) -> Vector:
    """Return the mean of the model's own input embeddings, less what all ids have in common."""
    mean: Vector = cache.embed(tokens).mean(0)
    return mean


def hash_encoder(tokens: Sequence[int], cache: SpanCache) -> Vector:  # noqa: ARG001
    """Return the mean of a random vector [64] per id; needs no model. For tests."""
    mean: Vector = np.stack([_hashed(token) for token in tokens]).mean(0)
    return mean


def sentence_encoder(name: str) -> Encoder:
    """Load an encoder of texts. It reads the text, nobody else does."""
    model = load_encoder(name)

    def encode(tokens: Sequence[int], cache: SpanCache) -> Vector:
        return np.asarray(model.encode([cache.text(tokens)])[0], np.float32)

    return encode


def make_encoder(name: str) -> Encoder:
    known: dict[str, Encoder] = {TOKENS: token_encoder, HASH: hash_encoder}
    return known.get(name) or sentence_encoder(name)


@lru_cache(maxsize=65536)
def _hashed(token: int) -> Vector:
    return np.random.default_rng(token).standard_normal(HASH_SIZE, dtype=np.float32)


@dataclass(frozen=True)
class Scorer:
    """The weights of a score in [0, 1]; the lowest goes first.

    `s = Σ w·x / Σ w` over the signals present; `rescale` lifts it to `f + (1 - f)·s` before the
    priority multiplies it, `clamp` multiplies first and then takes the larger of it and `f`.
    """

    recency: float
    coherence: float
    attention: float
    decay: float
    floor_mode: str
    floor_user: float
    floor_assistant: float

    def score(
        self,
        ages: Floats,
        cosines: Floats,
        attention: Floats | None,
        priorities: Floats,
        sources: Sequence[Source],
    ) -> Floats:
        """Return the scores [blocks] of some blocks.

        `ages` are tokens between a block's end and the session's, `cosines` those of its embedding
        and the task focus, `attention` its attention mass in [0, 1], None if nobody measured it,
        `priorities` what the client said, 1 if nothing.
        """
        total = self.recency + self.coherence
        summed = self.recency * np.exp(-self.decay * ages)
        summed = summed + self.coherence * (cosines + 1.0) / 2.0
        if attention is not None:
            total += self.attention
            summed = summed + self.attention * attention
        raw = summed / total
        known = {Source.USER: self.floor_user, Source.ASSISTANT: self.floor_assistant}
        floors = np.array([known.get(source, 0.0) for source in sources])
        if self.floor_mode == "clamp":
            scores: Floats = np.maximum(np.minimum(raw * priorities, 1.0), floors)
        else:
            scores = np.minimum((floors + (1.0 - floors) * raw) * priorities, 1.0)
        return scores


@dataclass(eq=False)
class Focus:
    """What the task is about: an embedding that follows the user's messages."""

    keep: float  # weight of the old focus when a message goes on with the task
    snap: float  # a message whose cosine with the focus is below begins a new task
    vector: Vector | None = None

    def follow(self, message: Vector, boundary: bool = False) -> None:
        """Take in a user message [hidden]; a task boundary starts over with it."""
        old = self.vector
        if old is None or boundary or cosine(old, message) < self.snap:
            self.vector = message
        else:
            self.vector = self.keep * old + np.float32(1.0 - self.keep) * message


def cosine(first: Vector, second: Vector) -> float:
    """Return the cosine of two vectors; 0 if one of them is zero."""
    norms = float(np.linalg.norm(first)) * float(np.linalg.norm(second))
    return float(first @ second) / norms if norms else 0.0
