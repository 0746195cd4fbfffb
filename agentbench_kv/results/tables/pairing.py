"""Many intervals and paired differences from one draw: the figures of `statistics` and `paired`.

A report compares hundreds of pairs; drawing the resamples once for all of equal size and summing
with a matrix product gives the same ends as one call of `paired_difference` each, in seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Self

import numpy as np
from scipy.special import ndtr, ndtri

from agentbench_kv.results.paired import Difference, mcnemar_p
from agentbench_kv.results.resample import by_group, percentile_ends, resampled_sums, unseen_change
from agentbench_kv.results.statistics import (
    ANALYSIS_SEED,
    LEVEL,
    RESAMPLES,
    Floats,
    Interval,
    steady_ends,
    wilson,
)

__all__ = ["Scores", "Span", "differences", "intervals", "spans"]

# Drawn indices held at once: with the counts made of them about 60 MB.
_BATCH_ITEMS = 2_000_000
_STACK = 256
_CONSTANT = 1e-12


@dataclass(frozen=True)
class Scores:
    """One arm, sample by sample.

    Attributes
    ----------
    parts : mapping of str to (float, float)
        Right and asked; a score is its mean over the trials out of 1.
    graded : frozenset of str
        Samples with anything but one trial that is right or wrong.
    clusters : mapping of str to str
        Group of each sample that belongs to one.
    ratio : bool
        Whether asked differs between samples.
    """

    parts: Mapping[str, tuple[float, float]]
    graded: frozenset[str] = frozenset()
    clusters: Mapping[str, str] = field(default_factory=dict)
    ratio: bool = False

    @classmethod
    def of_trials(
        cls, scores: Mapping[str, Sequence[float]], clusters: Mapping[str, str] | None = None
    ) -> Self:
        """Take headline scores of each sample's trials."""
        return cls(
            {name: (sum(values) / len(values), 1.0) for name, values in scores.items()},
            frozenset(name for name, values in scores.items() if list(values) not in ([0], [1])),
            clusters or {},
        )

    @property
    def mean(self) -> float:
        """Sum of right over sum of asked."""
        right, asked = np.sum(list(self.parts.values()), axis=0)
        return float(right / asked)

    @property
    def groups(self) -> int | None:
        """Groups the samples fall into, which are what is resampled; None if all stand alone."""
        number = len({self.clusters.get(name, name) for name in self.parts})
        return number if number < len(self.parts) else None

    def only(self, samples: set[str]) -> Scores:
        """Return the same for some samples."""
        parts = {name: part for name, part in self.parts.items() if name in samples}
        return Scores(parts, self.graded & samples, self.clusters, self.ratio)


@dataclass(frozen=True)
class Span:
    """A difference with the ends of its 95% interval, over `n` shared samples."""

    point: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class _Units:
    """What is resampled: (units, 4) sums of right and asked of one side and of the other."""

    sums: Floats
    n: int
    groups: int | None
    binary: bool
    ratio: bool


def intervals(arms: Sequence[Scores]) -> list[Interval]:
    """Return the interval of each arm, as `statistics.interval` and `ratio_interval` would.

    Raises
    ------
    ValueError
        If an arm has no sample.
    """
    units = [_alone(arm) for arm in arms]
    drawn = [i for i, unit in enumerate(units) if not unit.binary and not _constant(unit)]
    ends = dict(zip(drawn, _ends([units[i].sums for i in drawn]), strict=True))
    return [_interval(unit, ends.get(i)) for i, unit in enumerate(units)]


def differences(pairs: Sequence[tuple[Scores, Scores]]) -> list[Difference | None]:
    """Return first minus second of each pair, as `paired.paired_difference` would.

    None for a pair that shares no sample.
    """
    both = [_together(a, b) for a, b in pairs]
    units = [unit for unit in both if unit is not None]
    ends, p_values = _change_ends([unit.sums for unit in units]), _p_values(units)
    found = iter(map(_difference, units, ends, p_values))
    return [None if unit is None else next(found) for unit in both]


def spans(pairs: Sequence[tuple[Scores, Scores]]) -> list[Span | None]:
    """Return the intervals of `differences` without their tests, which take longer."""
    both = [_together(a, b) for a, b in pairs]
    units = [unit for unit in both if unit is not None]
    found = iter(
        Span(float(_gap(*unit.sums.sum(0))), *ends, unit.n)
        for unit, ends in zip(units, _change_ends([unit.sums for unit in units]), strict=True)
    )
    return [None if unit is None else next(found) for unit in both]


def _alone(arm: Scores) -> _Units:
    if not arm.parts:
        raise ValueError("no scores to take an interval of")
    ids = sorted(arm.parts)
    columns = np.array([(*arm.parts[name], 0.0, 1.0) for name in ids])
    sums, groups = by_group(ids, columns, arm.clusters)
    return _Units(sums, len(ids), groups, not arm.ratio and not arm.graded and not groups, False)


def _together(a: Scores, b: Scores) -> _Units | None:
    shared = a.parts.keys() & b.parts.keys()
    ids = sorted(name for name in shared if a.parts[name][1] > 0 and b.parts[name][1] > 0)
    if not ids:
        return None
    columns = np.array([(*a.parts[name], *b.parts[name]) for name in ids])
    sums, groups = by_group(ids, columns, a.clusters)
    ratio = a.ratio or b.ratio
    binary = not ratio and not groups and (a.graded | b.graded).isdisjoint(ids)
    return _Units(sums, len(ids), groups, binary, ratio)


def _interval(unit: _Units, ends: tuple[float, float] | None) -> Interval:
    right, asked = unit.sums[:, 0].sum(), unit.sums[:, 1].sum()
    point, number = float(right / asked), len(unit.sums)
    if ends is not None and np.isfinite(ends).all():
        drawn: Literal["cluster_bca", "bca"] = "cluster_bca" if unit.groups else "bca"
        return Interval(point=point, low=ends[0], high=ends[1], method=drawn, n=number)
    low, high = wilson(min(point, 1.0) * number, number)
    exact: Literal["wilson", "wilson_samples"] = "wilson" if unit.binary else "wilson_samples"
    return Interval(point=point, low=low, high=high, method=exact, n=number)


def _difference(unit: _Units, ends: tuple[float, float], p_value: float) -> Difference:
    return Difference(
        point=float(_gap(*unit.sums.sum(0))),
        low=ends[0],
        high=ends[1],
        p_value=p_value,
        test="mcnemar" if unit.binary else "permutation",
        n=unit.n,
        clusters=unit.groups,
    )


def _gap(a: Floats, a_of: Floats, b: Floats, b_of: Floats) -> Floats:
    return a / a_of - b / b_of


def _constant(unit: _Units) -> bool:
    return bool(np.ptp(unit.sums[:, 0] / unit.sums[:, 1]) < _CONSTANT)


def _ends(units: Sequence[Floats]) -> list[tuple[float, float]]:
    """Return BCa ends of the level of each (units, 4) array, whose other side is 0."""
    return _in_stacks(units, _bca)


def _change_ends(units: Sequence[Floats]) -> list[tuple[float, float]]:
    """Return what `resample.change_ends` gives for each (units, 4) array."""
    return _in_stacks(units, _changes)


def _in_stacks(
    units: Sequence[Floats], ends_of: Callable[[Floats], list[tuple[float, float]]]
) -> list[tuple[float, float]]:
    """Draw once for all arrays of the same length, some hundred at a time."""
    found: dict[int, tuple[float, float]] = {}
    for places in _by_length(units):
        stack = np.stack([units[i] for i in places], axis=-1)
        with np.errstate(all="ignore"):
            found |= dict(zip(places, ends_of(stack), strict=True))
    return [found[i] for i in range(len(units))]


def _by_length(arrays: Sequence[Floats]) -> Iterator[list[int]]:
    places: dict[int, list[int]] = {}
    for i, array in enumerate(arrays):
        places.setdefault(len(array), []).append(i)
    for same in places.values():
        yield from (same[at : at + _STACK] for at in range(0, len(same), _STACK))


def _bca(stack: Floats) -> list[tuple[float, float]]:
    """Return the ends for each column of a (units, 4, columns) array."""
    totals = stack.sum(0)
    point = _gap(*totals)
    drawn = np.concatenate([_gap(*sums) for sums in _resampled(stack)]).T.copy()
    left_out = _gap(*np.moveaxis(totals - stack, 1, 0))
    return [_column(point[k], drawn[k], left_out[:, k]) for k in range(stack.shape[2])]


def _changes(stack: Floats) -> list[tuple[float, float]]:
    """Return the ends for each column of a (units, 4, columns) array."""
    changes = _gap(*np.moveaxis(stack, 1, 0))
    weights = stack[:, [1, 3]].mean((0, 1))
    half, nothing = unseen_change(changes) * weights, np.zeros_like(weights)
    more = [np.stack([change, weights, nothing, weights]) for change in (half, -half)]
    flat = np.concatenate([stack, np.stack(more)]).reshape(len(stack) + 2, -1)
    sums = resampled_sums(flat, RESAMPLES).reshape(RESAMPLES, 4, -1)
    drawn = np.clip(_gap(*np.moveaxis(sums, 1, 0)), -1.0, 1.0)
    steady = np.ptp(changes, axis=0) < _CONSTANT
    return [
        steady_ends(float(changes[0, k]), len(stack)) if steady[k] else percentile_ends(drawn[:, k])
        for k in range(stack.shape[2])
    ]


def _resampled(stack: Floats) -> Iterator[Floats]:
    """Draw the units with replacement; sums as (4, resamples of a batch, columns)."""
    number = len(stack)
    rng = np.random.default_rng(ANALYSIS_SEED)
    batch = max(1, _BATCH_ITEMS // number)
    flat = stack.reshape(number, -1)
    for start in range(0, RESAMPLES, batch):
        rows = min(batch, RESAMPLES - start)
        picked = rng.integers(0, number, (rows, number)) + number * np.arange(rows)[:, None]
        counts = np.bincount(picked.ravel(), minlength=rows * number).reshape(rows, number)
        sums = counts.astype(np.float64) @ flat
        yield np.moveaxis(sums.reshape(rows, *stack.shape[1:]), 1, 0)


def _column(point: float, drawn: Floats, left_out: Floats) -> tuple[float, float]:
    """Efron's bias-corrected and accelerated ends; plain percentiles where they do not exist."""
    below = ((drawn < point).mean() + (drawn <= point).mean()) / 2
    spread = left_out.mean() - left_out
    acceleration = (spread**3).sum() / (spread**2).sum() ** 1.5 / 6
    bias, tail = ndtri(below), (1 - LEVEL) / 2
    shifted = bias + ndtri([tail, 1 - tail])
    places = ndtr(bias + shifted / (1 - acceleration * shifted))
    places = places if np.isfinite(places).all() else [tail, 1 - tail]
    low, high = np.quantile(drawn, places)
    return float(low), float(high)


def _p_values(units: Sequence[_Units]) -> list[float]:
    binary = {i: mcnemar_p(u.sums[:, 0], u.sums[:, 2]) for i, u in enumerate(units) if u.binary}
    graded = [i for i in range(len(units)) if i not in binary]
    gaps = [_unit_gaps(units[i]) for i in graded]
    found = binary | dict(zip(graded, _permuted(gaps), strict=True))
    return [found[i] for i in range(len(units))]


def _unit_gaps(unit: _Units) -> Floats:
    return _gap(*unit.sums.T) if unit.ratio else unit.sums[:, 0] - unit.sums[:, 2]


def _permuted(gaps: Sequence[Floats]) -> list[float]:
    """Return two-sided p-values of paired differences whose signs are swapped at random."""
    found: dict[int, float] = {}
    for places in _by_length(gaps):
        stack = np.stack([gaps[i] for i in places], axis=-1)
        found |= dict(zip(places, _swapped(stack), strict=True))
    return [found[i] for i in range(len(gaps))]


def _swapped(stack: Floats) -> list[float]:
    """Return one p-value for each column of (units, columns) differences."""
    number = len(stack)
    exact = 2**number <= RESAMPLES
    sums = np.concatenate([signs @ stack for signs in _signs(number, exact)])
    seen = stack.sum(0)
    # Sums that are equal on paper differ by rounding, which grows with their terms.
    slack = 1e-12 * np.abs(stack).sum(0)
    lower, upper = (sums <= seen + slack).sum(0), (sums >= seen - slack).sum(0)
    extra = 0 if exact else 1
    p = 2 * (np.minimum(lower, upper) + extra) / (len(sums) + extra)
    return [float(value) for value in np.minimum(p, 1.0)]


def _signs(number: int, exact: bool) -> Iterator[Floats]:
    if exact:
        bits = np.arange(2**number)[:, None] >> np.arange(number)
        yield np.where(bits & 1, -1.0, 1.0)
        return
    rng = np.random.default_rng(ANALYSIS_SEED)
    batch = max(1, _BATCH_ITEMS // number)
    for start in range(0, RESAMPLES, batch):
        rows = min(batch, RESAMPLES - start)
        yield np.where(rng.integers(0, 2, (rows, number)), -1.0, 1.0)
