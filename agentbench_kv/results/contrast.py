"""One row of a comparison: a metric, a base, a candidate, a change with its verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from agentbench_kv.errors import UsageError
from agentbench_kv.results.flips import Flip, flips
from agentbench_kv.results.gate import Rule, Verdict, units_to_decide
from agentbench_kv.results.groups import RunGroup, asked_once
from agentbench_kv.results.stats import (
    LEVEL,
    REPETITIONS,
    Change,
    Scores,
    SpeedChange,
    change,
    paired_ends,
    pass_k,
    size_change,
    speed_change,
)

SPEED, PEAK = "output_tok_s", "peak_live"


@dataclass(frozen=True)
class Pair:
    """Runs of one method on each side of one task and model."""

    task: str
    model: str
    base: RunGroup
    cand: RunGroup


class Contrast(BaseModel):
    """Candidate against base.

    Attributes
    ----------
    tasks : list of str
    model : str
    base, cand : str
        Method with its budget.
    unit : str
        `points` (scores, shares of 1 here) or `percent` (relative change).
    base_level, cand_level : float
        Mean score, mean peak live tokens, or median tokens per second.
    point : float
        Candidate minus base, relative to the base for sizes and speed.
    low, high : float or None
        Its 95% interval; None with too few repetitions for one.
    p_value, p_adjusted, test : float, float, str
        Two-sided; Holm's over the rows of the comparison.
    n, counted : int, str
        What the figures rest on: shared `samples`, or `repetitions` of the side with fewer.
    clusters : int or None
        Groups of samples, if there are groups: they are what is independent.
    only_base, only_cand : int
        Samples that the other side lacks; left out.
    more, less : int
        Samples whose figure rose and fell.
    needed, needed_of : int or None, str
        How many `samples`, `groups` or `repetitions` would decide; None if decided, or if the
        change lies on a limit.
    flips : list of Flip
        Samples that changed, if they were asked for.
    """

    model_config = ConfigDict(frozen=True)

    tasks: list[str]
    model: str
    base: str
    cand: str
    metric: str
    unit: Literal["points", "percent"]
    base_level: float
    cand_level: float
    point: float
    low: float | None
    high: float | None
    p_value: float
    p_adjusted: float
    test: str
    n: int
    counted: str
    clusters: int | None = None
    only_base: int = 0
    only_cand: int = 0
    more: int = 0
    less: int = 0
    verdict: Verdict
    needed: int | None
    needed_of: str
    notes: list[str] = []
    flips: list[Flip] = []


def contrast(pairs: Sequence[Pair], metric: str, rule: Rule, listed: int = 0) -> Contrast:
    """Compare the pairs of one method with one base, over the samples of all their tasks.

    Parameters
    ----------
    pairs : sequence of Pair
        One a task; one only for speed.
    metric : str
    rule : Rule
    listed : int
        How many changed samples to list.

    Raises
    ------
    UsageError
        If the runs do not have the metric or share no sample.
    """
    if metric == SPEED:
        return _of_speed(pairs[0], rule)
    base, cand = _sides(pairs, metric)
    seen, sure = (_change(metric, cand, base, 1 - left) for left in (1 - LEVEL, rule.alarm))
    if seen is None or sure is None:
        raise UsageError(f"{_ids(pairs)} share no sample; run both with the same seed and samples")
    moved = {
        name: cand.parts[name][0] / cand.parts[name][1] - right / asked
        for name, (right, asked) in base.parts.items()
        if name in cand.parts
    }
    verdict, needed = _judged(metric, rule, seen, sure)
    return Contrast(
        **_names(pairs),
        metric=metric,
        unit="percent" if metric == PEAK else "points",
        base_level=seen.base,
        cand_level=seen.cand,
        point=seen.point,
        low=seen.low,
        high=seen.high,
        p_value=seen.p_value,
        p_adjusted=seen.p_value,
        test=seen.test,
        n=seen.n,
        counted="samples",
        clusters=seen.groups,
        only_base=len(base.parts.keys() - cand.parts.keys()),
        only_cand=len(cand.parts.keys() - base.parts.keys()),
        more=sum(move > 0 for move in moved.values()),
        less=sum(move < 0 for move in moved.values()),
        verdict=verdict,
        needed=needed,
        needed_of="samples" if seen.groups is None else "groups",
        notes=_group_notes(rule, seen) if metric != PEAK else [],
        flips=flips(pairs, base.parts, cand.parts, moved, listed) if listed else [],
    )


def _sides(pairs: Sequence[Pair], metric: str) -> tuple[Scores, Scores]:
    """Return the figures of both sides by `number of the pair/sample`."""
    found: list[tuple[Scores | None, Scores | None]] = []
    for pair in pairs:
        asked = asked_once((pair.base, pair.cand), metric)
        base, cand = (
            _sizes(group) if metric == PEAK else group.scores(metric, asked)
            for group in (pair.base, pair.cand)
        )
        found.append((base, cand))
    base, cand = (_pooled([each[i] for each in found]) for i in (0, 1))
    if not base.parts or not cand.parts:
        raise UsageError(_lacking(pairs, metric))
    return base, cand


def _sizes(group: RunGroup) -> Scores:
    """Return each sample's mean peak, over the trials that reached the engine."""
    peaks: dict[str, list[int]] = {}
    for run in group.runs:
        for sample, values in run.trials.peaks.items():
            peaks.setdefault(sample, []).extend(values)
    return Scores({name: (fmean(each), 1.0) for name, each in peaks.items()}, {}, group.clusters)


def _pooled(sides: Sequence[Scores | None]) -> Scores:
    known = [(i, side) for i, side in enumerate(sides) if side is not None]
    return Scores(
        {f"{i}/{name}": pair for i, side in known for name, pair in side.parts.items()},
        {f"{i}/{name}": items for i, side in known for name, items in side.items.items()},
        {f"{i}/{name}": f"{i}/{group}" for i, side in known for name, group in side.groups.items()},
    )


def _lacking(pairs: Sequence[Pair], metric: str) -> str:
    k = pass_k(metric)
    if metric == "score":
        return f"{_ids(pairs)}: one side has no score"
    if metric == PEAK:
        return f"no trial of one side reached the engine, so there is no {metric}"
    if k is not None:
        return f"no sample of one side has {k} trials; run it with --trials {k} or more"
    runs = (run for pair in pairs for group in (pair.base, pair.cand) for run in group.runs)
    known = sorted({name for run in runs for name in run.trials.counts})
    return (
        f"the records have no sub-score {metric!r}; "
        f"known: {', '.join(['score', 'pass^k', PEAK, SPEED, *known])}"
    )


def _change(metric: str, cand: Scores, base: Scores, confidence: float) -> Change | None:
    if metric != PEAK:
        return change(cand, base, confidence)
    mine, theirs = ({name: size for name, (size, _) in side.parts.items()} for side in (cand, base))
    return size_change(mine, theirs, {**base.groups, **cand.groups}, confidence)


def _judged(metric: str, rule: Rule, seen: Change, sure: Change) -> tuple[Verdict, int | None]:
    """Return the verdict, and how many units would decide if it is open."""
    point, low, high = seen.point, seen.low, sure.high
    if metric == PEAK:  # less is better
        point, low, high = -point, -seen.high, -sure.low
        if seen.units < REPETITIONS:  # sizes have no bound that would widen so few equal ones
            return Verdict.INCONCLUSIVE, REPETITIONS
    verdict = rule.judge(low, high)
    if verdict is not Verdict.INCONCLUSIVE:
        return verdict, None
    return verdict, units_to_decide(rule, point, seen.spread, seen.units)


def _group_notes(rule: Rule, seen: Change) -> list[str]:
    """Say what so few groups leave open: one that is lost as a whole need not be among them."""
    if seen.groups is None:
        return []
    hidden = paired_ends(np.zeros(seen.groups))[1]
    if hidden <= rule.catch:
        return []
    return [
        f"{seen.groups} groups cannot rule out that {100 * hidden:.0f}% of all groups are lost "
        "whole, if none of these was"
    ]


def _of_speed(pair: Pair, rule: Rule) -> Contrast:
    base, cand = (_rates(group) for group in (pair.base, pair.cand))
    if not base or not cand:
        raise UsageError(f"{_ids([pair])}: no run of one side generated anything in measured time")
    found = speed_change(base, cand)
    verdict = rule.judge(found.low, found.high) if found.enough else Verdict.INCONCLUSIVE
    if verdict is Verdict.REGRESSION and not _slower(base, cand, rule):
        verdict = Verdict.INCONCLUSIVE
    return Contrast(
        **_names([pair]),
        metric=SPEED,
        unit="percent",
        base_level=found.base.point,
        cand_level=found.cand.point,
        point=found.point,
        low=found.low if found.enough else None,
        high=found.high if found.enough else None,
        p_value=found.p_value,
        p_adjusted=found.p_value,
        test="mannwhitney",
        n=min(len(base), len(cand)),
        counted="repetitions",
        verdict=verdict,
        needed=_repetitions(found, rule) if verdict is Verdict.INCONCLUSIVE else None,
        needed_of="repetitions",
        notes=_order_notes(pair),
    )


def _slower(base: Sequence[float], cand: Sequence[float], rule: Rule) -> bool:
    """Tell whether Mann-Whitney finds the candidate slower than the base less the margin."""
    allowed = speed_change([(1 - rule.margin) * rate for rate in base], cand)
    return allowed.point < 0 and allowed.p_value <= rule.alarm


def _rates(group: RunGroup) -> list[float]:
    """Return generated tokens per active second of each run; a copy of a run is no repetition."""
    runs = {(run.run_id, run.info.created): run.summary.tokens_per_s for run in group.runs}
    return [rate for rate in runs.values() if rate]


def _repetitions(found: SpeedChange, rule: Rule) -> int | None:
    if not found.enough:
        return REPETITIONS
    number = min(found.base.n, found.cand.n)
    # The interval is nearly normal: its half width is 1.96 errors of the point.
    spread = (found.high - found.low) / (2 * 1.96) * number**0.5
    return units_to_decide(rule, found.point, spread, number)


def _order_notes(pair: Pair) -> list[str]:
    base, cand = ([run.info.created for run in side.runs] for side in (pair.base, pair.cand))
    apart = max(base) < min(cand) or max(cand) < min(base)
    if not apart or len(base) + len(cand) < 3:
        return []
    return ["the repetitions were not interleaved: a machine that changed looks like a difference"]


def _names(pairs: Sequence[Pair]) -> dict[str, Any]:
    first = pairs[0]
    return {
        "tasks": sorted({pair.task for pair in pairs}),
        "model": first.model,
        "base": first.base.name,
        "cand": first.cand.name,
    }


def _ids(pairs: Sequence[Pair]) -> str:
    return f"{pairs[0].base.first.run_id} and {pairs[0].cand.first.run_id}"
