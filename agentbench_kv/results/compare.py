"""Two sides, paired sample by sample, with a verdict for every pair."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from itertools import chain, combinations
from typing import Literal

from pydantic import BaseModel

from agentbench_kv.errors import UsageError
from agentbench_kv.results import aa
from agentbench_kv.results.contrast import SPEED, Contrast, Pair, contrast
from agentbench_kv.results.drift import Drift, find_drift
from agentbench_kv.results.gate import MARGIN, Rule, Verdict, worst
from agentbench_kv.results.groups import RunGroup
from agentbench_kv.results.runinfo import holder
from agentbench_kv.results.runs import SCORE, Run
from agentbench_kv.results.stats import holm
from agentbench_kv.results.validity import RunState

Sides = dict[tuple[str, str], dict[str, RunGroup]]
"""Task and model to the groups of one side by name."""


class Comparison(BaseModel, frozen=True):
    """The outcome; limits are points for scores, percent for speed and size."""

    metric: str
    margin: float  # how much worse is harmless
    catch: float  # the loss that must not slip through
    alarm: float  # two-sided level of the interval that a regression rests on
    rows: list[Contrast]  # one per pair, or per pair of methods over all tasks
    verdict: Verdict  # the gravest of the rows'
    inconclusive: Literal["fail", "ok"]  # whether an undecided verdict is a failure
    drift: list[Drift]  # what differs and was allowed to, or only warns
    notes: list[str]
    noise: str  # the A/A floor

    def fails(self, verdict: Verdict) -> bool:
        """Tell whether a verdict fails the job."""
        doubtful = verdict is Verdict.INCONCLUSIVE
        return self.inconclusive == "fail" if doubtful else verdict is Verdict.REGRESSION

    @property
    def exit_code(self) -> int:
        """What a CI job sees."""
        return self.verdict.exit_code if self.fails(self.verdict) else 0


def compare(
    base: Sequence[Run],
    cand: Sequence[Run],
    *,
    metric: str = SCORE,
    margin: float = MARGIN,
    catch: float | None = None,
    by_task: bool = False,
    allow_drift: bool = False,
    inconclusive: Literal["fail", "ok"] = "fail",
    listed: int = 0,
    noise: Sequence[Run] = (),
) -> Comparison:
    """Compare a candidate with a base; limits as in `Comparison`.

    `catch` is 10, or the margin if that is more, unless given. `by_task` gives each task its own
    verdict, which speed always has; `listed` is how many changed samples of each row to list;
    `noise` are further runs of full for the A/A floor. A UsageError if a run cannot be compared,
    nothing matches, something differs that must not (unless `allow_drift`), or tasks of two
    releases of a benchmark would get one verdict.
    """
    Rule.of(margin, catch)
    pairs, notes = _match(base, cand)
    for pair in pairs:
        notes += [*_unfit("BASE", pair.base.runs), *_unfit("CAND", pair.cand.runs), *_copies(pair)]
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
        verdict=worst(row.verdict for row in rows),
        inconclusive=inconclusive,
        drift=drift,
        notes=list(dict.fromkeys([*notes, *(note for row in rows for note in row.notes)])),
        noise=aa.describe(aa.repeats([*base, *cand, *noise])),
    )


def _match(base: Sequence[Run], cand: Sequence[Run]) -> tuple[list[Pair], list[str]]:
    """Find for every method of the candidate side what it is to be compared with, at least one.

    The same method at the same budget if the base has it for that task and model; else the only
    method the base has there. Runs with a seed that the other side lacks are left out. The second
    part says what had no partner.
    """
    theirs, mine = sides(base), sides(cand)
    pairs, notes = [], []
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
        missing = [other for name, other in others.items() if name not in compared]
        notes += [f"left out: CAND has no {_called(other)}" for other in missing]
    lonely = sorted(theirs.keys() - mine.keys())
    notes += [f"left out: CAND has nothing on {task} with {model}" for task, model in lonely]
    if not pairs:
        raise UsageError(
            f"nothing to compare: BASE has {_listed(theirs)}; CAND has {_listed(mine)}; "
            "name runs of the same task and model"
        )
    return pairs, notes


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
        if not run.trials.scores:
            raise UsageError(f"{side} {run.run_id} holds no trial; run its command again first")
        if found.state is RunState.BUDGET_NOT_APPLIED:
            raise UsageError(
                f"{side} {run.run_id} is not valid ({found.state}: {found.reasons[0]}); "
                "a run whose budget was not applied cannot be compared"
            )
        odd = [note for note in run.summary.notes if note.startswith("samples.jsonl")]
        notes += [f"{side} {run.run_id}: {told}" for told in (*found.reasons, *odd)]
    return notes


def _doubted(row: Contrast, pairs: Sequence[Pair]) -> Contrast:
    """Never say ok of a candidate that lacks samples: what is missing may be just what failed.

    One that declared its limit beforehand, and has all of that, lacks nothing.
    """
    runs = [run for pair in pairs for run in pair.cand.runs]
    cut = [r for r in runs if r.summary.validity.state is RunState.INCOMPLETE]
    if row.only_base:
        cut += [r for r in runs if r.spec.get("limit") != len(r.trials.scores)]
    if row.verdict is not Verdict.OK or not cut:
        return row
    why = f"{cut[0].run_id} is not finished, and what is missing may be what failed; run it again"
    return row.model_copy(update={"verdict": Verdict.INCONCLUSIVE, "unfinished": why})


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
