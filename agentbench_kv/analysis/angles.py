"""Principal angles between the query subspaces of phase spans (AgentKV, section 3.1).

Per span, layer and head, the queries' rows are centred; the first k right singular vectors span
their dominant directions. Two spans are compared by the mean of their k principal angles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from agentbench_kv.analysis.captures import Capture
from agentbench_kv.analysis.numbers import listed
from agentbench_kv.analysis.spans import Span, phase_spans
from agentbench_kv.errors import UsageError
from agentbench_kv.methods.phases import PHASE_NAMES, Phase

DIMENSIONS = 5
_RANK_TOLERANCE = 1e-10
"""Smallest variance of a direction, as a share of the largest; below it lies rounding noise."""


@dataclass(frozen=True)
class Angles:
    """Mean principal angles of all pairs of spans.

    Attributes
    ----------
    dimensions : int
        Directions per span.
    spans : int
        Spans that are long enough.
    pairs : Tensor [pairs, 2], int64
        Phases of the two spans, the lower first.
    degrees : Tensor [pairs, layers, q_heads], float64
        NaN where a span has fewer independent directions than `dimensions`.
    """

    dimensions: int
    spans: int
    pairs: Tensor
    degrees: Tensor

    def cells(self) -> Tensor:
        """Return means per pair of phases, [layers, q_heads, 4, 4]; NaN without a pair."""
        layers, heads = self.degrees.shape[1:]
        cells = torch.full((layers, heads, len(Phase), len(Phase)), torch.nan).double()
        for first in range(len(Phase)):
            for second in range(first, len(Phase)):
                mean = torch.nanmean(self.degrees[self.between(first, second)], 0)
                cells[..., first, second] = cells[..., second, first] = mean
        return cells

    def between(self, first: int, second: int) -> Tensor:
        """Mark the pairs [pairs] of two phases, the lower first."""
        return (self.pairs == torch.tensor([first, second])).all(-1)

    def matrix(self) -> Tensor:
        """Return means per pair of phases, pooled over layers and heads, [4, 4]."""
        matrix = torch.full((len(Phase), len(Phase)), torch.nan).double()
        for first in range(len(Phase)):
            for second in range(first, len(Phase)):
                mean = torch.nanmean(self.degrees[self.between(first, second)].flatten(), 0)
                matrix[first, second] = matrix[second, first] = mean
        return matrix

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
        return {
            "analysis": "angles",
            "unit": "degrees",
            "dimensions": self.dimensions,
            "phases": list(PHASE_NAMES),
            "spans": self.spans,
            "inter_pairs": len(self.inter),
            "intra_pairs": len(self.intra),
            "inter_mean": listed(torch.nanmean(self.inter.flatten(), 0)),
            "intra_mean": listed(torch.nanmean(self.intra.flatten(), 0)),
            "larger_inter_share": listed(_share_larger(inter, intra)),
            "matrix": listed(self.matrix()),
            "inter": listed(inter),
            "intra": listed(intra),
            "cells": listed(self.cells()),
        }


def _share_larger(inter: Tensor, intra: Tensor) -> Tensor:
    """Return the share of (layer, head)s whose inter-phase mean is above the intra-phase one."""
    larger = (inter > intra).double()
    return torch.nanmean(larger.masked_fill((inter + intra).isnan(), torch.nan).flatten(), 0)


def phase_angles(captures: Sequence[Capture], dimensions: int = DIMENSIONS) -> Angles:
    """Compare all pairs of spans within each capture.

    Parameters
    ----------
    captures : sequence of Capture
        Of one model: layers and heads agree.
    dimensions : int
        k, directions per span. A span needs more tokens than that, as centring takes one away.

    Raises
    ------
    UsageError
        If a capture has no phases, or there are not two long spans in any.
    """
    check_same_shape(captures)
    head_dim = captures[0].q.shape[-1]
    if not 1 <= dimensions <= head_dim:
        raise UsageError(f"k={dimensions}: expected 1 to the head dimension, {head_dim}")
    found = [_one_capture(capture, dimensions) for capture in captures]
    result = Angles(
        dimensions,
        sum(part.spans for part in found),
        torch.cat([part.pairs for part in found]),
        torch.cat([part.degrees for part in found]),
    )
    if not len(result.pairs):
        raise UsageError(
            f"angles needs two spans of more than {dimensions} tokens in a capture; "
            f"found {result.spans} in {len(captures)}"
        )
    return result


def check_same_shape(captures: Sequence[Capture]) -> None:
    """Check that captures can be pooled.

    Raises
    ------
    UsageError
        If layers, heads or head dimension differ.
    """
    shapes = {(c.layers, c.q_heads, c.kv_heads, c.q.shape[-1]) for c in captures}
    if len(shapes) > 1:
        raise UsageError(
            f"captures differ in (layers, query heads, KV heads, head dim): {sorted(shapes)}; "
            "give captures of one model"
        )


def _one_capture(capture: Capture, dimensions: int) -> Angles:
    spans = phase_spans(capture.labels("angles"), dimensions + 1)
    bases = [_basis(capture.q, span, dimensions) for span in spans]
    pairs, degrees = [], []
    for i, j in combinations(range(len(spans)), 2):
        pairs.append(sorted((spans[i].phase, spans[j].phase)))
        degrees.append(_mean_angle(bases[i], bases[j]))
    shape = (0, *capture.q.shape[:2])
    return Angles(
        dimensions,
        len(spans),
        torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2),
        torch.stack(degrees) if degrees else torch.zeros(shape, dtype=torch.float64),
    )


def _basis(queries: Tensor, span: Span, dimensions: int) -> Tensor:
    """Return the dominant directions [layers, q_heads, head_dim, k]; NaN if there are fewer.

    Eigenvectors of the covariance are the right singular vectors of the rows, at a cost that does
    not grow with a long span's rows.
    """
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
