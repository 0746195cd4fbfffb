"""Spans: maximal runs of tokens with one phase."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from agentbench_kv.methods.phases import PHASE_NAMES


@dataclass(frozen=True)
class Span:
    """Tokens [start, end) of a capture, all of one phase."""

    phase: int
    start: int
    end: int

    @property
    def name(self) -> str:
        """The phase in words."""
        return PHASE_NAMES[self.phase]

    def __len__(self) -> int:
        """Return its tokens."""
        return self.end - self.start


def phase_spans(phases: Tensor, shortest: int = 1) -> list[Span]:
    """Return the spans of at least `shortest` tokens, in order.

    Parameters
    ----------
    phases : Tensor [tokens], int64
    shortest : int
    """
    changes = (phases.diff() != 0).nonzero()[:, 0] + 1
    bounds = [0, *changes.tolist(), len(phases)]
    spans = [Span(int(phases[start]), start, end) for start, end in pairwise(bounds) if end > start]
    return [span for span in spans if len(span) >= shortest]
