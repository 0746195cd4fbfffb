"""What a task gives without the evidence: floors that stand under the table of its runs.

A task with the setting `floor` is played again with what its answers need taken away; one with the
setting `context`, with less of what is read before the questions: the simplest memory there is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from agentbench_kv.results.runs import Run, RunGroup, grouped
from agentbench_kv.results.stats import level

OFF = "off"
NULL = "null agent"
_NAMES = {"none": "without the session", "removed": "without the evidence"}
_TAKEN = ("floor", "context", "last")  # settings that take something away
MOST = 0.9  # of the samples are what a floor has to be played on
LEAST = 3.0  # times the floor, below which a task says nothing


def floor_of(run: Run) -> str:
    """Return what was taken away from a run's task; `off` for what is no floor."""
    settings = _settings(run)
    context = str(settings.get("context", "full"))
    if context in ("sessions", "turns"):
        return f"last {settings.get('last')} {context}"
    return context if context != "full" else str(settings.get("floor", OFF))


def floors_of(runs: Sequence[Run], others: Iterable[Run]) -> list[tuple[str, RunGroup]]:
    """Return the names and groups of those valid runs that are floors of some runs."""
    about = [_but_floor(run) for run in runs if floor_of(run) == OFF]
    chosen = [
        run for run in others if run.valid and floor_of(run) != OFF and _but_floor(run) in about
    ]
    return [(f"{group.method}, {floor_name(group.first)}", group) for group in grouped(chosen)]


def null_of(runs: Iterable[Run], others: Iterable[Run]) -> RunGroup | None:
    """Return the valid runs of the agent that does nothing that were asked what some runs were.

    What else they differ in from each other does nothing either, so they count together.
    """
    about = [asked(run) for run in runs]
    own = [run for run in others if run.setting.null and run.valid and asked(run) in about]
    own.sort(key=lambda run: (run.info.created, run.run_id))
    return RunGroup(NULL, tuple(own)) if own else None


def asked(run: Run) -> tuple[str, Mapping[str, Any]]:
    """Return a run's task and the task's settings: with others, doing nothing scores otherwise."""
    return run.setting.task, _settings(run)


def floor_name(run: Run) -> str:
    """Return in words what was taken away from a run's task; `off` for what is no floor."""
    return _NAMES.get(floor_of(run), floor_of(run))


def floor_note(full: RunGroup | None, floors: Sequence[RunGroup], metric: str) -> str:
    """Say whether the full cache is so far above its floors that the task says something."""
    of_full = None if full is None or not floors else full.scores(metric)
    bare = [each for each in floors if each.method == "full" and floor_of(each.first) in _NAMES]
    known = [found for each in bare if (found := each.scores(metric))]
    if of_full is None or not known:
        return ""
    shared = set(of_full.parts).intersection(*(found.parts for found in known))
    if len(shared) < MOST * len(of_full.parts):
        return (
            f"floors were played on {len(shared)} of the {len(of_full.parts)} samples: whether the "
            "task says something is not known"
        )
    point, *bottom = (level(each.only(shared)).point for each in (of_full, *known))
    highest = max(bottom)
    if point < LEAST * highest or point == 0:
        return f"full is below {LEAST:g} times its floor: the task says nothing about this model"
    played = {floor_of(each.first) for each in bare}
    missing = sorted({*_NAMES} - played if "floor" in _settings(bare[0].first) else ())
    unknown = "".join(f"; not played: floor={name}" for name in missing)
    return f"full is at least {LEAST:g} times its floors{unknown}"


def _settings(run: Run) -> Mapping[str, Any]:
    settings = run.spec.get("task_params")
    return settings if isinstance(settings, Mapping) else {}


def _but_floor(run: Run) -> tuple[object, ...]:
    """Return what a run and its floors share; of two models of one name, the weights tell."""
    weights = run.info.provenance.get("model_sha")
    rest = {name: value for name, value in _settings(run).items() if name not in _TAKEN}
    return run.setting, weights, rest
