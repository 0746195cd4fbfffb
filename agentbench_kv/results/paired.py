"""Two arms on the same samples: is the difference one? (results.md, Statistics)."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict
from scipy.stats import DegenerateDataWarning, bootstrap, permutation_test
from statsmodels.stats.contingency_tables import mcnemar
from statsmodels.stats.multitest import multipletests

from agentbench_kv.results.statistics import ANALYSIS_SEED, LEVEL, RESAMPLES, Floats

__all__ = ["Difference", "holm", "paired_difference", "paired_ratio_difference"]


class Difference(BaseModel):
    """A minus B over the samples both have.

    Attributes
    ----------
    point, low, high : float
        Difference of the means (or of the ratios) with its 95% interval, bootstrap over samples.
    p_value : float
        Two-sided: exact McNemar for one binary score a sample, else a permutation test.
    test : str
        `mcnemar` or `permutation`.
    n : int
        Samples in both arms.
    """

    model_config = ConfigDict(frozen=True)

    point: float
    low: float
    high: float
    p_value: float
    test: Literal["mcnemar", "permutation"]
    n: int


def paired_difference(
    a: Mapping[str, Sequence[float]], b: Mapping[str, Sequence[float]], resamples: int = RESAMPLES
) -> Difference | None:
    """Compare mean scores; None if the arms share no sample.

    Parameters
    ----------
    a, b : mapping of str to sequence of float
        Scores of each sample's trials.
    resamples : int
        Of bootstrap and permutation test.
    """
    ids = sorted(a.keys() & b.keys())
    if not ids:
        return None
    first, second = (np.array([np.mean(arm[name]) for name in ids]) for arm in (a, b))
    binary = all(list(arm[name]) in ([0], [1]) for arm in (a, b) for name in ids)
    ones = np.ones_like(first)
    low, high = _ends(first, ones, second, ones, resamples)
    return Difference(
        point=float((first - second).mean()),
        low=low,
        high=high,
        p_value=_mcnemar(first, second) if binary else _permuted(first - second, resamples),
        test="mcnemar" if binary else "permutation",
        n=len(ids),
    )


def paired_ratio_difference(
    a: Mapping[str, tuple[float, float]],
    b: Mapping[str, tuple[float, float]],
    resamples: int = RESAMPLES,
) -> Difference | None:
    """Compare sum(right) / sum(asked); None if the arms share no sample that was asked anything.

    Parameters
    ----------
    a, b : mapping of str to (float, float)
        Right and asked of each sample.
    resamples : int
        Of bootstrap and permutation test.
    """
    ids = sorted(name for name in a.keys() & b.keys() if a[name][1] > 0 and b[name][1] > 0)
    if not ids:
        return None
    right, asked, other, of = (
        np.array([arm[name][i] for name in ids], np.float64) for arm in (a, b) for i in (0, 1)
    )
    low, high = _ends(right, asked, other, of, resamples)
    return Difference(
        point=float(_gap(right, asked, other, of)),
        low=low,
        high=high,
        p_value=_permuted(right / asked - other / of, resamples),
        test="permutation",
        n=len(ids),
    )


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted for their number (Holm)."""
    if not p_values:
        return []
    return [float(p) for p in multipletests(list(p_values), method="holm")[1]]


def _gap(a: Floats, a_of: Floats, b: Floats, b_of: Floats, axis: int = -1) -> Any:
    return a.sum(axis) / a_of.sum(axis) - b.sum(axis) / b_of.sum(axis)


def _ends(a: Floats, a_of: Floats, b: Floats, b_of: Floats, resamples: int) -> tuple[float, float]:
    """Bootstrap interval of the gap; a gap that is the same in every sample has none around it."""
    if np.ptp(a / a_of - b / b_of) == 0.0:
        point = float(_gap(a, a_of, b, b_of))
        return point, point
    for method in ("BCa", "percentile"):
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore", DegenerateDataWarning)
            result = bootstrap(
                (a, a_of, b, b_of),
                _gap,
                paired=True,
                vectorized=True,
                method=method,
                confidence_level=LEVEL,
                n_resamples=resamples,
                rng=np.random.default_rng(ANALYSIS_SEED),
            )
        low, high = (float(end) for end in result.confidence_interval)
        if np.isfinite(low) and np.isfinite(high):
            break
    return low, high


def _mcnemar(a: Floats, b: Floats) -> float:
    wins, losses = int((a > b).sum()), int((a < b).sum())
    return float(mcnemar([[0, wins], [losses, 0]], exact=True).pvalue)


def _permuted(differences: Floats, resamples: int) -> float:
    if not differences.any():
        return 1.0
    result = permutation_test(
        (differences, np.zeros_like(differences)),
        lambda x, y, axis: (x - y).mean(axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=resamples,
        rng=np.random.default_rng(ANALYSIS_SEED),
    )
    return float(result.pvalue)
