"""Accuracy-against-budget curves in three figures: area, budget that keeps 95%, crossovers.

All of a board's curves come from the same resamples of its samples, or of their groups. In arrays
the last axis is the budgets, ascending, as log2 of tokens; axes before it are resamples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations, permutations, starmap
from operator import attrgetter

import numpy as np
from scipy.integrate import trapezoid

from agentbench_kv.results.stats import Floats, Scores, draws, ends

KEEP = 0.95
_BUDGET = attrgetter("budget")
RESAMPLES = 4000


@dataclass(frozen=True)
class Point:
    """A method's scores at one budget."""

    label: str
    tokens: int
    scores: Scores
    lossless: bool = True  # whether it is full wherever nothing leaves: not with quantised rows
    evicted: bool = False  # whether most of its sessions had an event, and so were longer


@dataclass(frozen=True)
class Estimate:
    """A point with its 95% interval."""

    point: float
    low: float
    high: float


@dataclass(frozen=True)
class Keeps:
    """The smallest budget from which on a method keeps a share of full, in tokens.

    None means "more than the largest measured budget"; a figure that equals `smallest` means "that
    or less".
    """

    point: float | None
    low: float | None
    high: float | None
    smallest: int  # of the measured budgets
    largest: int

    def __str__(self) -> str:
        """Write as `820 [640, 1300]`; an end that says no more than the point is left out."""
        point, low, high = map(self._spell, (self.point, self.low, self.high))
        return point if point == low == high else f"{point} [{low}, {high}]"

    def _spell(self, tokens: float | None) -> str:
        if tokens is None:
            return f"> {self.largest}"
        return f"<= {self.smallest}" if tokens <= self.smallest else f"{tokens:.0f}"


@dataclass(frozen=True)
class Curve:
    """One method over its budgets."""

    label: str
    budgets: list[int]  # tokens, ascending
    scores: list[float]  # mean at each
    area: Estimate | None  # relative to full's; None with a single budget, or where full scores 0
    keeps: Keeps | None  # None where full scores 0


@dataclass(frozen=True)
class Crossover:
    """A budget at which two methods change places."""

    below: str  # leads at smaller budgets
    above: str  # leads at larger ones
    budget: float  # tokens
    low: float  # 95% interval over the resamples in which they cross this way
    high: float
    support: float  # share of the resamples in which they do


@dataclass(frozen=True)
class CurveSummary:
    """The curves of one board: full's mean, samples, groups of them, curves, crossovers."""

    full: float
    samples: int
    groups: int | None
    curves: list[Curve]
    crossovers: list[Crossover]


@dataclass(frozen=True)
class _Drawn:  # a method's curve in the data (first row) and in every resample
    label: str
    budgets: list[int]
    heights: Floats  # (1 + resamples, budgets)
    ample: Mapping[float, Floats]  # what full scores, at budgets so large that nothing is evicted


def curve_summary(
    full: Scores,
    points: Sequence[Point],
    lengths: Mapping[str, float],
    share: float = KEEP,
    resamples: int = RESAMPLES,
) -> CurveSummary | None:
    """Summarize every method's curve relative to full over the samples that all have, if any.

    Points of one method at one budget count by their mean. `lengths` are the tokens of each
    sample's session that keeps everything, where known: a budget as large as the longest is taken
    to lose nothing, unless it was measured and most sessions had events all the same. `share` of
    full is what `Curve.keeps` asks for.
    """
    ids = sorted(set(full.parts).intersection(*(point.scores.parts for point in points)))
    if not points or not ids:
        return None
    known = np.array([lengths.get(name, np.inf) for name in ids])
    labels = dict.fromkeys(point.label for point in points)
    columns = {label: _columns(label, points, ids) for label in labels}
    whole = _column(full, ids)
    resample = _Resample(full, ids, resamples)
    base = resample(whole)
    drawn = [
        _Drawn(label, list(own), _heights(own, resample), _ample(label, points, known, base))
        for label, own in columns.items()
    ]
    curves = []
    for each in drawn:
        scores = [float(height / len(ids)) for height in each.heights[0]]
        area = _area(each, base) if base[0] > 0 and len(each.budgets) > 1 else None
        keeps = _keeps(each, base, share) if base[0] > 0 else None
        curves.append(Curve(each.label, each.budgets, scores, area, keeps))
    crossovers = [
        crossover
        for pair in combinations(drawn, 2)
        for crossover in sorted(chain(*starmap(_overtakings, permutations(pair))), key=_BUDGET)
    ]
    return CurveSummary(float(whole.mean()), len(ids), resample.groups, curves, crossovers)


def smallest_budget(
    points: Mapping[int, Mapping[str, tuple[float, float]]],
    limit: float,
    groups: Mapping[str, str] | None = None,
    resamples: int = RESAMPLES,
) -> Keeps | None:
    """Return from which budget on a mean without bounds is at most `limit`; less is better.

    `points` are total and count of each sample at every budget; only samples that all have count.
    None if there are none.
    """
    budgets = sorted(points)
    ids = sorted(set.intersection(*(set(points[budget]) for budget in budgets)))
    if not ids:
        return None
    resample = _Resample(Scores({}, groups=groups or {}), ids, resamples)
    heights = []
    for budget in budgets:
        total, count = np.array([points[budget][name] for name in ids]).T
        heights.append(resample(total) / np.maximum(resample(count), 1e-300))
    below = limit - np.stack(heights, axis=-1)
    return _kept(budgets, threshold(np.log2(np.array(budgets, np.float64)), rising(below) + 1e-12))


class _Resample:
    """Sums of a column of samples: in the data, then in every resample of samples or groups."""

    def __init__(self, full: Scores, ids: Sequence[str], resamples: int) -> None:
        grouped = full.group_of(ids)
        self.groups = grouped[1] if grouped else None
        self._numbers = grouped[0] if grouped else np.arange(len(ids))
        self._units = self.groups or len(ids)
        self._resamples = resamples

    def __call__(self, column: Floats) -> Floats:
        # Every figure is a ratio or a sign, so sums will do, although groups differ in size.
        units = np.bincount(self._numbers, column, self._units)
        return np.concatenate([[units.sum()], draws(self._units, self._resamples) @ units])


def _column(scores: Scores, ids: Sequence[str]) -> Floats:
    return np.array([scores.parts[name][0] / scores.parts[name][1] for name in ids])


def _columns(label: str, points: Sequence[Point], ids: Sequence[str]) -> dict[int, Floats]:
    same: dict[int, list[Floats]] = {}
    for point in points:
        if point.label == label:
            same.setdefault(point.tokens, []).append(_column(point.scores, ids))
    return {tokens: np.mean(same[tokens], axis=0) for tokens in sorted(same)}


def _heights(columns: dict[int, Floats], resample: _Resample) -> Floats:
    return np.stack([resample(column) for column in columns.values()], axis=-1)


def _ample(
    label: str, points: Sequence[Point], lengths: Floats, full: Floats
) -> dict[float, Floats]:
    """Return full's score for a method's budgets that hold the longest session, or for one more."""
    own = [point for point in points if point.label == label]
    known = lengths[np.isfinite(lengths)]
    if not len(known) or not all(point.lossless for point in own):
        return {}
    longest = float(known.max())
    large = [point for point in own if point.tokens >= longest]
    held = [float(point.tokens) for point in large if not point.evicted]
    return dict.fromkeys(held if large else [longest], full)


def _area(drawn: _Drawn, full: Floats) -> Estimate:
    x = np.log2(np.array(drawn.budgets, dtype=np.float64))
    with np.errstate(invalid="ignore", divide="ignore"):
        areas = mean_height(x, drawn.heights) / full
    return Estimate(float(areas[0]), *ends(areas[1:]))


def _keeps(drawn: _Drawn, full: Floats, share: float) -> Keeps:
    every = dict(zip(map(float, drawn.budgets), drawn.heights.T, strict=True))
    every |= drawn.ample
    x = np.log2(np.array(list(every), dtype=np.float64))
    heights = rising(np.stack(list(every.values()), axis=-1))
    # A hair of slack: a curve that touches the line must not fail it by rounding.
    return _kept(drawn.budgets, threshold(x, heights - (share - 1e-12) * full[:, None]))


def _kept(budgets: Sequence[int], found: Floats) -> Keeps:
    """Return a threshold in log2 of tokens, in the data and in the resamples, as budgets."""
    point, low, high = (
        None if np.isinf(end) else float(2.0**end) for end in (found[0], *ends(found[1:]))
    )
    return Keeps(point, low, high, smallest=budgets[0], largest=budgets[-1])


def _overtakings(below: _Drawn, above: _Drawn) -> list[Crossover]:
    """Return where `above` overtakes `below` as the budget grows."""
    shared = sorted(set(below.budgets) & set(above.budgets))
    if len(shared) < 2:
        return []
    lead, other = (
        each.heights[:, [each.budgets.index(budget) for budget in shared]]
        for each in (below, above)
    )
    places = falls(np.log2(np.array(shared, dtype=np.float64)), lead - other)
    return [
        _crossover(below.label, above.label, float(point), places[1:])
        for point in places[0]
        if not np.isnan(point)
    ]


def _crossover(below: str, above: str, point: float, drawn: Floats) -> Crossover:
    distance = np.where(np.isnan(drawn), np.inf, np.abs(drawn - point))
    nearest = np.take_along_axis(drawn, distance.argmin(-1)[:, None], -1)[:, 0]
    budget, low, high = (float(2.0**end) for end in (point, *ends(nearest)))
    return Crossover(below, above, budget, low, high, float((~np.isnan(nearest)).mean()))


def mean_height(x: Floats, y: Floats) -> Floats:
    """Return the area under each (..., budgets) curve over the width of its two or more budgets."""
    area: Floats = trapezoid(y, x, axis=-1) / (x[-1] - x[0])
    return area


def rising(y: Floats) -> Floats:
    """Return the closest curves that never fall: least squares, by the min-max formula."""
    # What pooling adjacent violators gives (Robertson, Wright, Dykstra 1988, theorem 1.4.4).
    number = y.shape[-1]
    sums = np.concatenate([np.zeros((*y.shape[:-1], 1)), y.cumsum(-1)], axis=-1)
    found = np.full(y.shape, -np.inf)
    for i in range(number):
        means = (sums[..., i + 1 :] - sums[..., i : i + 1]) / np.arange(1, number - i + 1)
        least = np.flip(np.minimum.accumulate(np.flip(means, -1), -1), -1)
        found[..., i:] = np.maximum(found[..., i:], least)
    return found


def threshold(x: Floats, above: Floats) -> Floats:
    """Return where each curve that never falls rises to 0; between two budgets it is straight."""
    # The first budget if it is never below, infinity if it ends below.
    last = len(x) - 1
    first = (above < 0).sum(-1)
    right = np.clip(first, min(1, last), last)
    left = np.maximum(right - 1, 0)
    low, high = (np.take_along_axis(above, index[..., None], -1)[..., 0] for index in (left, right))
    with np.errstate(invalid="ignore", divide="ignore"):
        between = x[left] - low / (high - low) * (x[right] - x[left])
    return np.where(first > last, np.inf, np.where(first == 0, x[0], between))


def falls(x: Floats, gap: Floats) -> Floats:
    """Return where each curve goes from above 0 to below 0 between two budgets, else NaN.

    `gap` is one method minus another, (..., budgets); the result has one budget less. A budget at
    which both are equal is no change by itself.
    """
    sign = np.sign(gap)
    for i in range(1, len(x)):
        sign[..., i] = np.where(sign[..., i] == 0, sign[..., i - 1], sign[..., i])
    low, high = gap[..., :-1], gap[..., 1:]
    with np.errstate(invalid="ignore", divide="ignore"):
        place = x[:-1] - low / (high - low) * np.diff(x)
    return np.where((sign[..., :-1] > 0) & (sign[..., 1:] < 0), place, np.nan)
