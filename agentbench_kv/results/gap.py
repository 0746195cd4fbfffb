"""How far a candidate lies from a base, with an interval that a verdict may rest on.

A plain bootstrap is sure of what few samples never showed: ten samples without one change give an
interval of no width. Here two pseudo-samples, half a win and half a loss of the largest change
seen, stand beside the measured ones (as Agresti and Min do for paired proportions), and samples
that all changed by the same get a Wilson bound. Both fade as samples come in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from agentbench_kv.results.paired import mcnemar_p, permutation_p
from agentbench_kv.results.resample import by_group, change_ends, percentile_ends, resampled_sums
from agentbench_kv.results.statistics import LEVEL, RESAMPLES, Floats

__all__ = ["Gap", "score_gap", "size_gap"]

_LOWER = 0.9
_CONSTANT = 1e-12


class Gap(BaseModel):
    """Candidate against base over the samples both have.

    Attributes
    ----------
    base, cand : float
        Level of each over the shared samples.
    point, low, high : float
        Change with its 95% interval; shares of 1 for scores, relative to the base for sizes.
    low90 : float
        Lower end of the 90% interval, which non-inferiority is judged by.
    p_value : float
        Two-sided.
    test : str
        `mcnemar` or `permutation`.
    n, units : int
        Shared samples; what was resampled: samples, or groups of them.
    clusters : int or None
        Groups the samples fall into; None if every sample stands alone.
    spread : float
        Standard deviation of what one unit adds; the interval's half width is about
        z spread / sqrt(units). 0 if all units changed by the same.
    bounded : bool
        Whether a unit's change lies in [-1, 1], as scores' does.
    """

    model_config = ConfigDict(frozen=True)

    base: float
    cand: float
    point: float
    low: float
    high: float
    low90: float
    p_value: float
    test: Literal["mcnemar", "permutation"]
    n: int
    units: int
    clusters: int | None
    spread: float
    bounded: bool


def score_gap(
    ids: Sequence[str],
    cand: Floats,
    base: Floats,
    clusters: Mapping[str, str] | None = None,
    *,
    binary: bool = False,
    resamples: int = RESAMPLES,
) -> Gap:
    """Compare sum(right) / sum(asked) of two arms; a plain score is one asked per sample.

    Parameters
    ----------
    ids : sequence of str
        The samples, at least one.
    cand, base : (samples, 2) array
        Right and asked of each sample; asked is positive, right / asked in [0, 1].
    clusters : mapping of str to str, optional
        Group of each sample.
    binary : bool
        Whether every score is one trial, right or wrong: then the test is McNemar's.
    resamples : int
        Bootstrap and permutation resamples.
    """
    units, groups = by_group(ids, np.hstack([cand, base]), clusters)
    changes = units[:, 0] / units[:, 1] - units[:, 2] / units[:, 3]
    exact = binary and groups is None
    (low, high), (low90, _) = change_ends(units, resamples, (LEVEL, _LOWER))
    mine, theirs = _ratios(units.sum(0))
    return Gap(
        base=float(theirs),
        cand=float(mine),
        point=float(mine - theirs),
        low=low,
        high=high,
        low90=low90,
        p_value=mcnemar_p(units[:, 0], units[:, 2]) if exact else permutation_p(changes, resamples),
        test="mcnemar" if exact else "permutation",
        n=len(ids),
        units=len(units),
        clusters=groups,
        spread=_score_spread(units, changes),
        bounded=True,
    )


def size_gap(
    ids: Sequence[str],
    cand: Floats,
    base: Floats,
    clusters: Mapping[str, str] | None = None,
    *,
    resamples: int = RESAMPLES,
) -> Gap:
    """Compare means of a positive figure of which less is better, such as peak live tokens.

    `point`, `low` and `high` are the relative saving: 0.1 is 10% less than the base.

    Parameters
    ----------
    ids : sequence of str
        The samples, at least one.
    cand, base : (samples,) array
        The figure of each sample; `base` positive.
    clusters, resamples
        As `score_gap` takes them.
    """
    units, groups = by_group(ids, np.stack([cand, base], 1), clusters)
    sums = resampled_sums(units, resamples)
    low, high, low90 = _ends(1.0 - sums[:, 0] / sums[:, 1])
    total = units.sum(0)
    ratio = total[0] / total[1]
    share = (units[:, 0] - ratio * units[:, 1]) / units[:, 1].mean()
    return Gap(
        base=float(total[1] / len(ids)),
        cand=float(total[0] / len(ids)),
        point=float(1.0 - ratio),
        low=low,
        high=high,
        low90=low90,
        p_value=permutation_p(units[:, 1] - units[:, 0], resamples),
        test="permutation",
        n=len(ids),
        units=len(units),
        clusters=groups,
        spread=_deviation(share),
        bounded=False,
    )


def _ends(drawn: Floats) -> tuple[float, float, float]:
    return *percentile_ends(drawn), percentile_ends(drawn, _LOWER)[0]


def _score_spread(units: Floats, changes: Floats) -> float:
    if np.ptp(changes) < _CONSTANT:
        return 0.0
    mine, theirs = _ratios(units.sum(0))
    right, asked, other, of = units.T
    share = (right - mine * asked) / asked.mean() - (other - theirs * of) / of.mean()
    return _deviation(share)


def _ratios(sums: Floats) -> tuple[Floats, Floats]:
    return sums[0] / sums[1], sums[2] / sums[3]


def _deviation(values: Floats) -> float:
    return float(values.std(ddof=1)) if len(values) > 1 else 0.0
