"""What a comparison could tell, before there is a candidate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from statistics import fmean, variance

from pydantic import BaseModel

from agentbench_kv.results import gate
from agentbench_kv.results.compare import sides
from agentbench_kv.results.gate import DISCORDANCE, LOSSES, Design, Rule, Verdict
from agentbench_kv.results.groups import RunGroup
from agentbench_kv.results.runs import Run

_SAMPLES = 200
_LEAST_DISCORDANCE = 0.05
"""A changed method flips samples that a mere repeat does not; fewer are never planned with."""


class Prospect(BaseModel, frozen=True):
    """What one row will be able to tell."""

    name: str  # the base's method and budget
    samples: int
    trials: int
    groups: int | None
    discordance: float  # share of samples whose outcome differs between the sides
    source: str  # how that is known
    exact: bool  # whether the chances are enumerated, not approximated by normal distributions
    power: dict[str, float]  # chance that a loss of so many points is called a regression
    caught: float | None  # smallest loss in points that is caught in 9 of 10 cases
    ok: float  # chance of `ok` if nothing changed
    alarm: float  # chance of `regression` if the loss is the margin
    samples_for_power: int | None  # to catch regressions of `catch` points in 9 of 10 cases
    samples_for_ok: int | None  # to say `ok` in 9 of 10 cases without a difference


class Plan(BaseModel, frozen=True):
    """The rows of a comparison to come, by the rule it will be judged by."""

    margin: float
    catch: float
    alarm: float
    rows: list[Prospect]


def plan(
    base: Sequence[Run],
    margin: float,
    catch: float | None,
    samples: int | None = None,
    discordance: float | None = None,
) -> Plan:
    """Say what a candidate that plays the same as the base could be caught with.

    Limits are points, as `compare` takes them. `samples` counts instead of the base's (200 without
    a base), `discordance`, a share, instead of what the base's repeats show (15% without any).
    """
    methods: dict[str, list[RunGroup]] = {}
    for groups in sides(base).values():
        for name, group in groups.items():
            methods.setdefault(name, []).append(group)
    rule = Rule.of(margin, catch, max(len(methods), 1))
    rows = []
    for name, known in (methods or {"any": []}).items():
        share, source = _discordance(known) if discordance is None else (discordance, "as given")
        design = _design(known, share)
        design = design if samples is None else design.of(samples)
        rows.append(_prospect(rule, name, design, source))
    return Plan(margin=margin, catch=100 * rule.catch, alarm=rule.alarm, rows=rows)


def plan_lines(found: Plan) -> list[str]:
    """Return the plan in words, a line each."""
    lines = [line for row in found.rows for line in _told(row, found)]
    shared = (
        f"{len(found.rows)} rows share the false alarms that one may raise, so each is judged "
        "more strictly than alone"
    )
    return [*lines, shared] if len(found.rows) > 1 else lines


def _told(row: Prospect, found: Plan) -> list[str]:
    amount = f"{row.samples} samples" + (f" x {row.trials} trials" if row.trials > 1 else "")
    grouped = "" if row.groups is None else f" in {row.groups} groups, alike within each or not"
    how = "exact" if row.exact else "normal approximation"
    power = ", ".join(f"{loss} points {100 * p:.0f}%" for loss, p in row.power.items())
    least = "none" if row.caught is None else f"{row.caught:g} points"
    needs = [
        "more than 100,000" if each is None else f"about {each:,}"
        for each in (row.samples_for_power, row.samples_for_ok)
    ]
    return [
        f"{row.name}: {amount}{grouped}, of which {100 * row.discordance:.3g}% differ between the "
        f"sides ({row.source}); {how}",
        f"  a loss is called a regression: {power}; the smallest caught in 9 of 10: {least}",
        f"  no difference is called ok: {100 * row.ok:.0f}%; a loss of the "
        f"margin ({found.margin:g}), which is harmless, a regression: {100 * row.alarm:.1f}%",
        f"  samples for 9 of 10: {needs[0]} to catch {found.catch:g} points, {needs[1]} to say ok",
    ]


def _prospect(rule: Rule, name: str, design: Design, source: str) -> Prospect:
    least = gate.smallest_caught(rule, design)
    return Prospect(
        name=name,
        **asdict(design),
        source=source,
        exact=design.exact,
        power={f"{100 * x:g}": gate.chances(rule, design, x)[Verdict.REGRESSION] for x in LOSSES},
        caught=None if least is None else 100 * least,
        ok=gate.chances(rule, design, 0.0)[Verdict.OK],
        alarm=gate.chances(rule, design, rule.margin)[Verdict.REGRESSION],
        samples_for_power=gate.samples_for(rule, design, Verdict.REGRESSION, rule.catch),
        samples_for_ok=gate.samples_for(rule, design, Verdict.OK, 0.0),
    )


def _design(groups: Sequence[RunGroup], discordance: float) -> Design:
    trials = [len(scores) for group in groups for scores in group.trials.values()]
    if not trials:
        return Design(_SAMPLES, discordance)
    units = len({group.clusters.get(name, name) for group in groups for name in group.trials})
    clusters = units if units < len(trials) else None
    return Design(len(trials), discordance, max(1, round(fmean(trials))), clusters)


def _discordance(groups: Sequence[RunGroup]) -> tuple[float, str]:
    """Return how often two plays of one sample differ, and how that is known.

    For graded scores, the mean of the squared difference, which is the same for right and wrong.
    """
    plays = [scores for group in groups for scores in _plays(group) if len(scores) > 1]
    if not plays:
        return DISCORDANCE, "assumed"
    found = fmean(2 * variance(scores) for scores in plays)
    if found < _LEAST_DISCORDANCE:
        return _LEAST_DISCORDANCE, f"assumed; repeats of BASE differ in {100 * found:.1f}%"
    return found, f"measured on {len(plays)} samples that BASE played repeatedly"


def _plays(group: RunGroup) -> list[list[float]]:
    """Return every play of each sample: trials, and repeats of a run that are no copies."""
    found: dict[str, list[float]] = {}
    for run in {(run.run_id, run.info.created): run for run in group.runs}.values():
        for sample, scores in run.trials.scores.items():
            found.setdefault(sample, []).extend(scores.values())
    return list(found.values())
