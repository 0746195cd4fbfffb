"""Every statistic of kvbench, once: levels, paired changes, tests, pass^k, medians of repetitions.

The sample is the unit, never the trial; where samples come in groups (questions of a conversation),
the group is. Scores are shares of 1, and every figure is sum(right) / sum(asked) over samples.

The interval is Wilson's, for any score in [0, 1]: a mean is inside it if the data do not speak
against it, the variance being that of the mean in question. To reach that mean, what was seen is
mixed with the worst (or best) score there is, so that twenty equal scores do not prove that the
twenty-first is the same. One binary score a sample gives exactly Wilson's interval (Brown, Cai,
DasGupta 2001, section 3.1.1); repeats and groups enter by their design effect (Dean and Pagano
2015). docs/decisions/0028 has the measured coverage.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import comb, inf, sqrt
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri, stdtrit
from scipy.stats import mannwhitneyu
from statsmodels.stats.contingency_tables import mcnemar

Floats = NDArray[np.float64]
LEVEL = 0.95
SEED = 20260101
RESAMPLES = 9999
REPETITIONS = 9
"""Fewer repetitions than this decide nothing about speed."""

_SAME = 1e-12
_SUCCESS = 1e-6  # how far from 1 a success may lie, as tau2-bench has it


@dataclass(frozen=True)
class Interval:
    """A level with its interval, over `n` samples, in so many `groups` where they are grouped."""

    point: float
    low: float
    high: float
    method: Literal["wilson", "score", "groups", "t"]
    n: int
    groups: int | None = None


@dataclass(frozen=True)
class Change:
    """Candidate minus base over the samples both have."""

    base: float
    cand: float
    point: float
    low: float
    high: float
    p_value: float  # two-sided
    test: Literal["mcnemar", "permutation"]
    n: int  # shared samples
    groups: int | None  # groups of them, where samples are grouped
    spread: float  # of one unit (std): the half width is about z * spread / sqrt(units)

    @property
    def tied(self) -> bool:
        """Whether the interval holds 0: the data do not tell the two apart."""
        return self.low <= 0.0 <= self.high

    @property
    def units(self) -> int:
        """What is independent: groups, or samples where there are none."""
        return self.n if self.groups is None else self.groups


@dataclass(frozen=True)
class Scores:
    """One side of a comparison, sample by sample."""

    # Right and asked of each sample, asked > 0. The mean of a sample's trials is right out of 1.
    parts: Mapping[str, tuple[float, float]]
    # How many answers that are right or wrong stand behind a sample; 1 for a graded score.
    items: Mapping[str, float] = field(default_factory=dict)
    # Group of each sample that belongs to one; others stand alone.
    groups: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of_trials(
        cls, trials: Mapping[str, Sequence[float]], groups: Mapping[str, str] | None = None
    ) -> Self:
        """Take the scores of each sample's trials; a sample has at least one."""
        parts = {name: (sum(values) / len(values), 1.0) for name, values in trials.items()}
        binary = {name: values for name, values in trials.items() if set(values) <= {0.0, 1.0}}
        return cls(
            parts, {name: float(len(values)) for name, values in binary.items()}, groups or {}
        )

    @classmethod
    def of_counts(
        cls, counts: Mapping[str, tuple[float, float]], groups: Mapping[str, str] | None = None
    ) -> Self:
        """Take right and asked of each sample; one that was asked nothing drops out."""
        parts = {name: pair for name, pair in counts.items() if pair[1] > 0}
        # A sum of graded answers may come to a whole number, too: counts do so everywhere.
        whole = all(right % 1 == asked % 1 == 0 for right, asked in parts.values())
        items = {name: asked for name, (_, asked) in parts.items()} if whole else {}
        return cls(parts, items, groups or {})

    def only(self, samples: set[str]) -> Scores:
        parts = {name: pair for name, pair in self.parts.items() if name in samples}
        return Scores(parts, self.items, self.groups)

    @cached_property
    def mean(self) -> float:
        right, asked = np.sum(list(self.parts.values()), axis=0)
        return float(right / asked)

    def group_of(self, samples: Sequence[str]) -> tuple[NDArray[np.intp], int] | None:
        """Return each sample's group by number, and how many there are; None if all are alone."""
        names = [self.groups.get(name, name) for name in samples]
        order, numbers = np.unique(np.array(names, dtype=object).astype(str), return_inverse=True)
        return (numbers, len(order)) if len(order) < len(samples) else None


@dataclass(frozen=True)
class _Mean:
    """A weighted mean with what its interval needs.

    `variance` is that of the mean over independent units; `items` is the number of independent
    answers that would have the same, which bounds what so few may not have shown.
    """

    point: float
    variance: float
    items: float
    quantile: float

    def end(self, extreme: float) -> float:
        """Return the end of the interval towards the lowest or the highest value there is.

        A mean `extreme * e + point * (1 - e)` is tested with the variance of that very mixture;
        the end is where the test statistic is the quantile: a quadratic equation in e.
        """
        distance = abs(extreme - self.point)
        if distance < _SAME or self.quantile == inf:
            return extreme
        q2 = self.quantile**2
        per_item = distance**2 / self.items
        a, b, c = distance**2 + q2 * per_item, q2 * (per_item - self.variance), q2 * self.variance
        share = (b + sqrt(b * b + 4 * a * c)) / (2 * a)
        return self.point + min(share, 1.0) * (extreme - self.point)


def level(scores: Scores, confidence: float = LEVEL) -> Interval:
    """Return the mean with its interval; a ValueError if there are no samples."""
    if not scores.parts:
        raise ValueError("no scores to take an interval of")
    ids = sorted(scores.parts)
    right, asked = np.array([scores.parts[name] for name in ids]).T
    items = np.array([scores.items.get(name, 0.0) for name in ids])
    shares, grouped = right / asked, scores.group_of(ids)
    plain = grouped is None and bool(np.isin(shares, (0.0, 1.0)).all()) and not np.ptp(asked)
    mean = _mean(shares, asked, items, grouped, plain, confidence)
    method: Literal["wilson", "score", "groups"] = "groups" if grouped else "score"
    return Interval(
        point=min(max(mean.point, 0.0), 1.0),
        low=max(mean.end(0.0), 0.0),
        high=min(mean.end(1.0), 1.0),
        method="wilson" if plain else method,
        n=len(ids),
        groups=grouped[1] if grouped else None,
    )


def change(
    cand: Scores, base: Scores, confidence: float = LEVEL, tested: bool = True
) -> Change | None:
    """Compare two sides on the samples both have; None if there is none.

    Gains and losses have an interval each, and the ends of the change combine them (Newcombe 1998,
    method 10): an end allows for the changes that so few samples may not have shown in its own
    direction only. `confidence` is the two-sided interval's, 1 - 0.05 / m for one of m comparisons
    of a table; the p-value is 1 unless `tested`.
    """
    ids = sorted(cand.parts.keys() & base.parts.keys())
    if not ids:
        return None
    mine, theirs = (np.array([side.parts[name] for name in ids]) for side in (cand, base))
    changes = mine[:, 0] / mine[:, 1] - theirs[:, 0] / theirs[:, 1]
    weights = (mine[:, 1] + theirs[:, 1]) / 2
    grouped = Scores(base.parts, groups={**base.groups, **cand.groups}).group_of(ids)
    plain = grouped is None and bool(np.isin(changes, (-1.0, 0.0, 1.0)).all())
    low, high = _change_ends(changes, weights, grouped, plain, confidence)
    own, other = (float(side[:, 0].sum() / side[:, 1].sum()) for side in (mine, theirs))
    binary = plain and not np.ptp(weights)
    return Change(
        base=other,
        cand=own,
        point=own - other,
        low=min(low, own - other),
        high=max(high, own - other),
        p_value=_p_value(changes, weights, grouped, binary) if tested else 1.0,
        test="mcnemar" if binary else "permutation",
        n=len(ids),
        groups=grouped[1] if grouped else None,
        spread=_spread(changes, weights, grouped),
    )


def paired_ends(
    changes: Floats, confidence: float = LEVEL, groups: NDArray[np.intp] | None = None
) -> tuple[float, float]:
    """Return the interval of `change` for equally weighted samples that changed by [-1, 1] each.

    `groups` numbers each sample's group, from 0 on without gaps.
    """
    grouped = None if groups is None else (groups, int(groups.max()) + 1)
    plain = grouped is None and bool(np.isin(changes, (-1.0, 0.0, 1.0)).all())
    return _change_ends(changes, np.ones(len(changes)), grouped, plain, confidence)


def size_change(
    cand: Mapping[str, float],
    base: Mapping[str, float],
    groups: Mapping[str, str] | None = None,
    confidence: float = LEVEL,
) -> Change | None:
    """Compare mean sizes, such as peak live tokens, on the samples both have.

    `point`, `low` and `high` are relative: 0.1 is 10 % more than the base. `base` is positive.
    """
    ids = sorted(cand.keys() & base.keys())
    if not ids:
        return None
    mine, theirs = (np.array([side[name] for name in ids]) for side in (cand, base))
    grouped = Scores({}, groups=groups or {}).group_of(ids)
    ratio = float(mine.sum() / theirs.sum())
    rest = (mine - ratio * theirs) / theirs.mean()
    units = _sums(rest, grouped)
    spread = float(units.std(ddof=1)) if len(units) > 1 else 0.0
    reach = _t(confidence, len(units) - 1) * spread * sqrt(len(units)) / len(ids)
    reach = reach if len(units) > 1 else inf
    return Change(
        base=float(theirs.mean()),
        cand=float(mine.mean()),
        point=ratio - 1,
        low=max(ratio - 1 - reach, -1.0),
        high=ratio - 1 + reach,
        p_value=_permutation(_sums(mine - theirs, grouped)),
        test="permutation",
        n=len(ids),
        groups=grouped[1] if grouped else None,
        spread=spread * len(units) / len(ids),
    )


def open_level(
    counts: Mapping[str, tuple[float, float]],
    groups: Mapping[str, str] | None = None,
    confidence: float = LEVEL,
) -> Interval:
    """Return a mean without bounds (a divergence in nats): totals over counts of samples.

    Student's t over samples, or over groups of them, of the ratio linearised; of its logarithm
    where no total is negative, as divergences are skewed (docs/fidelity.md has the coverage). A
    ValueError if there are none.
    """
    counted = {name: pair for name, pair in counts.items() if pair[1] > 0}
    if not counted:
        raise ValueError("no totals to take an interval of")
    ids = sorted(counted)
    total, count = np.array([counted[name] for name in ids]).T
    grouped = Scores({}, groups=groups or {}).group_of(ids)
    ratio = float(total.sum() / count.sum())
    units = _sums(total - ratio * count, grouped) / count.sum()
    reach = _open_reach(units, confidence)
    number = None if grouped is None else grouped[1]
    low, high = ratio - reach, ratio + reach
    if total.min() >= 0 and ratio > 0:
        reach = reach if len(units) > 2 else inf  # of two, the logarithm's says nothing
        low, high = (float(ratio * np.exp(way * reach / ratio)) for way in (-1, 1))
    return Interval(ratio, low, high, "t", len(ids), number)


def open_change(
    cand: Mapping[str, tuple[float, float]],
    base: Mapping[str, tuple[float, float]],
    groups: Mapping[str, str] | None = None,
    confidence: float = LEVEL,
) -> Change | None:
    """Compare two means without bounds on the samples that both have; None if there is none."""
    ids = sorted(name for name in cand.keys() & base.keys() if cand[name][1] and base[name][1])
    if not ids:
        return None
    mine, theirs = (np.array([side[name] for name in ids]) for side in (cand, base))
    grouped = Scores({}, groups=groups or {}).group_of(ids)
    own, other = (float(side[:, 0].sum() / side[:, 1].sum()) for side in (mine, theirs))
    parts = [
        (side[:, 0] - ratio * side[:, 1]) / side[:, 1].sum()
        for side, ratio in ((mine, own), (theirs, other))
    ]
    units = _sums(parts[0] - parts[1], grouped)
    reach = _open_reach(units, confidence)
    swapped = mine[:, 0] / mine[:, 1].sum() - theirs[:, 0] / theirs[:, 1].sum()
    return Change(
        *(other, own, own - other, own - other - reach, own - other + reach),
        p_value=_permutation(_sums(swapped, grouped)),
        test="permutation",
        n=len(ids),
        groups=None if grouped is None else grouped[1],
        spread=float(units.std(ddof=1)) * len(units) if len(units) > 1 else 0.0,
    )


def _open_reach(units: Floats, confidence: float) -> float:
    """Return the half width of an interval of a sum of independent units with mean 0."""
    if len(units) < 2:
        return inf
    return _t(confidence, len(units) - 1) * float(units.std(ddof=1)) * sqrt(len(units))


def holm(p_values: Sequence[float], family: int | None = None) -> list[float]:
    """Return p-values adjusted for a family of comparisons (Holm); those not given count as 1."""
    count, order = max(family or 0, len(p_values)), np.argsort(p_values)
    # Not statsmodels' own: it collects garbage at every call, 0.1 s in a process full of records.
    steps = (count - np.arange(len(p_values))) * np.array(p_values, np.float64)[order]
    adjusted = np.empty(len(p_values))
    adjusted[order] = np.minimum(np.maximum.accumulate(steps), 1.0)
    return [float(p) for p in adjusted]


def powers(trials: Mapping[str, Sequence[float]], k: int) -> dict[str, float]:
    """Return pass^k of each sample with at least k trials: C(c, k) / C(n, k) of n with c successes.

    That is unbiased; (c / n)^k is not. A trial succeeds if it scores 1.
    """
    if k < 1:
        raise ValueError(f"pass^{k}: k is at least 1")
    return {
        name: comb(sum(abs(score - 1) <= _SUCCESS for score in scores), k) / comb(len(scores), k)
        for name, scores in trials.items()
        if len(scores) >= k
    }


def pass_scores(
    trials: Mapping[str, Sequence[float]], k: int, groups: Mapping[str, str] | None = None
) -> Scores:
    return Scores(
        {name: (power, 1.0) for name, power in powers(trials, k).items()}, {}, groups or {}
    )


def pass_levels(
    trials: Mapping[str, Sequence[float]], groups: Mapping[str, str] | None = None
) -> dict[str, Interval]:
    """Return `pass^1` to `pass^K` by name, K being the trials that every sample has.

    Above 8 only powers of two and K itself. Empty with fewer than two trials a sample, and for
    graded scores, of which no trial need ever be a success.
    """
    most = min(map(len, trials.values()), default=0)
    if most < 2 or not succeed_or_fail(trials):
        return {}
    shown = (k for k in range(1, most + 1) if k <= 8 or k & (k - 1) == 0 or k == most)
    return {f"pass^{k}": level(pass_scores(trials, k, groups)) for k in shown}


def succeed_or_fail(trials: Mapping[str, Sequence[float]]) -> bool:
    """Tell whether every trial scores 0 or 1; of graded scores pass^k says nothing."""
    every = (score for scores in trials.values() for score in scores)
    return all(min(abs(score), abs(score - 1)) <= _SUCCESS for score in every)


def pass_k(metric: str) -> int | None:
    """Return k of a metric called `pass^k`, such as 4 of `pass^4`; None of any other name."""
    found = re.fullmatch(r"pass\^([1-9]\d{0,3})", metric)
    return int(found[1]) if found else None


@dataclass(frozen=True)
class Median:
    """A median of `n` repetitions with its 95% interval."""

    point: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class SpeedChange:
    """One set of repetitions against another: relative change of the median, 0.1 is 10% more."""

    base: Median
    cand: Median
    point: float
    low: float
    high: float
    p_value: float  # two-sided, Mann-Whitney

    @property
    def enough(self) -> bool:
        """Whether both sides have the repetitions a verdict needs."""
        return min(self.base.n, self.cand.n) >= REPETITIONS


def median(values: Sequence[float]) -> Median:
    """Return the median of repetitions, at least one, with a percentile bootstrap interval."""
    if not values:
        raise ValueError("no repetitions to take a median of")
    low, high = ends(_medians(values, SEED))
    return Median(float(np.median(values)), low, high, len(values))


def speed_change(base: Sequence[float], cand: Sequence[float]) -> SpeedChange:
    """Compare two sets of positive figures, such as tokens/s; interleaved, so not paired."""
    if not base or not cand or min(*base, *cand) <= 0:
        raise ValueError("speed is compared between positive figures, at least one a side")
    theirs, mine = (_medians(side, SEED + i) for i, side in enumerate((base, cand)))
    low, high = ends(mine / theirs - 1.0)
    return SpeedChange(
        base=median(base),
        cand=median(cand),
        point=float(np.median(cand) / np.median(base) - 1.0),
        low=low,
        high=high,
        p_value=float(mannwhitneyu(base, cand).pvalue),
    )


def ends(drawn: Floats, confidence: float = LEVEL) -> tuple[float, float]:
    """Return the values that leave (1 - confidence) / 2 of the draws on each side; no NaN."""
    known = np.sort(drawn[~np.isnan(drawn)])
    if not len(known):
        return float("nan"), float("nan")
    low = int((1 - confidence) / 2 * (len(known) - 1))
    return float(known[low]), float(known[len(known) - 1 - low])


@lru_cache(maxsize=4)
def draws(n: int, resamples: int) -> Floats:
    """Return how often each of n units is drawn in every resample: [resamples, n]."""
    return np.random.default_rng(SEED).multinomial(n, np.full(n, 1.0 / n), resamples).astype(float)


def _mean(
    values: Floats,
    weights: Floats,
    items: Floats,
    grouped: tuple[NDArray[np.intp], int] | None,
    plain: bool,
    confidence: float,
) -> _Mean:
    """Take the mean of samples' values in [0, 1], an item or more behind each (0: graded)."""
    total, n = weights.sum(), len(values)
    point = float(weights @ values / total)
    if plain:  # Wilson's own: a share of n, normal quantile
        return _Mean(point, point * (1 - point) / n, n, float(ndtri((1 + confidence) / 2)))
    units = _sums(weights * (values - point), grouped)
    number = len(units)
    if number < 2:
        return _Mean(point, 0.0, 1.0, inf)
    variance = float((units @ units) * number / (number - 1) / total**2)
    known = items > 0
    alone = np.where(known, point * (1 - point) / np.where(known, items, 1), (values - point) ** 2)
    independent = float(weights**2 @ alone / total**2)
    answers = float(total**2 / (weights**2 @ (1 / np.where(known, items, 1.0))))
    effect = variance / independent if independent > _SAME else 1.0
    count = answers / min(max(effect, 1.0), max(answers / number, 1.0))
    freedom = number - 1.0
    if grouped is None:
        # A few repeats tell more of the variance than their samples do, and less than independent
        # answers would; of many, only how samples differ is left. See decision 28.
        freedom = min(count - 1, freedom * (1 + 3 * number / answers))
    return _Mean(point, variance, count, _t(confidence, freedom))


def _change_ends(
    changes: Floats,
    weights: Floats,
    grouped: tuple[NDArray[np.intp], int] | None,
    plain: bool,
    confidence: float,
) -> tuple[float, float]:
    gains, losses = np.maximum(changes, 0.0), np.maximum(-changes, 0.0)
    graded = np.zeros_like(changes)
    more, less = (
        _mean(side, weights, graded, grouped, plain, confidence) for side in (gains, losses)
    )
    if more.quantile == inf:
        return -1.0, 1.0
    opposed = _opposed(gains, losses, weights, grouped)
    point = more.point - less.point

    def reach(one: float, other: float) -> float:
        return sqrt(one**2 + other**2 + 2 * opposed * one * other)

    low = point - reach(more.point - more.end(0.0), less.end(1.0) - less.point)
    high = point + reach(more.end(1.0) - more.point, less.point - less.end(0.0))
    return max(low, -1.0), min(high, 1.0)


def _opposed(
    gains: Floats, losses: Floats, weights: Floats, grouped: tuple[NDArray[np.intp], int] | None
) -> float:
    """Return how much gains and losses exclude each other: minus their correlation."""
    total = weights.sum()
    one, other = (
        _sums(weights * (side - weights @ side / total), grouped) for side in (gains, losses)
    )
    scale = sqrt(float(one @ one) * float(other @ other))
    return float(-(one @ other) / scale) if scale > _SAME else 0.0


def _sums(values: Floats, grouped: tuple[NDArray[np.intp], int] | None) -> Floats:
    """Sum samples' values within their groups."""
    if grouped is None:
        return values
    return np.bincount(grouped[0], values, grouped[1]).astype(np.float64)


def _t(confidence: float, freedom: float) -> float:
    return float(stdtrit(freedom, (1 + confidence) / 2)) if freedom > 0 else inf


def _spread(
    changes: Floats, weights: Floats, grouped: tuple[NDArray[np.intp], int] | None
) -> float:
    units = _sums(weights * (changes - weights @ changes / weights.sum()), grouped)
    if len(units) < 2:
        return 0.0
    return float(units.std(ddof=1) * len(units) / weights.sum())


def _p_value(
    changes: Floats, weights: Floats, grouped: tuple[NDArray[np.intp], int] | None, binary: bool
) -> float:
    if binary:
        wins, losses = int((changes > 0).sum()), int((changes < 0).sum())
        return float(mcnemar([[0, wins], [losses, 0]], exact=True).pvalue)
    return _permutation(_sums(weights * changes, grouped))


def _permutation(changes: Floats) -> float:
    """Return the two-sided p-value of paired changes whose signs are swapped at random."""
    if len(changes) < 2 or not changes.any():
        return 1.0
    signs = _signs(len(changes))
    sums, seen = signs @ changes, changes.sum()
    slack = _SAME * np.abs(changes).sum()  # sums that are equal on paper differ by rounding
    extra = 0 if len(sums) == 2.0 ** len(changes) else 1
    tail = min((sums <= seen + slack).sum(), (sums >= seen - slack).sum())
    return min(1.0, 2 * float(tail + extra) / (len(sums) + extra))


@lru_cache(maxsize=4)
def _signs(n: int) -> Floats:
    """Return all sign flips of n changes, or random ones where there are too many."""
    if 2**n <= RESAMPLES:
        return np.where(np.arange(2**n)[:, None] >> np.arange(n) & 1, -1.0, 1.0)
    return np.random.default_rng(SEED).choice([-1.0, 1.0], (RESAMPLES, n))


def _medians(values: Sequence[float], seed: int) -> Floats:
    drawn = np.random.default_rng(seed).choice(np.array(values, float), (RESAMPLES, len(values)))
    return np.asarray(np.median(drawn, axis=1))
