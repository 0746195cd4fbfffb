"""Principal angles between the query subspaces of phase spans (AgentKV, section 3.1).

Per span, layer and head, the queries' rows are centred; the first k right singular vectors span
their dominant directions. Two spans are compared by the mean of their k principal angles.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from agentbench_kv.analysis.captures import Capture
from agentbench_kv.errors import UsageError
from agentbench_kv.methods.base import PHASE_NAMES, Phase

DIMENSIONS = 5
_RANK_TOLERANCE = 1e-10
"""Smallest variance of a direction, as a share of the largest; below it lies rounding noise."""


@dataclass(frozen=True)
class Angles:
    """Mean principal angles of all pairs of spans."""

    dimensions: int  # directions per span
    spans: int  # those that are long enough
    pairs: Tensor  # phases of the two spans, the lower first, [pairs, 2]
    # float64 [pairs, layers, q_heads]; NaN where a span has fewer independent directions.
    degrees: Tensor

    def cells(self) -> Tensor:
        """Return means per pair of phases, [layers, q_heads, 4, 4]; NaN without a pair."""
        return self._means(lambda pairs: torch.nanmean(pairs, 0)).permute(2, 3, 0, 1)

    def matrix(self) -> Tensor:
        """Return means per pair of phases, pooled over layers and heads, [4, 4]."""
        return self._means(torch.nanmean)

    def _means(self, average: Callable[[Tensor], Tensor]) -> Tensor:
        """Average the angles of each two phases' pairs of spans, [4, 4, ...]."""
        means = []
        for phases in product(range(len(Phase)), repeat=2):
            chosen = (self.pairs == torch.tensor(sorted(phases))).all(-1)
            means.append(average(self.degrees[chosen]))
        return torch.stack(means).reshape(len(Phase), len(Phase), *means[0].shape)

    @property
    def intra(self) -> Tensor:
        """Angles of pairs within a phase, [pairs, layers, q_heads]."""
        return self.degrees[self.pairs[:, 0] == self.pairs[:, 1]]

    @property
    def inter(self) -> Tensor:
        """Angles of pairs across phases, [pairs, layers, q_heads]."""
        return self.degrees[self.pairs[:, 0] != self.pairs[:, 1]]

    def document(self) -> dict[str, Any]:
        """Return everything but the single pairs, as JSON data; angles in degrees."""
        inter, intra = torch.nanmean(self.inter, 0), torch.nanmean(self.intra, 0)
        # The share of (layer, head)s whose inter-phase mean is above the intra-phase one.
        larger = (inter > intra).double().masked_fill((inter + intra).isnan(), torch.nan)
        return {
            "analysis": "angles",
            "unit": "degrees",
            "dimensions": self.dimensions,
            "phases": list(PHASE_NAMES),
            "spans": self.spans,
            "inter_pairs": len(self.inter),
            "intra_pairs": len(self.intra),
            "inter_mean": listed(torch.nanmean(self.inter)),
            "intra_mean": listed(torch.nanmean(self.intra)),
            "larger_inter_share": listed(torch.nanmean(larger)),
            "matrix": listed(self.matrix()),
            "inter": listed(inter),
            "intra": listed(intra),
            "cells": listed(self.cells()),
        }


def phase_angles(captures: Sequence[Capture], dimensions: int = DIMENSIONS) -> Angles:
    """Compare all pairs of spans within each capture; captures are of one model.

    `dimensions` is k, the directions per span; a span needs more tokens than that, as centring
    takes one away. UsageError if a capture has no phases, or none has two long spans.
    """
    check_same_shape(captures)
    head_dim = captures[0].q.shape[-1]
    if not 1 <= dimensions <= head_dim:
        raise UsageError(f"k={dimensions}: expected 1 to the head dimension, {head_dim}")
    found = [_one_capture(capture, dimensions) for capture in captures]
    spans, pairs = sum(part.spans for part in found), torch.cat([part.pairs for part in found])
    result = Angles(dimensions, spans, pairs, torch.cat([part.degrees for part in found]))
    if not len(result.pairs):
        raise UsageError(
            f"angles needs two spans of more than {dimensions} tokens in a capture; "
            f"found {result.spans} in {len(captures)}"
        )
    return result


def check_same_shape(captures: Sequence[Capture]) -> None:
    """Raise a UsageError unless captures can be pooled."""
    shapes = {(c.layers, c.q_heads, c.kv_heads, c.q.shape[-1]) for c in captures}
    if len(shapes) > 1:
        raise UsageError(
            f"captures differ in (layers, query heads, KV heads, head dim): {sorted(shapes)}; "
            "give captures of one model"
        )


def _one_capture(capture: Capture, dimensions: int) -> Angles:
    spans = phase_spans(capture.labels("angles"), dimensions + 1)
    bases = [_basis(capture.q, span, dimensions) for span in spans]
    pairs = [sorted((one.phase, other.phase)) for one, other in combinations(spans, 2)]
    angles = [_mean_angle(one, other) for one, other in combinations(bases, 2)]
    empty = torch.zeros((0, *capture.q.shape[:2]), dtype=torch.float64)
    degrees = torch.stack(angles) if angles else empty
    phases = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2)
    return Angles(dimensions, len(spans), phases, degrees)


class PhaseSpan(NamedTuple):
    """Tokens [start, end) of a capture, all of one phase."""

    phase: int
    start: int
    end: int


def phase_spans(phases: Tensor, shortest: int = 1) -> list[PhaseSpan]:
    """Return the spans of at least `shortest` tokens, in order, of phases [tokens]."""
    changes = (phases.diff() != 0).nonzero()[:, 0] + 1
    bounds = pairwise([0, *changes.tolist(), len(phases)])
    long = [(start, end) for start, end in bounds if end - start >= max(shortest, 1)]
    return [PhaseSpan(int(phases[start]), start, end) for start, end in long]


def _basis(queries: Tensor, span: PhaseSpan, dimensions: int) -> Tensor:
    """Return the dominant directions [layers, q_heads, head_dim, k]; NaN if there are fewer."""
    # Eigenvectors of the covariance are the right singular vectors of the rows, at a cost that does
    # not grow with a long span's rows.
    rows = queries[:, :, span.start : span.end].double()
    rows = rows - rows.mean(-2, keepdim=True)
    variances, directions = torch.linalg.eigh(rows.mT @ rows)
    leading: Tensor = directions[..., -dimensions:]
    flat = variances[..., -dimensions] <= _RANK_TOLERANCE * variances[..., -1]
    return leading.masked_fill(flat[..., None, None], torch.nan)


def _mean_angle(first: Tensor, second: Tensor) -> Tensor:
    """Return the mean principal angle [layers, q_heads] in degrees of two bases."""
    overlap = first.mT @ second
    missing = overlap.isnan().any(-1).any(-1)
    cosines: Tensor = torch.linalg.svdvals(overlap.masked_fill(missing[..., None, None], 0.0))
    return cosines.clamp(max=1).arccos().mean(-1).rad2deg().masked_fill(missing, torch.nan)


def listed(values: Tensor) -> Any:
    """Return nested lists, or a number, with None for NaN and infinities: JSON has neither."""

    def plain(value: Any) -> Any:
        if isinstance(value, list):
            return [plain(item) for item in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return plain(values.tolist())
