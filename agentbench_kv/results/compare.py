"""Two sides, paired sample by sample, with a verdict for every pair; and what one could tell."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import chain, combinations
from statistics import fmean, variance
from typing import Literal

from pydantic import BaseModel

from agentbench_kv.errors import UsageError
from agentbench_kv.results import gate
from agentbench_kv.results.contrast import SPEED, Contrast, Pair, contrast
from agentbench_kv.results.drift import Drift, find_drift
from agentbench_kv.results.fidelity import KL, diverges, of_fidelity
from agentbench_kv.results.gate import MARGIN, Design, Rule, Verdict
from agentbench_kv.results.run_info import holder
from agentbench_kv.results.runs import SCORE, SIZES, Problem, Run, RunGroup
from agentbench_kv.results.stats import holm
from agentbench_kv.results.validity import RunState

_MOST_NAMED = 6
# Task and model to the groups of one side by name.
Sides = dict[tuple[str, str], dict[str, RunGroup]]


class Comparison(BaseModel, frozen=True):
    """The outcome; limits are points for scores, percent for speed and size, 0.01 nats."""

    metric: str
    margin: float  # how much worse is harmless
    catch: float  # the loss that must not slip through
    alarm: float  # two-sided level of the interval that a regression rests on
    rows: list[Contrast]  # one per pair, or per pair of methods over all tasks
    verdict: Verdict  # the gravest of the rows'; not ok where something is missing
    inconclusive: Literal["fail", "ok"]  # whether one that few samples leave undecided fails
    drift: list[Drift]  # what differs and was allowed to, or only warns
    missing: list[str]  # of BASE's methods and tasks in CAND; runs that could not be read
    notes: list[str]
    noise: str  # the A/A floor

    def fails(self, verdict: Verdict) -> bool:
        if verdict is not Verdict.INCONCLUSIVE:
            return verdict is Verdict.REGRESSION
        # A candidate that crashed, or was not played, is no matter of too few samples.
        unplayed = bool(self.missing) or any(row.unfinished for row in self.rows)
        return self.inconclusive == "fail" or unplayed

    @property
    def lacking(self) -> str | None:
        """Say what was not compared, which may be just what failed, and what to do about it."""
        if not self.missing:
            return None
        more = len(self.missing) - _MOST_NAMED
        shown = "; ".join(self.missing[:_MOST_NAMED]) + (f"; and {more} more" if more > 0 else "")
        return (
            f"not compared: {shown}; it may be just what failed: play it, mend or remove what "
            "cannot be read, or name as BASE only the runs that are meant (a run directory, or "
            "what kvbench baseline save NAME RUN... writes)"
        )

    @property
    def exit_code(self) -> int:
        return self.verdict.exit_code if self.fails(self.verdict) else 0


def compare(
    base: Sequence[Run],
    cand: Sequence[Run],
    *,
    metric: str | None = None,
    margin: float = MARGIN,
    catch: float | None = None,
    by_task: bool = False,
    allow_drift: bool = False,
    inconclusive: Literal["fail", "ok"] = "fail",
    listed: int = 0,
    noise: Sequence[Run] = (),
    unread: Sequence[Problem] = (),
) -> Comparison:
    """Compare a candidate with a base; limits as in `Comparison`.

    `metric` is the score, or KL where both sides are runs of fidelity, unless given.
    `catch` is 10, or the margin if that is more, unless given. `by_task` gives each task its own
    verdict, which speed always has; `listed` is how many changed samples of each row to list;
    `noise` are further runs of full for the A/A floor; `unread` are runs of either side that could
    not be read. A UsageError if a run cannot be compared, nothing matches, something differs that
    must not (unless `allow_drift`), or tasks of two releases of a benchmark would get one verdict.
    """
    Rule.of(margin, catch)
    pairs, missing, notes = _match(base, cand)
    missing += [f"{each.path} cannot be read ({each.reason})" for each in unread]
    for pair in pairs:
        notes += [*_unfit("BASE", pair.base.runs), *_unfit("CAND", pair.cand.runs), *_copies(pair)]
        notes += [note for group in (pair.base, pair.cand) if (note := _asked(group))]
        notes += _idle(pair)
    metric = metric or _judged_by(pairs)
    drift = _checked(pairs, metric == SPEED, allow_drift)
    groups = _grouped(pairs, apart=by_task or metric == SPEED)
    rule = Rule.of(margin, catch, len(groups))
    rows = [_doubted(contrast(group, metric, rule, listed), group) for group in groups]
    adjusted = holm([row.p_value for row in rows])
    rows = [row.model_copy(update={"p_adjusted": p}) for row, p in zip(rows, adjusted, strict=True)]
    return Comparison(
        metric=metric,
        margin=margin,
        catch=100 * rule.catch,
        alarm=rule.alarm,
        rows=rows,
        verdict=gate.worst([row.verdict for row in rows] + [Verdict.INCONCLUSIVE] * bool(missing)),
        inconclusive=inconclusive,
        drift=drift,
        missing=missing,
        notes=list(dict.fromkeys([*notes, *(note for row in rows for note in row.notes)])),
        noise=_floor(metric, [*base, *cand, *noise]),
    )


def _idle(pair: Pair) -> list[str]:
    """Say that one side evicts in far fewer trials, and is the full cache in the others."""
    shares = {side: group.fired() for side, group in (("BASE", pair.base), ("CAND", pair.cand))}
    if not (pair.base.compressed and pair.cand.compressed):
        return []
    if 2 * min(shares.values()) >= max(shares.values()):
        return []
    said = ", ".join(f"{share:.0%} of {side}'s" for side, share in shares.items())
    return [
        f"{pair.cand.name} on {pair.task}: {said} trials had an event; in the others the cache was "
        "whole"
    ]


def _floor(metric: str, runs: Sequence[Run]) -> str:
    if metric in (*SIZES, SPEED) or diverges(metric):
        return f"the A/A noise floor of {metric} is unknown: scores and their parts alone have one"
    return gate.describe(gate.repeats(runs, metric))


def _judged_by(pairs: Sequence[Pair]) -> str:
    runs = [run for pair in pairs for run in (*pair.base.runs, *pair.cand.runs)]
    return KL if all(map(of_fidelity, runs)) else SCORE


def _match(base: Sequence[Run], cand: Sequence[Run]) -> tuple[list[Pair], list[str], list[str]]:
    """Find for every method of the candidate side what it is to be compared with, at least one."""
    # The same method at the same budget if the base has it for that task and model; else the only
    # method the base has there. Runs with a seed that the other side lacks are left out. The second
    # part says what the candidate side lacks, the third what else had no partner.
    theirs, mine = sides(base), sides(cand)
    pairs, missing, notes = [], [], []
    for place, groups in mine.items():
        others = theirs.get(place, {})
        for name, group in groups.items():
            only = next(iter(others.values())) if len(others) == 1 else None
            partner = others.get(name, only)
            if partner is None:
                notes.append(f"left out: {_called(group)} has no partner in BASE")
                continue
            left, right, more = _shared_seeds(partner, group)
            pairs.append(Pair(*place, left, right))
            notes += more
        compared = {pair.base.name for pair in pairs if (pair.task, pair.model) == place}
        alone = [other for name, other in others.items() if name not in compared]
        missing += [f"CAND has no {_called(other)}" for other in alone]
    lonely = sorted(theirs.keys() - mine.keys())
    missing += [f"CAND has nothing on {task} with {model}" for task, model in lonely]
    if not pairs:
        raise UsageError(
            f"nothing to compare: BASE has {_listed(theirs)}; CAND has {_listed(mine)}; "
            "name runs of the same task and model"
        )
    return pairs, missing, notes


def sides(runs: Iterable[Run]) -> Sides:
    """Group the runs of one side that count together."""
    same: dict[tuple[str, str, str, str], list[Run]] = {}
    for run in runs:
        setting = run.setting
        same.setdefault((setting.task, setting.model, run.label, str(run.budget)), []).append(run)
    found: Sides = {}
    for (task, model, label, _), members in same.items():
        group = RunGroup(label, tuple(sorted(members, key=lambda run: run.info.created)))
        found.setdefault((task, model), {})[group.name] = group
    return found


def _shared_seeds(base: RunGroup, cand: RunGroup) -> tuple[RunGroup, RunGroup, list[str]]:
    """Keep the runs whose seed both sides have; all if they share none, which is drift."""
    seeds = {_seed(run) for run in base.runs} & {_seed(run) for run in cand.runs}
    if not seeds:
        return base, cand, []
    kept, notes = [], []
    for side, group in (("BASE", base), ("CAND", cand)):
        kept.append(RunGroup(group.label, tuple(r for r in group.runs if _seed(r) in seeds)))
        notes += [
            f"left out: {side} {run.run_id}, as the other side has no run with seed {_seed(run)}"
            for run in group.runs
            if _seed(run) not in seeds
        ]
    return kept[0], kept[1], notes


def _seed(run: Run) -> object:
    return run.spec.get("seed")


def _called(group: RunGroup) -> str:
    return f"{group.name} on {group.first.setting.task} with {group.first.setting.model}"


def _listed(sides: Sides) -> str:
    return ", ".join(_called(group) for groups in sides.values() for group in groups.values())


def _unfit(side: str, runs: Sequence[Run]) -> list[str]:
    """Refuse runs that no verdict may rest on; name what else is odd about them."""
    notes = []
    for run in runs:
        found = run.summary.validity
        writer = holder(run.info, time.time())
        if writer is not None:
            raise UsageError(f"{side} {run.run_id} is being written by {writer}; wait for it")
        if not run.scores:
            raise UsageError(f"{side} {run.run_id} holds no trial; run its command again first")
        if found.state is RunState.BUDGET_NOT_APPLIED:
            raise UsageError(
                f"{side} {run.run_id} is not valid ({found.state}: {found.reasons[0]}); "
                "a run whose budget was not applied cannot be compared"
            )
        odd = [note for note in run.summary.notes if note.startswith(("samples.jsonl", "warning"))]
        notes += [f"{side} {run.run_id}: {told}" for told in (*found.reasons, *odd)]
    return notes


def _doubted(row: Contrast, pairs: Sequence[Pair]) -> Contrast:
    """Never say ok of a candidate that lacks samples: what is missing may be just what failed."""
    why = "" if row.verdict is Verdict.REGRESSION else _unfinished(row, pairs)
    if not why:
        return row
    return row.model_copy(update={"verdict": Verdict.INCONCLUSIVE, "unfinished": why})


def _unfinished(row: Contrast, pairs: Sequence[Pair]) -> str:
    """Say what of a row's candidate was not played, or cut off; empty if nothing."""
    if row.metric in (*SIZES, SPEED) and (why := _cut_off(pairs, row.metric)):
        return why
    if row.unsaid:
        return f"{row.unsaid} of BASE's sessions have no {row.metric} here; see their errors"
    # One that declared its limit beforehand, and has all of that, lacks nothing.
    runs = [run for pair in pairs for run in pair.cand.runs]
    cut = [r for r in runs if r.summary.validity.state is RunState.INCOMPLETE]
    if row.only_base:
        cut += [r for r in runs if r.spec.get("limit") != len(r.scores)]
    if not cut:
        return ""
    return f"{cut[0].run_id} is not finished, and what is missing may be what failed; run it again"


def _cut_off(pairs: Sequence[Pair], metric: str) -> str:
    """Say that more sessions failed in CAND: one that was cut off, or never began, held less.

    And its speed is that of other, shorter work.
    """
    lost, played = Counter[str](), Counter[str]()
    for pair in pairs:
        shared = pair.base.trials.keys() & pair.cand.trials.keys()
        for side in ("base", "cand"):
            for run in getattr(pair, side).measured:
                lost[side] += sum(run.failed[sample] for sample in shared)
                played[side] += sum(len(run.scores.get(sample, ())) for sample in shared)
    if lost["cand"] * played["base"] <= lost["base"] * played["cand"]:
        return ""
    of = (f"{lost[side]} of {played[side]} trials failed in {side.upper()}" for side in played)
    cost = "is not the same work" if metric == SPEED else "holds less"
    return f"{', '.join(of)}, and what is cut off {cost}"


def _asked(group: RunGroup) -> str:
    """Say what a method asked the model by itself, which no score or size of its answers shows."""
    sessions = sum(run.summary.trials for run in group.runs)
    accounts = [run.summary.kv for run in group.runs if run.summary.kv]
    calls, tokens = (
        sum(getattr(kv, f"auxiliary_{name}") for kv in accounts) / max(1, sessions)
        for name in ("calls", "tokens")
    )
    if not calls:
        return ""
    return (
        f"{_called(group)}: {calls:.1f} auxiliary requests and {tokens:,.0f} auxiliary tokens a "
        "session, which the method asked of the model by itself"
    )


def _copies(pair: Pair) -> list[str]:
    theirs = {(run.run_id, run.info.created) for run in pair.base.runs}
    return [
        f"CAND {run.run_id} is a copy of the run in BASE: they are alike because they are one, "
        "and no A/A"
        for run in pair.cand.runs
        if (run.run_id, run.info.created) in theirs
    ]


def _checked(pairs: Sequence[Pair], speed: bool, allowed: bool) -> list[Drift]:
    found = [find_drift(pair.base.runs, pair.cand.runs, speed) for pair in pairs]
    drift = list(dict.fromkeys(chain.from_iterable(found)))
    refusing = [each for each in drift if each.weight == "refuses"]
    if refusing and not allowed:
        shown = "; ".join(map(str, refusing[:6]))
        more = f"; and {len(refusing) - 6} more" if len(refusing) > 6 else ""
        raise UsageError(
            f"refused, the two sides differ in more than the method: {shown}{more} "
            "(--allow-drift compares them all the same)"
        )
    return drift


def _grouped(pairs: Sequence[Pair], apart: bool) -> list[list[Pair]]:
    if apart:
        return [[pair] for pair in pairs]
    groups: dict[tuple[str, ...], list[Pair]] = {}
    for pair in pairs:
        groups.setdefault((pair.model, pair.base.name, pair.cand.name), []).append(pair)
    # Nor one verdict over `tau2/...` and `tau2-v1/...`: other texts, other rules.
    for group in groups.values():
        benchmarks = sorted({pair.task.partition("/")[0] for pair in group})
        for first, second in combinations(benchmarks, 2):
            if re.sub(r"-v\d+$", "", first) == re.sub(r"-v\d+$", "", second):
                raise UsageError(
                    f"refused, {first} and {second} are two releases of one benchmark, whose "
                    "scores are not one figure (--by task gives each task its own verdict)"
                )
    return list(groups.values())


_SAMPLES = 200
# A changed method flips samples that a mere repeat does not; fewer are never planned with.
_LEAST_DISCORDANCE = 0.05


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


class PowerPlan(BaseModel, frozen=True):
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
) -> PowerPlan:
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
    return PowerPlan(margin=margin, catch=100 * rule.catch, alarm=rule.alarm, rows=rows)


def plan_lines(found: PowerPlan) -> list[str]:
    lines = [line for row in found.rows for line in _told(row, found)]
    shared = (
        f"{len(found.rows)} rows share the false alarms that one may raise, so each is judged "
        "more strictly than alone"
    )
    return [*lines, shared] if len(found.rows) > 1 else lines


def _told(row: Prospect, found: PowerPlan) -> list[str]:
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
        power={
            f"{100 * x:g}": gate.chances(rule, design, x)[Verdict.REGRESSION] for x in gate.LOSSES
        },
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
    """Return how often two plays of one sample differ, and how that is known."""
    # For graded scores, the mean of the squared difference: the same for right and wrong.
    plays = [scores for group in groups for scores in _plays(group) if len(scores) > 1]
    if not plays:
        return gate.DISCORDANCE, "assumed"
    found = fmean(2 * variance(scores) for scores in plays)
    if found < _LEAST_DISCORDANCE:
        return _LEAST_DISCORDANCE, f"assumed; repeats of BASE differ in {100 * found:.1f}%"
    return found, f"measured on {len(plays)} samples that BASE played repeatedly"


def _plays(group: RunGroup) -> list[list[float]]:
    """Return every play of each sample: trials, and repeats of a run that are no copies."""
    found: dict[str, list[float]] = {}
    for run in {(run.run_id, run.info.created): run for run in group.runs}.values():
        for sample, scores in run.scores.items():
            found.setdefault(sample, []).extend(scores.values())
    return list(found.values())
