"""Rows of a table: runs of the same thing, whatever their seed, counted together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from agentbench_kv.budget import Budget
from agentbench_kv.results.arms import Cell, set_apart
from agentbench_kv.results.tables.measured import SCORE, Measured
from agentbench_kv.results.tables.pairing import Scores

__all__ = [
    "Group",
    "apart_by_conditions",
    "budget_order",
    "by_cell",
    "grouped",
    "is_null",
    "variants",
]

_FREE = frozenset({"seed", "limit", "trials", "concurrency", "budget"})
"""What runs of the same row may differ in; the budget is the column."""


@dataclass(frozen=True)
class Group:
    """Runs of one method, settings and budget in one cell.

    Attributes
    ----------
    label : str
        What the row is called.
    runs : tuple of Measured
        At least one.
    """

    label: str
    runs: tuple[Measured, ...]

    @property
    def budget(self) -> int | str | None:
        """As the spec spells it."""
        return self.runs[0].arm.budget

    @property
    def compressed(self) -> bool:
        """Whether it competes."""
        return self.runs[0].arm.compressed

    @property
    def method(self) -> str:
        """The method's name without preset and settings."""
        return self.runs[0].arm.method.partition("@")[0]

    @property
    def conditions(self) -> tuple[str, ...]:
        """See `Arm.conditions`."""
        return self.runs[0].arm.conditions

    @cached_property
    def triggered(self) -> set[str]:
        """Samples with an event in some run."""
        return set().union(*(run.triggered for run in self.runs))

    def scores(self, metric: str = SCORE) -> Scores | None:
        """Return the runs' scores by sample, several of one sample combined; None if none."""
        found = [run.scores[metric] for run in self.runs if metric in run.scores]
        if len(found) < 2:
            return found[0] if found else None
        if metric != SCORE:
            return _summed(found)
        trials: dict[str, list[float]] = {}
        for run in self.runs:
            for name, values in run.arm.scores.items():
                trials.setdefault(name, []).extend(values)
        return Scores.of_trials(trials, _clusters(found))


def apart_by_conditions(runs: Sequence[Measured]) -> list[tuple[str, list[Measured]]]:
    """Sort a cell's runs by their conditions, named by what sets each set apart from others."""
    names = set_apart(run.arm for run in runs)
    sets: dict[tuple[str, ...], list[Measured]] = {}
    for run in runs:
        sets.setdefault(run.arm.conditions, []).append(run)
    return [(names[id(same[0].arm)], same) for same in sets.values()]


def by_cell(measured: Iterable[Measured]) -> dict[Cell, list[Measured]]:
    """Sort runs by task, model and engine, in the order they come."""
    cells: dict[Cell, list[Measured]] = {}
    for run in measured:
        cells.setdefault(run.arm.cell, []).append(run)
    return cells


def is_null(cell: Cell) -> bool:
    """Whether a cell holds the agent that does nothing: what a task gives for free."""
    return cell.engine == "scripted" and cell.model == "null"


def grouped(runs: Sequence[Measured]) -> list[Group]:
    """Put the runs of one cell together that only differ in seed and amount."""
    names = variants(runs)
    groups: dict[tuple[str, Any], list[Measured]] = {}
    for run, name in zip(runs, names, strict=True):
        groups.setdefault((name, run.arm.budget), []).append(run)
    return [Group(name, tuple(same)) for (name, _), same in groups.items()]


def variants(runs: Sequence[Measured]) -> list[str]:
    """Name each run: its label, and in brackets what sets it apart from others so labelled."""
    by_label: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        by_label.setdefault(run.label, []).append(_fixed(run))
    return [_name(run.label, _fixed(run), by_label[run.label]) for run in runs]


def budget_order(budget: int | str | None) -> tuple[int, float]:
    """Sort key: none first, then tokens, then shares."""
    if budget is None:
        return (0, 0.0)
    parsed = Budget.parse(budget)
    return (1, float(parsed.tokens or 0)) if parsed.share is None else (2, parsed.share)


def _name(label: str, fixed: dict[str, Any], others: Sequence[dict[str, Any]]) -> str:
    apart = [
        f"{name}={value}"
        for name, value in sorted(fixed.items())
        if any(other.get(name, value) != value for other in others)
    ]
    return f"{label} [{', '.join(apart)}]" if apart else label


def _fixed(run: Measured) -> dict[str, Any]:
    spec = dict(run.arm.spec)
    params = spec.pop("params", None)
    flat = {name: value for name, value in spec.items() if name not in _FREE}
    changed = params if isinstance(params, dict) and run.label == run.arm.method else {}
    return flat | {f"params.{name}": value for name, value in changed.items()}


def _summed(found: Sequence[Scores]) -> Scores:
    parts: dict[str, tuple[float, float]] = {}
    for scores in found:
        for name, (right, asked) in scores.parts.items():
            before = parts.get(name, (0.0, 0.0))
            parts[name] = (before[0] + right, before[1] + asked)
    return Scores(parts, clusters=_clusters(found), ratio=True)


def _clusters(found: Sequence[Scores]) -> dict[str, str]:
    return {name: group for scores in found for name, group in scores.clusters.items()}
