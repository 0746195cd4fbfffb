"""Spans: maximal runs of tokens with one phase."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from torch import Tensor


class PhaseSpan(NamedTuple):
    """Tokens [start, end) of a capture, all of one phase."""

    phase: int
    start: int
    end: int


def phase_spans(phases: Tensor, shortest: int = 1) -> list[PhaseSpan]:
    """Return the spans of at least `shortest` tokens, in order, of phases [tokens]."""
    changes = (phases.diff() != 0).nonzero()[:, 0] + 1
    bounds = pairwise([0, *changes.tolist(), len(phases)])
    return [
        PhaseSpan(int(phases[start]), start, end)
        for start, end in bounds
        if end - start >= max(shortest, 1)
    ]
