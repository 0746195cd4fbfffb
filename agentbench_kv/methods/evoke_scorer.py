"""How much an EVOKE block is worth: recency, coherence, attention, floors and priority."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agentbench_kv.methods.spans import Source

__all__ = ["FLOOR_MODES", "NO_COSINE", "Floats", "Focus", "Scorer", "Signals", "cosine"]

Floats = NDArray[np.float64]
Vector = NDArray[np.float32]

FLOOR_MODES = ("rescale", "clamp")
NO_COSINE = 0.0
"""Cosine where there is no task focus yet: a coherence of one half."""


@dataclass(frozen=True)
class Signals:
    """What is known of some blocks; arrays [blocks].

    Attributes
    ----------
    ages : ndarray
        Tokens between a block's end and the session's.
    cosines : ndarray
        Cosine of a block's embedding and the task focus.
    attention : ndarray or None
        Attention mass in a block, in [0, 1]; None if nobody measured it.
    priorities : ndarray
        What the client said, 1 if nothing.
    sources : sequence of Source
    """

    ages: Floats
    cosines: Floats
    attention: Floats | None
    priorities: Floats
    sources: Sequence[Source]


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

    def score(self, signals: Signals) -> Floats:
        """Return the scores [blocks]."""
        raw = self._relevance(signals)
        floors = np.array([self._floor(source) for source in signals.sources])
        if self.floor_mode == "clamp":
            scores: Floats = np.maximum(np.minimum(raw * signals.priorities, 1.0), floors)
        else:
            scores = np.minimum((floors + (1.0 - floors) * raw) * signals.priorities, 1.0)
        return scores

    def _relevance(self, signals: Signals) -> Floats:
        total = self.recency + self.coherence
        summed = self.recency * np.exp(-self.decay * signals.ages)
        summed = summed + self.coherence * (signals.cosines + 1.0) / 2.0
        if signals.attention is not None:
            total += self.attention
            summed = summed + self.attention * signals.attention
        relevance: Floats = summed / total
        return relevance

    def _floor(self, source: Source) -> float:
        floors = {Source.USER: self.floor_user, Source.ASSISTANT: self.floor_assistant}
        return floors.get(source, 0.0)


class Focus:
    """What the task is about: an embedding that follows the user's messages.

    Parameters
    ----------
    keep : float
        Weight of the old focus when a message goes on with the task.
    snap : float
        A message whose cosine with the focus is below this begins a new task.
    """

    def __init__(self, keep: float, snap: float) -> None:
        self.vector: Vector | None = None
        self._keep = keep
        self._snap = snap

    def follow(self, message: Vector, boundary: bool = False) -> None:
        """Take in a user message [hidden]; a task boundary starts over with it."""
        old = self.vector
        if old is None or boundary or cosine(old, message) < self._snap:
            self.vector = message
        else:
            self.vector = self._keep * old + np.float32(1.0 - self._keep) * message


def cosine(first: Vector, second: Vector) -> float:
    """Return the cosine of two vectors; 0 if one of them is zero."""
    norms = float(np.linalg.norm(first)) * float(np.linalg.norm(second))
    return float(first @ second) / norms if norms else 0.0
