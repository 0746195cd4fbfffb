"""Accuracy-against-budget curves in three figures: area, budget that keeps 95%, crossovers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations, permutations

import numpy as np
from pydantic import BaseModel, ConfigDict

from agentbench_kv.results.arms import Arm
from agentbench_kv.results.curve_shape import falls, mean_height, threshold
from agentbench_kv.results.resample import by_group, percentile_ends, resampled_sums
from agentbench_kv.results.statistics import Floats

__all__ = ["KEEP", "Crossover", "Curve", "CurveSummary", "Keeps", "Span", "curve_summary"]

KEEP = 0.95
RESAMPLES = 4000


class _Figures(BaseModel):
    model_config = ConfigDict(frozen=True)


class Span(_Figures):
    """A point with its 95% interval."""

    point: float
    low: float
    high: float


class Keeps(_Figures):
    """The smallest budget from which on a method keeps a share of full, in tokens.

    Between two measured budgets the curve is a straight line over log2(budget).

    Attributes
    ----------
    share : float
        What must be kept of full's mean score.
    point, low, high : float or None
        With the 95% interval; None means "more than the largest measured budget".
    smallest, largest : int
        The measured range: a figure that equals `smallest` means "that or less".
    """

    share: float
    point: float | None
    low: float | None
    high: float | None
    smallest: int
    largest: int

    def __str__(self) -> str:
        """Write as `820 [640, > 1024]`; an end that says no more than the point is left out."""
        point, low, high = map(self._spell, (self.point, self.low, self.high))
        return point if point == low == high else f"{point} [{low}, {high}]"

    def _spell(self, tokens: float | None) -> str:
        if tokens is None:
            return f"> {self.largest}"
        return f"<= {self.smallest}" if tokens <= self.smallest else f"{tokens:.0f}"


class Curve(_Figures):
    """One method over its budgets.

    Attributes
    ----------
    label : str
        `Arm.label` of its arms.
    budgets : list of int
        Tokens, ascending.
    scores : list of float
        Mean score at each, over the samples all arms share.
    area : Span or None
        Area over log2(budget) divided by full's: 1 is as good as full at every budget. None with a
        single budget, or where full scores 0.
    keeps : Keeps or None
        None where full scores 0.
    """

    label: str
    budgets: list[int]
    scores: list[float]
    area: Span | None
    keeps: Keeps | None


class Crossover(_Figures):
    """A budget at which two methods change places.

    Attributes
    ----------
    below, above : str
        The label that leads at smaller budgets, and the one that leads at larger ones.
    budget, low, high : float
        Tokens with the 95% interval over the resamples in which they cross this way.
    support : float
        Share of the resamples in which they do.
    """

    below: str
    above: str
    budget: float
    low: float
    high: float
    support: float


class CurveSummary(_Figures):
    """The curves of one task, model and engine.

    Attributes
    ----------
    full : float
        Mean score of full over the shared samples.
    samples : int
        Samples that every arm has.
    clusters : int or None
        Groups of samples, where the samples come in groups: they are what is resampled.
    curves : list of Curve
        In the order of the arms.
    crossovers : list of Crossover
        Of every two methods, at the budgets both have.
    left_out : list of str
        Run ids of arms that have no budget or share no sample with full.
    """

    full: float
    samples: int
    clusters: int | None
    curves: list[Curve]
    crossovers: list[Crossover]
    left_out: list[str]


Means = dict[str, dict[int, dict[str, float]]]
Columns = dict[str, tuple[list[int], list[int]]]
"""Label to budgets and to the columns of the matrix that hold them; column 0 is full."""


def curve_summary(
    full: Arm | Sequence[Arm],
    arms: Iterable[Arm],
    share: float = KEEP,
    resamples: int = RESAMPLES,
) -> CurveSummary | None:
    """Summarize every method's curve relative to full, all from the same resamples of the samples.

    Runs of one method and budget (seeds, repeats) count together, by sample means.

    Parameters
    ----------
    full : Arm or sequence of Arm
        The uncompressed arm of the same cell.
    arms : iterable of Arm
        Compressed arms of the same cell.
    share : float
        What `Curve.keeps` asks for.
    resamples : int
        Bootstrap resamples.

    Returns
    -------
    CurveSummary or None
        None if no arm shares a sample with full.
    """
    whole = _sample_means([full] if isinstance(full, Arm) else full)
    means, clusters, left_out = _collect(whole, arms)
    ids = sorted(set.intersection(set(whole), *map(set, _each(means))))
    if not means or not ids:
        return None
    matrix = np.array([[scores[name] for scores in (whole, *_each(means))] for name in ids])
    units, groups = by_group(ids, matrix, clusters)
    sums = np.vstack([units.sum(0), resampled_sums(units, resamples)])
    # Group sizes differ between draws; every figure is a ratio or a sign, so sums will do.
    columns = _columns(means)
    averages = matrix.mean(0)
    return CurveSummary(
        full=float(averages[0]),
        samples=len(ids),
        clusters=groups,
        curves=[
            _curve(label, budgets, places, averages, sums, share)
            for label, (budgets, places) in columns.items()
        ],
        crossovers=[
            crossover
            for pair in combinations(columns, 2)
            for crossover in _crossovers(pair, columns, sums)
        ],
        left_out=left_out,
    )


def _sample_means(arms: Iterable[Arm]) -> dict[str, float]:
    scores: dict[str, list[float]] = {}
    for arm in arms:
        for name, values in arm.scores.items():
            scores.setdefault(name, []).extend(values)
    return {name: float(np.mean(values)) for name, values in scores.items()}


def _collect(
    whole: dict[str, float], arms: Iterable[Arm]
) -> tuple[Means, dict[str, str], list[str]]:
    """Group the arms by label and budget; ids of those that cannot be placed come last."""
    grouped: dict[str, dict[int | str | None, list[Arm]]] = {}
    clusters: dict[str, str] = {}
    left_out: list[str] = []
    for arm in arms:
        if arm.tokens is None or arm.tokens < 1 or not whole.keys() & arm.scores.keys():
            left_out.append(arm.run_id)
            continue
        clusters |= arm.clusters
        grouped.setdefault(arm.label, {}).setdefault(arm.budget, []).append(arm)
    means = {label: _by_tokens(budgets.values()) for label, budgets in grouped.items()}
    return means, clusters, left_out


def _by_tokens(groups: Iterable[list[Arm]]) -> dict[int, dict[str, float]]:
    """Average the runs of each budget; a share is as many tokens as in the median run."""
    places: dict[int, list[Arm]] = {}
    for same in groups:
        tokens = round(float(np.median([arm.tokens or 0 for arm in same])))
        places.setdefault(tokens, []).extend(same)
    return {tokens: _sample_means(same) for tokens, same in sorted(places.items())}


def _each(means: Means) -> list[dict[str, float]]:
    return [scores for budgets in means.values() for scores in budgets.values()]


def _columns(means: Means) -> Columns:
    columns: Columns = {}
    start = 1
    for label, budgets in means.items():
        columns[label] = (list(budgets), list(range(start, start + len(budgets))))
        start += len(budgets)
    return columns


def _curve(
    label: str,
    budgets: list[int],
    places: list[int],
    averages: Floats,
    sums: Floats,
    share: float,
) -> Curve:
    x = np.log2(np.array(budgets, dtype=np.float64))
    known = averages[0] > 0
    return Curve(
        label=label,
        budgets=budgets,
        scores=[float(averages[place]) for place in places],
        area=_area(x, sums[:, places], sums[:, 0]) if known and len(budgets) > 1 else None,
        keeps=_keeps(budgets, x, sums[:, places], sums[:, 0], share) if known else None,
    )


def _area(x: Floats, own: Floats, full: Floats) -> Span:
    with np.errstate(invalid="ignore", divide="ignore"):
        areas = mean_height(x, own) / full
    low, high = percentile_ends(areas[1:])
    return Span(point=float(areas[0]), low=low, high=high)


def _keeps(budgets: list[int], x: Floats, own: Floats, full: Floats, share: float) -> Keeps:
    # A hair of slack: a curve that touches the line must not fail it by rounding.
    found = threshold(x, own - (share - 1e-12) * full[:, None])
    ends = (found[0], *percentile_ends(found[1:]))
    point, low, high = (None if np.isinf(end) else float(2.0**end) for end in ends)
    return Keeps(
        share=share, point=point, low=low, high=high, smallest=budgets[0], largest=budgets[-1]
    )


def _crossovers(pair: Sequence[str], columns: Columns, sums: Floats) -> list[Crossover]:
    found = [
        crossover
        for below, above in permutations(pair)
        for crossover in _overtakings(below, above, columns, sums)
    ]
    return sorted(found, key=lambda crossover: crossover.budget)


def _overtakings(below: str, above: str, columns: Columns, sums: Floats) -> list[Crossover]:
    """Return where `above` overtakes `below` as the budget grows."""
    first, second = (dict(zip(*columns[label], strict=True)) for label in (below, above))
    shared = sorted(first.keys() & second.keys())
    if len(shared) < 2:
        return []
    x = np.log2(np.array(shared, dtype=np.float64))
    lead, other = (sums[:, [own[budget] for budget in shared]] for own in (first, second))
    places = falls(x, lead - other)
    return [
        _crossover(below, above, float(point), places[1:])
        for point in places[0]
        if not np.isnan(point)
    ]


def _crossover(below: str, above: str, point: float, drawn: Floats) -> Crossover:
    distance = np.where(np.isnan(drawn), np.inf, np.abs(drawn - point))
    nearest = np.take_along_axis(drawn, distance.argmin(-1)[:, None], -1)[:, 0]
    low, high = percentile_ends(nearest)
    return Crossover(
        below=below,
        above=above,
        budget=float(2.0**point),
        low=float(2.0**low),
        high=float(2.0**high),
        support=float((~np.isnan(nearest)).mean()),
    )
