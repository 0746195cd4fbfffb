"""Two arms on the same samples: is the difference one? (results.md, Statistics)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict
from scipy.stats import permutation_test
from statsmodels.stats.contingency_tables import mcnemar
from statsmodels.stats.multitest import multipletests

from agentbench_kv.results.resample import by_group, change_ends
from agentbench_kv.results.statistics import (
    ANALYSIS_SEED,
    RESAMPLES,
    Floats,
)

__all__ = [
    "Difference",
    "holm",
    "is_binary",
    "mcnemar_p",
    "paired_difference",
    "paired_ratio_difference",
    "permutation_p",
]


class Difference(BaseModel):
    """A minus B over the samples both have.

    Attributes
    ----------
    point, low, high : float
        Difference of the means (or of the ratios) with its 95% interval, bootstrap over samples,
        or over groups of samples where there are groups.
    p_value : float
        Two-sided: exact McNemar for one binary score a sample, else a permutation test.
    test : str
        `mcnemar` or `permutation`.
    n : int
        Samples in both arms.
    clusters : int or None
        Groups the samples fall into; None if every sample stands alone.
    """

    model_config = ConfigDict(frozen=True)

    point: float
    low: float
    high: float
    p_value: float
    test: Literal["mcnemar", "permutation"]
    n: int
    clusters: int | None = None


def paired_difference(
    a: Mapping[str, Sequence[float]],
    b: Mapping[str, Sequence[float]],
    resamples: int = RESAMPLES,
    clusters: Mapping[str, str] | None = None,
) -> Difference | None:
    """Compare mean scores; None if the arms share no sample.

    Parameters
    ----------
    a, b : mapping of str to sequence of float
        Scores of each sample's trials.
    resamples : int
        Of bootstrap and permutation test.
    clusters : mapping of str to str, optional
        Group of each sample; samples not named stand alone. Groups are what is resampled.
    """
    ids = sorted(a.keys() & b.keys())
    if not ids:
        return None
    means = np.array([[np.mean(a[name]), np.mean(b[name]), 1.0] for name in ids])
    units, groups = by_group(ids, means, clusters)
    first, second, size = units.T
    binary = groups is None and is_binary(a, b, ids)
    ((low, high),) = change_ends(np.column_stack([first, size, second, size]), resamples)
    return Difference(
        point=float(_gap(first, size, second, size)),
        low=low,
        high=high,
        p_value=mcnemar_p(first, second) if binary else permutation_p(first - second, resamples),
        test="mcnemar" if binary else "permutation",
        n=len(ids),
        clusters=groups,
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
    ((low, high),) = change_ends(np.column_stack([right, asked, other, of]), resamples)
    return Difference(
        point=float(_gap(right, asked, other, of)),
        low=low,
        high=high,
        p_value=permutation_p(right / asked - other / of, resamples),
        test="permutation",
        n=len(ids),
    )


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted for their number (Holm)."""
    if not p_values:
        return []
    return [float(p) for p in multipletests(list(p_values), method="holm")[1]]


def is_binary(
    a: Mapping[str, Sequence[float]], b: Mapping[str, Sequence[float]], ids: Sequence[str]
) -> bool:
    """Whether every sample has one trial that is right or wrong, in both arms."""
    return all(list(arm[name]) in ([0], [1]) for arm in (a, b) for name in ids)


def mcnemar_p(a: Floats, b: Floats) -> float:
    """Return the two-sided p-value of the exact McNemar test on paired binary scores."""
    wins, losses = int((a > b).sum()), int((a < b).sum())
    return float(mcnemar([[0, wins], [losses, 0]], exact=True).pvalue)


def permutation_p(differences: Floats, resamples: int = RESAMPLES) -> float:
    """Return the two-sided p-value of paired differences whose signs are swapped at random."""
    if len(differences) < 2 or not differences.any():
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


def _gap(a: Floats, a_of: Floats, b: Floats, b_of: Floats) -> Any:
    return a.sum() / a_of.sum() - b.sum() / b_of.sum()
