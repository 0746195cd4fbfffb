"""What the views show of a run: rows of the leaderboard, points of the charts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentbench_kv.results.arms import Arm, Cell
from agentbench_kv.results.papers import HEADLINES, PublishedFigure, figures
from agentbench_kv.results.site.ranking import TIERS, Standing
from agentbench_kv.results.site.text import visible
from agentbench_kv.results.stats import Interval

__all__ = ["Row", "chart_cell", "matching", "rows", "tier_name"]

HEADLINE = "score"


@dataclass(frozen=True)
class Row:
    """A row of the leaderboard: a run with its page, or a published figure.

    Attributes
    ----------
    cell : Cell
        Task, model and engine; the engine of a published figure is the paper's.
    method, budget : str, str
        As shown.
    standing : Standing or None
        Of a measured run.
    page : str
        The run's page relative to the site's root; empty for a published figure.
    opens : bool
        Whether it is the first of its tier.
    published : PublishedFigure or None
        The figure.
    """

    cell: Cell
    method: str
    budget: str
    standing: Standing | None = None
    page: str = ""
    opens: bool = False
    published: PublishedFigure | None = None

    @property
    def kind(self) -> str:
        """`ranked`, `published` or `below` the line."""
        if self.standing is None:
            return "published"
        return "ranked" if self.standing.ranked else "below"

    @property
    def tier(self) -> str:
        """Name of the tier; empty where there is none."""
        index = self.standing.tier if self.standing else None
        return "" if index is None else tier_name(index)


def tier_name(index: int) -> str:
    """Return a tier as shown, e.g. `25-50%` of the KV."""
    ends = [0, *(round(100 * edge) for edge in TIERS), 100]
    return f"{ends[index]}–{ends[index + 1]}%"  # noqa: RUF001  an en dash between numbers


def rows(
    standings: Sequence[Standing], pages: Mapping[int, str], labels: Mapping[int, str]
) -> list[Row]:
    """Return the measured rows, and after each cell's the published figures of the same cell.

    Parameters
    ----------
    standings : sequence of Standing
        In the order to show.
    pages : mapping of int to str
        Page of each run by `id(arm)`.
    labels : mapping of int to str
        What each run's method is called, by `id(arm)`.
    """
    measured = [
        Row(
            _shown(s.arm.cell),
            labels[id(s.arm)],
            visible("none" if s.arm.budget is None else s.arm.budget, 20),
            standing=s,
            page=pages[id(s.arm)],
            opens=s.ranked and s.gap is None,
        )
        for s in standings
    ]
    places = dict.fromkeys((row.cell.task, row.cell.model) for row in measured)
    beside = [_published(figure) for place in places for figure in matching(*place)]
    return (
        [row for row in measured if row.kind == "ranked"]
        + beside
        + [row for row in measured if row.kind == "below"]
    )


def matching(task: str, model: str) -> list[PublishedFigure]:
    """Return the published headline figures of a task and model."""
    return [
        figure
        for figure in figures("accuracy_vs_budget")
        if figure.metric in HEADLINES
        and figure.value is not None
        and f"{figure.benchmark}/{figure.task}" == task
        and figure.model.lower() == model.lower()
    ]


def chart_cell(shown: Iterable[Row], task: str, model: str) -> dict[str, Any]:
    """Return what the charts of one cell need, as JSON types.

    Parameters
    ----------
    shown : iterable of Row
        Measured rows of the cell; those below the line are left out.
    task, model : str
        The cell, for the published figures.
    """
    points = [
        _point(row.standing.arm, row.method, f"../{row.page}")
        for row in shown
        if row.standing is not None and row.standing.ranked
    ]
    points += [_published_point(figure) for figure in matching(task, model)]
    metrics = {name for point in points for name in point["scores"]} - {HEADLINE, "triggered"}
    return {"points": points, "metrics": sorted(metrics)}


def _point(arm: Arm, series: str, href: str) -> dict[str, Any]:
    summary, kv = arm.summary, arm.summary.kv
    scores = {HEADLINE: summary.score, "triggered": summary.score_triggered}
    scores |= summary.pass_k
    scores |= {visible(name, 60): part.interval for name, part in summary.sub_scores.items()}
    return {
        "series": series,
        "budget": visible(arm.budget, 20) if arm.budget is not None else None,
        "tokens": (kv.median_logical if kv else None) if arm.tokens is None else arm.tokens,
        "kept": kv and kv.live_over_logical,
        "speed": summary.tokens_per_s,
        "compressed": arm.compressed,
        "seed": summary.seed,
        "href": href,
        "scores": {name: _ends(ends) for name, ends in scores.items() if ends},
    }


def _published_point(figure: PublishedFigure) -> dict[str, Any]:
    return {
        "series": f"{figure.method} (published)",
        "budget": str(figure.budget) if figure.budget else None,
        "tokens": figure.budget,
        "kept": None,
        "speed": None,
        "compressed": figure.method != "full",
        "published": figure.cited,
        "href": "",
        "scores": {HEADLINE: [(figure.value or 0.0) / 100]},
    }


def _shown(cell: Cell) -> Cell:
    return Cell(visible(cell.task, 120), visible(cell.model, 120), visible(cell.engine, 60))


def _ends(ends: Interval) -> list[float]:
    return [round(value, 5) for value in (ends.point, ends.low, ends.high)]


def _published(figure: PublishedFigure) -> Row:
    cell = Cell(f"{figure.benchmark}/{figure.task}", figure.model, figure.engine or "?")
    budget = "none" if figure.budget is None else str(figure.budget)
    return Row(cell, figure.method or "?", budget, published=figure)
