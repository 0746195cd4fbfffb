"""What one accuracy table shows: the runs of a cell, ranked and not, beside the null agent's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agentbench_kv.results.arms import Cell as Place
from agentbench_kv.results.tables.groups import Group, budget_order, by_cell, grouped, is_null
from agentbench_kv.results.tables.measured import Measured

__all__ = ["NULL", "Budgets", "View", "views"]

NULL = "null agent"

Budgets = Sequence[int | str | None]


@dataclass(frozen=True)
class View:
    """The runs of one cell: ranked, unranked, and the agent that does nothing.

    Attributes
    ----------
    place : Place
        Task, model and engine.
    metric : str
        `score` or a sub-score.
    runs : sequence of Measured
        All of the cell.
    groups, null : sequence of Group
        Valid runs by row; those of the null agent on the same task.
    below : sequence of Measured
        Runs that are not valid.
    """

    place: Place
    metric: str
    runs: Sequence[Measured]
    groups: Sequence[Group]
    below: Sequence[Measured]
    null: Sequence[Group]

    @property
    def budgets(self) -> Budgets:
        """Every budget there is, in order."""
        found = {group.budget for group in (*self.groups, *self.null)}
        return sorted(found | {run.arm.budget for run in self.below}, key=budget_order)


def views(measured: Sequence[Measured], metric: str) -> list[View]:
    """Return a view of each task, model and engine with runs that have the metric, or nothing.

    The null agent has a view of its own only where nobody else has run its task.
    """
    cells = by_cell(run for run in measured if metric in run.scores or not run.scores)
    return [_view(place, metric, cells) for place in cells if not _is_floor(place, cells)]


def _is_floor(place: Place, cells: Mapping[Place, object]) -> bool:
    """Whether a cell is the null agent of a task that others have run."""
    return is_null(place) and any(
        other.task == place.task and not is_null(other) for other in cells
    )


def _view(place: Place, metric: str, cells: Mapping[Place, Sequence[Measured]]) -> View:
    floor = [
        run
        for other, runs in cells.items()
        if is_null(other) and other.task == place.task and other != place
        for run in runs
    ]
    runs = cells[place]
    return View(
        place=place,
        metric=metric,
        runs=runs,
        groups=grouped([run for run in runs if run.valid]),
        below=[run for run in runs if not run.valid],
        null=grouped([run for run in floor if run.valid]),
    )
