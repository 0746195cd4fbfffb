"""pass^k: how often an agent succeeds k times out of k, without bias."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import comb

from agentbench_kv.results.statistics import RESAMPLES, Interval, interval, ratio_interval

__all__ = ["common_trials", "is_binary", "pass_k", "pass_power", "pass_powers", "sample_powers"]

# How far from 1 a success may lie, as tau2-bench has it.
_TOLERANCE = 1e-6

Scores = Mapping[str, Sequence[float]]


def pass_power(
    scores_by_sample: Scores,
    k: int,
    clusters: Mapping[str, str] | None = None,
    resamples: int = RESAMPLES,
) -> Interval | None:
    """Return the probability that k trials of a sample all succeed, mean over samples.

    The interval is a bootstrap over samples (over groups of samples where there are groups).

    Parameters
    ----------
    scores_by_sample : mapping of str to sequence of float
        Scores of each sample's trials; a trial succeeds if it scores 1.
    k : int
        At least 1.
    clusters : mapping of str to str, optional
        Group of each sample.
    resamples : int
        Bootstrap resamples.

    Returns
    -------
    Interval or None
        Over the samples with at least k trials; None if there is none.

    Raises
    ------
    ValueError
        If k is less than 1.
    """
    powers = sample_powers(scores_by_sample, k)
    if not powers:
        return None
    if clusters:
        return interval({name: [power] for name, power in powers.items()}, clusters, resamples)
    return ratio_interval(powers, dict.fromkeys(powers, 1.0), resamples=resamples)


def pass_powers(
    scores_by_sample: Scores,
    clusters: Mapping[str, str] | None = None,
    resamples: int = RESAMPLES,
) -> dict[str, Interval]:
    """Return `pass^1` to `pass^K` by name, K being the trials that every sample has.

    Above 8 only powers of two and K itself. Empty with fewer than two trials a sample, and for
    graded scores, of which no trial need ever be a success.

    Parameters
    ----------
    scores_by_sample : mapping of str to sequence of float
        Scores of each sample's trials.
    clusters : mapping of str to str, optional
        Group of each sample.
    resamples : int
        Bootstrap resamples.
    """
    most = common_trials(scores_by_sample)
    if most < 2 or not is_binary(scores_by_sample):
        return {}
    shown = (k for k in range(1, most + 1) if k <= 8 or k & (k - 1) == 0 or k == most)
    powers = {f"pass^{k}": pass_power(scores_by_sample, k, clusters, resamples) for k in shown}
    return {name: ends for name, ends in powers.items() if ends is not None}


def sample_powers(scores_by_sample: Scores, k: int) -> dict[str, float]:
    """Return pass^k of each sample with at least k trials.

    That is C(c, k) / C(n, k) of its n trials with c successes: (c / n)^k would be biased.

    Raises
    ------
    ValueError
        If k is less than 1.
    """
    if k < 1:
        raise ValueError(f"pass^{k}: k is at least 1")
    return {
        name: comb(sum(map(_succeeded, scores)), k) / comb(len(scores), k)
        for name, scores in scores_by_sample.items()
        if len(scores) >= k
    }


def common_trials(scores_by_sample: Scores) -> int:
    """Return K, the most trials that every sample has; 0 without samples."""
    return min(map(len, scores_by_sample.values()), default=0)


def is_binary(scores_by_sample: Scores) -> bool:
    """Tell whether every trial failed or succeeded; of graded scores pass^k says nothing."""
    every = (score for scores in scores_by_sample.values() for score in scores)
    return all(_succeeded(score) or abs(score) <= _TOLERANCE for score in every)


def pass_k(metric: str) -> int | None:
    """Return k of a metric called `pass^k`, such as 4 of `pass^4`; None of any other name."""
    found = re.fullmatch(r"pass\^([1-9]\d{0,3})", metric)
    return int(found[1]) if found else None


def _succeeded(score: float) -> bool:
    return abs(score - 1) <= _TOLERANCE
