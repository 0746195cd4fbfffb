"""One row of a comparison: a metric, a base, a candidate, a change with its verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel

from agentbench_kv.errors import UsageError
from agentbench_kv.results import stats
from agentbench_kv.results.fidelity import FLIPS, diverges
from agentbench_kv.results.gate import Rule, Verdict, units_to_decide
from agentbench_kv.results.records import TrialRecord
from agentbench_kv.results.runs import SIZES, RunGroup, asked_once
from agentbench_kv.results.stats import Change, Scores, SpeedChange

SPEED = "output_tok_s"
_MOST_IN_A_ROW = 3  # repetitions of one side, or a third of all, before they count as interleaved
Unit = Literal["points", "percent", "nats"]
Kind = Literal["score", "mean", "size"]


@dataclass(frozen=True)
class Pair:
    """Runs of one method on each side of one task and model."""

    task: str
    model: str
    base: RunGroup
    cand: RunGroup


class Contrast(BaseModel, frozen=True):
    """Candidate against base; sides are named by method and budget."""

    tasks: list[str]
    model: str
    base: str
    cand: str
    metric: str
    unit: Unit  # points are shares of 1, percent is relative to the base, nats have no upper bound
    mean: bool = False  # of tokens, and without bounds (a divergence): less is better
    base_level: float  # mean score, divergence, or bytes or tokens a session; median tokens/s
    cand_level: float
    point: float  # candidate minus base
    low: float | None  # ends of its 95% interval; None with too few repetitions for one
    high: float | None
    p_value: float  # two-sided
    p_adjusted: float  # Holm's over the rows of the comparison
    test: str
    n: int  # shared `samples`, or `repetitions` of the side with fewer
    counted: str
    clusters: int | None = None  # groups of samples, if there are any: what is independent
    only_base: int = 0  # samples that the other side lacks; left out
    only_cand: int = 0
    unsaid: int = 0  # of `only_base`, those that the candidate played: without a figure for them
    more: int = 0  # samples whose figure rose
    less: int = 0  # and fell
    verdict: Verdict
    needed: int | None  # how many would decide; None if decided, or if the change is on a limit
    needed_of: str  # `samples`, `groups` or `repetitions`
    unfinished: str | None = None  # why an unfinished candidate is not ok, though its part would be
    notes: list[str] = []
    flips: list[Flip] = []  # samples that changed, if they were asked for


def contrast(pairs: Sequence[Pair], metric: str, rule: Rule, listed: int = 0) -> Contrast:
    """Compare the pairs of one method with one base, over the samples of all their tasks.

    A pair is of one task; speed takes one pair only. `listed` is how many changed samples to list.
    A UsageError if the runs do not have the metric or share no sample.
    """
    if metric == SPEED:
        return _of_speed(pairs[0], rule)
    base, cand = _sides(pairs, metric)
    kind = _kind(pairs, metric)
    seen, sure = (_change(kind, cand, base, 1 - left) for left in (1 - stats.LEVEL, rule.alarm))
    if seen is None or sure is None:
        raise UsageError(f"{_ids(pairs)} share no sample; run both with the same seed and samples")
    was, now = ({k: right / asked for k, (right, asked) in s.parts.items()} for s in (base, cand))
    moved = {name: now[name] - was[name] for name in was.keys() & now.keys()}
    played = {f"{i}/{name}" for i, pair in enumerate(pairs) for name in pair.cand.trials}
    verdict, needed = _judged(kind, rule, seen, sure)
    return Contrast(
        **_shared(pairs, metric, seen),
        base_level=seen.base,
        cand_level=seen.cand,
        low=seen.low,
        high=seen.high,
        test=seen.test,
        n=seen.n,
        counted="samples",
        clusters=seen.groups,
        only_base=len(was.keys() - now.keys()),
        only_cand=len(now.keys() - was.keys()),
        unsaid=len((was.keys() - now.keys()) & played),
        more=sum(move > 0 for move in moved.values()),
        less=sum(move < 0 for move in moved.values()),
        verdict=verdict,
        needed=needed,
        needed_of="samples" if seen.groups is None else "groups",
        notes=_group_notes(rule, seen) if kind == "score" else _row_notes(pairs, metric),
        flips=flips(pairs, was, now, moved, listed) if listed else [],
    )


def _shared(pairs: Sequence[Pair], metric: str, found: Change | SpeedChange) -> dict[str, Any]:
    first = pairs[0]
    return {
        "tasks": sorted({pair.task for pair in pairs}),
        "model": first.model,
        "base": first.base.name,
        "cand": first.cand.name,
        "metric": metric,
        "unit": _unit(pairs, metric),
        "mean": _kind(pairs, metric) == "mean",
        "point": found.point,
        "p_value": found.p_value,
        "p_adjusted": found.p_value,
    }


def _kind(pairs: Sequence[Pair], metric: str) -> Kind:
    if metric in (*SIZES, SPEED):
        return "size"
    runs = (run for pair in pairs for group in (pair.base, pair.cand) for run in group.runs)
    return "mean" if diverges(metric) and any(metric in run.means for run in runs) else "score"


def _unit(pairs: Sequence[Pair], metric: str) -> Unit:
    kind = _kind(pairs, metric)
    if kind == "mean" and metric.partition("_")[0] != FLIPS:
        return "nats"
    return "percent" if kind == "size" else "points"


def _sides(pairs: Sequence[Pair], metric: str) -> tuple[Scores, Scores]:
    """Return the figures of both sides by `number of the pair/sample`."""
    found: list[list[Scores | None]] = []
    kind = _kind(pairs, metric)
    for pair in pairs:
        groups = pair.base, pair.cand
        if kind == "size":
            sizes = [_sizes(group, metric) for group in groups]
            found.append(
                [Scores.of_trials(s, g.clusters) for s, g in zip(sizes, groups, strict=True)]
            )
        elif kind == "mean":
            found.append([group.means(metric) for group in groups])
        else:
            asked = asked_once(groups, metric)
            found.append([group.scores(metric, asked) for group in groups])
    benchmarks = [pair.task.partition("/")[0] for pair in pairs]
    base, cand = (_pooled(benchmarks, sides) for sides in zip(*found, strict=True))
    if not base.parts or not cand.parts:
        raise UsageError(_lacking(pairs, metric))
    return base, cand


def _sizes(group: RunGroup, metric: str) -> dict[str, list[int]]:
    """Return the sizes by sample; a UsageError where a session's record has none."""
    for run in group.runs:
        if unknown := run.unsized(metric):
            raise UsageError(
                f"{run.run_id} has no {metric} in {unknown} of its {run.sessions} sessions: it was "
                "played before they were counted, or by an engine that does not count them; play "
                "it again with this version, or compare peak_live"
            )
    return group.sizes(metric)


def _pooled(benchmarks: Sequence[str], sides: Sequence[Scores | None]) -> Scores:
    """Put tasks together; groups of one name are one in all tasks of a benchmark.

    `bfcl/memory_kv` and `memory_vector` ask the same questions of the same scenarios.
    """
    known = [(i, side) for i, side in enumerate(sides) if side is not None]
    return Scores(
        {f"{i}/{name}": pair for i, side in known for name, pair in side.parts.items()},
        {f"{i}/{name}": items for i, side in known for name, items in side.items.items()},
        {
            f"{i}/{name}": f"{benchmarks[i]}/{group}"
            for i, side in known
            for name, group in side.groups.items()
        },
    )


def _lacking(pairs: Sequence[Pair], metric: str) -> str:
    if metric == "score":
        return f"{_ids(pairs)}: one side has no score"
    if metric in SIZES:
        return f"no trial of one side reached the engine, so there is no {metric}"
    if (k := stats.pass_k(metric)) is not None:
        return f"no sample of one side has {k} trials; run it with --trials {k} or more"
    runs = [run for pair in pairs for group in (pair.base, pair.cand) for run in group.runs]
    means = {name for run in runs for name in run.means}
    divergences = set(filter(diverges, means))
    if metric in divergences:
        return f"{_ids(pairs)}: one side has no {metric}"
    counted = sorted(divergences.union(*(run.counts for run in runs)))
    known = ", ".join(["score", "pass^k", *SIZES, SPEED, *counted])
    if metric in means:
        return f"{metric} is a mean of which more is no better or worse by itself; known: {known}"
    return f"the records have no sub-score {metric!r}; known: {known}"


def _change(kind: Kind, cand: Scores, base: Scores, confidence: float) -> Change | None:
    if kind == "score":
        return stats.change(cand, base, confidence)
    groups = {**base.groups, **cand.groups}
    if kind == "mean":
        return stats.open_change(cand.parts, base.parts, groups, confidence)
    mine, theirs = ({name: size for name, (size, _) in side.parts.items()} for side in (cand, base))
    return stats.size_change(mine, theirs, groups, confidence)


def _judged(kind: Kind, rule: Rule, seen: Change, sure: Change) -> tuple[Verdict, int | None]:
    """Return the verdict, and how many units would decide if it is open."""
    point, low, high = seen.point, seen.low, sure.high
    if kind != "score":  # less is better
        point, low, high = -point, -seen.high, -sure.low
        if seen.units < stats.REPETITIONS:  # without a bound that would widen so few equal ones
            return Verdict.INCONCLUSIVE, stats.REPETITIONS
    verdict = rule.judge(low, high)
    if verdict is not Verdict.INCONCLUSIVE:
        return verdict, None
    return verdict, units_to_decide(rule, point, seen.spread, seen.units)


def _group_notes(rule: Rule, seen: Change) -> list[str]:
    """Say what so few groups leave open: one that is lost as a whole need not be among them."""
    hidden = 0.0 if seen.groups is None else stats.paired_ends(np.zeros(seen.groups))[1]
    told = (
        f"{seen.groups} groups cannot rule out that {100 * hidden:.0f}% of all groups are lost "
        "whole, if none of these was"
    )
    return [told] if hidden > rule.catch else []


def _row_notes(pairs: Sequence[Pair], metric: str) -> list[str]:
    """Say what a token takes on each side where that differs: precision, or heads, or a forger."""
    sizes = [
        {_per_token(group) for pair in pairs for group in [getattr(pair, side)]}
        for side in ("base", "cand")
    ]
    if metric != "peak_bytes" or sizes[0] == sizes[1]:
        return []
    was, now = (" and ".join(f"{size:,}" for size in sorted(found)) for found in sizes)
    return [f"a live token takes {was} bytes in BASE, {now} in CAND, over all layers and heads"]


def _per_token(group: RunGroup) -> int:
    size, tokens = (sum(map(sum, group.sizes(n).values())) for n in ("peak_bytes", "peak_live"))
    return round(size / max(tokens, 1))


def _of_speed(pair: Pair, rule: Rule) -> Contrast:
    def rates(side: RunGroup) -> list[float]:
        """Return tokens per active second of each run."""
        return [rate for run in side.measured if (rate := run.summary.tokens_per_s)]

    base, cand = rates(pair.base), rates(pair.cand)
    if not base or not cand:
        raise UsageError(f"{_ids([pair])}: no run of one side generated anything in measured time")
    found = stats.speed_change(base, cand)
    verdict = rule.judge(found.low, found.high) if found.enough else Verdict.INCONCLUSIVE
    if verdict is Verdict.REGRESSION and not _slower(base, cand, rule):
        verdict = Verdict.INCONCLUSIVE
    return Contrast(
        **_shared([pair], SPEED, found),
        base_level=found.base.point,
        cand_level=found.cand.point,
        low=found.low if found.enough else None,
        high=found.high if found.enough else None,
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
    allowed = stats.speed_change([(1 - rule.margin) * rate for rate in base], cand)
    return allowed.point < 0 and allowed.p_value <= rule.alarm


def _repetitions(found: SpeedChange, rule: Rule) -> int | None:
    number = min(found.base.n, found.cand.n)
    # The interval is nearly normal: its half width is 1.96 errors of the point.
    spread = (found.high - found.low) / (2 * 1.96) * number**0.5
    return units_to_decide(rule, found.point, spread, number) if found.enough else stats.REPETITIONS


def _order_notes(pair: Pair) -> list[str]:
    """Say what may look like a difference and is none: a machine that changed meanwhile."""
    both = [pair.base.measured, pair.cand.measured]
    sides = {id(run): side for side, own in enumerate(both) for run in own}
    runs = [*both[0], *both[1]]
    order = [sides[id(run)] for run in sorted(runs, key=lambda run: run.info.created)]
    streaks = [len(list(streak)) for _, streak in groupby(order)]
    notes = []
    if len(order) > 2 and (
        len(streaks) == 2 or max(streaks) > max(_MOST_IN_A_ROW, len(order) // 3)
    ):
        notes.append(
            "the repetitions were not interleaved: a machine that changed looks like a difference"
        )
    if resumed := [run.run_id for run in runs if run.info.resumes]:
        notes.append(
            f"{', '.join(resumed[:3])} {'was' if len(resumed) == 1 else 'were'} resumed, so the "
            "speed is of several times"
        )
    return notes


def _ids(pairs: Sequence[Pair]) -> str:
    return f"{pairs[0].base.first.run_id} and {pairs[0].cand.first.run_id}"


# Trials of one sample by index and seed, each with its run's folder.
Played = dict[tuple[int, int], tuple[Path, TrialRecord]]


@dataclass(frozen=True)
class Flip:
    """A sample whose figure differs: its score (mean of its trials) or size on each side.

    Statuses and transcripts are of the first trial that the sides scored differently, else the
    first; a transcript is None if the run does not have it, as in a baseline.
    """

    task: str
    sample: str
    base: float
    cand: float
    base_status: str
    cand_status: str
    base_transcript: str | None
    cand_transcript: str | None


def flips(
    pairs: Sequence[Pair],
    was: Mapping[str, float],
    now: Mapping[str, float],
    moved: Mapping[str, float],
    most: int,
) -> list[Flip]:
    """List the largest changes, losses first; figures are by `number of the pair/sample`."""
    changed = [name for name, move in moved.items() if move]
    chosen = sorted(changed, key=lambda name: (-abs(moved[name]), moved[name], name))[:most]
    before = _played([pair.base for pair in pairs], chosen)
    after = _played([pair.cand for pair in pairs], chosen)
    found = []
    for name in chosen:
        number, _, sample = name.partition("/")
        old, new = _telling(before[name], after[name])
        ends = old[1].status, new[1].status, _transcript(*old), _transcript(*new)
        found.append(Flip(pairs[int(number)].task, sample, was[name], now[name], *ends))
    return found


def _played(groups: Sequence[RunGroup], chosen: Sequence[str]) -> dict[str, Played]:
    """Read the trials of some samples again; of a trial played twice the earliest counts."""
    found: dict[str, Played] = {name: {} for name in chosen}
    for i, group in enumerate(groups):
        for run in group.runs:
            for record in run.records():
                trials = found.get(f"{i}/{record.sample_id}", {})
                trials.setdefault((record.trial, record.seed), (run.path, record))
    return found


def _telling(base: Played, cand: Played) -> tuple[tuple[Path, TrialRecord], ...]:
    """Choose a trial that both sides played and scored differently, else the first of each."""
    for key in sorted(base.keys() & cand.keys()):
        if base[key][1].headline != cand[key][1].headline:
            return base[key], cand[key]
    return base[min(base)], cand[min(cand)]


def _transcript(folder: Path, record: TrialRecord) -> str | None:
    path = folder / record.transcript if record.transcript else None
    return str(path) if path and path.is_file() else None
