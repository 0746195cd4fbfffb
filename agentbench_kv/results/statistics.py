"""Intervals of one arm (results.md, Statistics). The sample is the unit, never the trial."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict
from scipy.stats import DegenerateDataWarning, bootstrap, norm
from statsmodels.stats.proportion import proportion_confint

__all__ = [
    "ANALYSIS_SEED",
    "LEVEL",
    "Interval",
    "interval",
    "ratio_interval",
    "steady_ends",
    "unseen_share",
    "wilson",
]

LEVEL = 0.95
ANALYSIS_SEED = 20260101
RESAMPLES = 9999

# Resampled indices held at once; bounds memory at about 80 MB however many samples there are.
_BATCH_ITEMS = 10_000_000
_CONSTANT = 1e-12

Floats = NDArray[np.float64]


class Interval(BaseModel):
    """A point with its 95% interval.

    Attributes
    ----------
    point, low, high : float
        In [0, 1].
    method : str
        `wilson` (binary, one trial a sample), `bca` (bootstrap over sample means),
        `wilson_samples` (constant data), `cluster_bca` (bootstrap over groups of samples).
    n : int
        Units the interval rests on: samples, or groups for `cluster_bca`.
    """

    model_config = ConfigDict(frozen=True)

    point: float
    low: float
    high: float
    method: Literal["wilson", "bca", "wilson_samples", "cluster_bca"]
    n: int


def wilson(successes: float, n: int) -> tuple[float, float]:
    """Return the ends of the 95% Wilson score interval of a proportion.

    Parameters
    ----------
    successes : float
        Successes in `n`; a fraction of one is allowed, for graded scores.
    n : int
        Trials, at least 1.
    """
    low, high = proportion_confint(successes, n, alpha=1 - LEVEL, method="wilson")
    return max(0.0, float(low)), min(1.0, float(high))


def steady_ends(change: float, units: int, level: float = LEVEL) -> tuple[float, float]:
    """Return the ends of a paired change of scores that was the same in every unit.

    Resampling finds no spread in it, and would be sure of what few units never showed. So as many
    unseen units as Wilson's interval for 0 of `units` allows may change by 1 either way.
    """
    unseen = unseen_share(units, level)
    return change * (1 - unseen) - unseen, change * (1 - unseen) + unseen


def unseen_share(units: int, level: float = LEVEL) -> float:
    """Return the largest share of a kind that `units` samples without one are compatible with.

    The upper end of Wilson's interval for 0 of `units`.
    """
    z = float(norm.ppf((1 + level) / 2))
    return z * z / (units + z * z)


def interval(
    scores_by_sample: Mapping[str, Sequence[float]],
    clusters: Mapping[str, str] | None = None,
    resamples: int = RESAMPLES,
) -> Interval:
    """Return the mean score over samples with the interval that fits the data.

    One binary score a sample: Wilson. Several trials or graded scores: bootstrap BCa over sample
    means, or Wilson on samples where all means are equal. Groups of samples: the same over groups.

    Parameters
    ----------
    scores_by_sample : mapping of str to sequence of float
        Scores in [0, 1] of each sample's trials; no sample without a trial.
    clusters : mapping of str to str, optional
        Group of each sample; samples not named stand alone.
    resamples : int
        Bootstrap resamples.

    Raises
    ------
    ValueError
        If there are no samples.
    """
    if not scores_by_sample:
        raise ValueError("no scores to take an interval of")
    ids = sorted(scores_by_sample)
    means = np.array([np.mean(scores_by_sample[name]) for name in ids], dtype=np.float64)
    if clusters and len({clusters.get(name, name) for name in ids}) < len(ids):
        return _over_clusters(ids, means, np.ones_like(means), clusters, resamples)
    if all(list(scores_by_sample[name]) in ([0], [1]) for name in ids):
        low, high = wilson(float(means.sum()), len(ids))
        return Interval(point=float(means.mean()), low=low, high=high, method="wilson", n=len(ids))
    return _bootstrap(means, np.ones_like(means), "bca", resamples)


def ratio_interval(
    right_by_sample: Mapping[str, float],
    asked_by_sample: Mapping[str, float],
    clusters: Mapping[str, str] | None = None,
    resamples: int = RESAMPLES,
) -> Interval | None:
    """Return sum(right) / sum(asked) with a bootstrap over samples; None if nothing was asked.

    Where samples belong to groups, groups are resampled.

    Parameters
    ----------
    right_by_sample, asked_by_sample : mapping of str to float
        Counts of each sample, summed over its trials; `right` is at most `asked`.
    clusters : mapping of str to str, optional
        Group of each sample; samples not named stand alone.
    resamples : int
        Bootstrap resamples.
    """
    ids = sorted(name for name, asked in asked_by_sample.items() if asked > 0)
    if not ids:
        return None
    right = np.array([right_by_sample.get(name, 0.0) for name in ids], dtype=np.float64)
    asked = np.array([asked_by_sample[name] for name in ids], dtype=np.float64)
    if clusters and len({clusters.get(name, name) for name in ids}) < len(ids):
        return _over_clusters(ids, right, asked, clusters, resamples)
    return _bootstrap(right, asked, "bca", resamples)


def _over_clusters(
    ids: Sequence[str],
    totals: Floats,
    weights: Floats,
    clusters: Mapping[str, str],
    resamples: int,
) -> Interval:
    """Sum both within the groups, and resample groups."""
    names = [clusters.get(name, name) for name in ids]
    unique, group = np.unique(names, return_inverse=True)
    sums = np.zeros((2, len(unique)))
    for row, values in zip(sums, (totals, weights), strict=True):
        np.add.at(row, group, values)
    return _bootstrap(sums[0], sums[1], "cluster_bca", resamples)


def _bootstrap(
    totals: Floats, weights: Floats, method: Literal["bca", "cluster_bca"], resamples: int
) -> Interval:
    """Interval of sum(totals) / sum(weights), units resampled with replacement."""
    point = float(totals.sum() / weights.sum())
    n = len(totals)
    ends = None if np.ptp(totals / weights) < _CONSTANT else _bca(totals, weights, resamples)
    if ends is None:
        low, high = wilson(min(point, 1.0) * n, n)
        return Interval(point=point, low=low, high=high, method="wilson_samples", n=n)
    return Interval(point=point, low=ends[0], high=ends[1], method=method, n=n)


def _ratio(totals: Floats, weights: Floats, axis: int = -1) -> Any:
    return totals.sum(axis=axis) / weights.sum(axis=axis)


def _bca(totals: Floats, weights: Floats, resamples: int) -> tuple[float, float] | None:
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore", DegenerateDataWarning)
        result = bootstrap(
            (totals, weights),
            _ratio,
            paired=True,
            vectorized=True,
            method="BCa",
            confidence_level=LEVEL,
            n_resamples=resamples,
            batch=max(1, min(resamples, _BATCH_ITEMS // len(totals))),
            rng=np.random.default_rng(ANALYSIS_SEED),
        )
    low, high = (float(end) for end in result.confidence_interval)
    return (low, high) if np.isfinite(low) and np.isfinite(high) else None
