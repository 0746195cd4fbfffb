"""Medians over repetitions, ratios paired by repetition, and what may not be ranked."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import product
from statistics import median as middle
from typing import Any

from pydantic import BaseModel, ConfigDict

from agentbench_kv.results.serving.records import BASES, Measurement, ServingArm, ServingPlan
from agentbench_kv.results.stats import Median, median

SPEED = "output_throughput"
_KV = ("median_peak_live", "median_logical", "mean_decode_kv", "events")


class ServingCell(BaseModel):
    """One arm at one shape and load; figures are medians over repetitions."""

    model_config = ConfigDict(frozen=True)

    arm: str
    shape: str
    load: str
    repetitions: int
    figures: dict[str, Median]
    ratios: dict[str, Median]  # output tokens/s over another arm's in the same repetition; by arm
    kv: dict[str, float]  # empty without accounting
    reasons: list[str]  # why the cell may not be ranked


class Best(BaseModel):
    """The load at which an arm is fastest (by its median), and its ratios to others at theirs."""

    model_config = ConfigDict(frozen=True)

    arm: str
    shape: str
    load: str
    speed: Median
    ratios: dict[str, Median]


class ServingSummary(BaseModel):
    """What a folder of measurements says."""

    model_config = ConfigDict(frozen=True)

    plan: ServingPlan
    cells: list[ServingCell]
    best: list[Best]


def summarize_serving(plan: ServingPlan, measured: Sequence[Measurement]) -> ServingSummary:
    """Sum up what there is of a plan; cells in its order of shapes, loads and arms."""
    groups: dict[tuple[str, str, str], list[Measurement]] = defaultdict(list)
    for each in measured:
        groups[each.shape, each.load, each.arm].append(each)
    cells, best = [], []
    for shape in plan.shapes:
        made = []
        for load, arm in product(plan.loads, plan.arms):
            bases = {base: groups.get((shape, load, base), []) for base in BASES}
            if runs := groups.get((shape, load, arm.name)):
                made.append(_cell(arm, runs, bases))
        cells += made
        best += _best(made, groups)
    return ServingSummary(plan=plan, cells=cells, best=best)


def _cell(
    arm: ServingArm, runs: Sequence[Measurement], bases: Mapping[str, Sequence[Measurement]]
) -> ServingCell:
    # A figure that some repetition lacks (nothing completed) has no median over repetitions.
    names = [name for name in runs[0].figures if all(name in run.figures for run in runs)]
    return ServingCell(
        arm=arm.name,
        shape=runs[0].shape,
        load=runs[0].load,
        repetitions=len(runs),
        figures={name: median([run.figures[name] for run in runs]) for name in names},
        ratios=_ratios(arm.name, runs, bases),
        kv=_kv(runs),
        reasons=_reasons(arm, runs),
    )


def _ratios(
    arm: str, runs: Sequence[Measurement], bases: Mapping[str, Sequence[Measurement]]
) -> dict[str, Median]:
    """Pair the repetitions in which no request of either side failed."""
    found = {}
    own = _speeds(runs)
    for base, others in bases.items():
        theirs = _speeds(others)
        pairs = [speed / theirs[number] for number, speed in own.items() if number in theirs]
        if pairs and base != arm:
            found[base] = median(pairs)
    return found


def _speeds(runs: Sequence[Measurement]) -> dict[int, float]:
    return {run.repetition: run.figures[SPEED] for run in runs if not _failures(run)}


def _best(
    cells: Sequence[ServingCell], groups: Mapping[tuple[str, str, str], Sequence[Measurement]]
) -> list[Best]:
    """Pick each arm's fastest load of one shape among those that may be ranked."""
    fastest: dict[str, ServingCell] = {}
    for cell in cells:
        held = fastest.get(cell.arm)
        if cell.reasons or (held and cell.figures[SPEED].point <= held.figures[SPEED].point):
            continue
        fastest[cell.arm] = cell
    runs = {arm: groups[cell.shape, cell.load, arm] for arm, cell in fastest.items()}
    bases = {base: runs[base] for base in BASES if base in runs}
    return [
        Best(
            arm=arm,
            shape=cell.shape,
            load=cell.load,
            speed=cell.figures[SPEED],
            ratios=_ratios(arm, runs[arm], bases),
        )
        for arm, cell in fastest.items()
    ]


def _kv(runs: Sequence[Measurement]) -> dict[str, float]:
    accounts = [run.kv for run in runs if run.kv]
    if not accounts:
        return {}
    return {name: middle(float(account.get(name) or 0) for account in accounts) for name in _KV}


def _reasons(arm: ServingArm, runs: Sequence[Measurement]) -> list[str]:
    reasons = []
    if failed := sum(_failures(run) for run in runs):
        sent = failed + sum(int(run.figures.get("completed", 0)) for run in runs)
        said = next((error for run in runs for error in run.errors), "no reason given")
        reasons.append(f"{failed} of {sent} requests failed: {said}")
    if resets := sum(int((run.kv or {}).get("session_resets", 0)) for run in runs):
        reasons.append(f"{resets} session resets: prompts were prefilled again")
    if unproved := _unproved(arm, runs):
        reasons.append(unproved)
    return reasons


def _failures(run: Measurement) -> int:
    return int(run.figures.get("failed", 0))


def _unproved(arm: ServingArm, runs: Sequence[Measurement]) -> str | None:
    """Say why nobody can know that the budget was applied: the arm's, or the one a server says."""
    accounts: list[Mapping[str, Any]] = [run.kv for run in runs if run.kv]
    said = next((account["budget"] for account in accounts if account.get("budget")), None)
    budget = said if arm.budget is None else arm.budget
    if budget is None:
        return None
    if len(accounts) < len(runs):
        return "no KV accounting: this endpoint does not prove that the budget was applied"
    if not all(account.get("events") for account in accounts):
        return f"never triggered at budget {budget}"
    over = max(account.get("max_over_budget") or 0 for account in accounts)
    if over > arm.interval:
        return (
            f"budget not applied: a session held {over} tokens above budget and longest prefill, "
            f"more than the interval of {arm.interval}"
        )
    return None
