"""Curves as tables: area relative to full, smallest budget that keeps 95%, crossovers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from agentbench_kv.results.arms import Cell as Place
from agentbench_kv.results.curves import CurveSummary, Keeps, curve_summary
from agentbench_kv.results.tables.groups import apart_by_conditions, by_cell
from agentbench_kv.results.tables.measured import Measured
from agentbench_kv.results.tables.model import Cell, Column, Kind, Row, Table, Unit
from agentbench_kv.results.tables.words import heading, slug

__all__ = ["curve_tables"]


def curve_tables(measured: Sequence[Measured]) -> list[Table]:
    """Return the curves of every cell with valid runs of full and of a method with a budget."""
    return [
        table
        for place, runs in by_cell(run for run in measured if run.valid).items()
        for apart, same in apart_by_conditions(runs)
        for table in _of_runs(place, same, apart)
    ]


def _of_runs(place: Place, runs: Sequence[Measured], apart: str) -> list[Table]:
    full = [run.arm for run in runs if run.arm.method == "full"]
    arms = [run.arm for run in runs if run.arm.compressed and run.arm.budget is not None]
    summary = curve_summary(full, arms) if full and arms else None
    if summary is None or summary.full <= 0:
        return []
    tables = [_curves(place, summary), *[_crossovers(place, summary)] * bool(summary.crossovers)]
    return [_named(table, apart) for table in tables] if apart else tables


def _named(table: Table, apart: str) -> Table:
    return replace(table, key=slug(table.key, apart), title=f"{table.title} [{apart}]")


def _curves(place: Place, summary: CurveSummary) -> Table:
    rows = []
    for curve in summary.curves:
        area, keeps = curve.area, curve.keeps
        budgets = f"{curve.budgets[0]} to {curve.budgets[-1]}"
        rows.append(
            Row(
                (
                    Cell(curve.label),
                    Cell(len(curve.budgets), text=f"{len(curve.budgets)}, {budgets}"),
                    Cell(area.point, area.low, area.high) if area else Cell(),
                    _keeps(keeps) if keeps else Cell(),
                )
            )
        )
    groups = f" in {summary.clusters} groups" if summary.clusters else ""
    notes = [
        f"{summary.samples} samples{groups} that every arm has; full scores "
        f"{100 * summary.full:.1f}%; one resample serves all arms",
        "area: under the curve over log2(budget), relative to full; 1 is as good as full",
    ]
    notes += [f"left out: {run}" for run in summary.left_out]
    columns = (
        Column("method"),
        Column("budgets", Unit.NUMBER),
        Column("area [95% interval]", Unit.RATIO),
        Column("keeps 95% of full from, tokens", Unit.TOKENS),
    )
    return _table("accuracy over budget", "curves", place, columns, rows, notes)


def _keeps(keeps: Keeps) -> Cell:
    text = str(keeps)
    return Cell(text if keeps.point is None else keeps.point, keeps.low, keeps.high, text=text)


def _crossovers(place: Place, summary: CurveSummary) -> Table:
    rows = [
        Row(
            (
                Cell(each.below),
                Cell(each.above),
                Cell(each.budget, each.low, each.high),
                Cell(each.support),
            )
        )
        for each in summary.crossovers
    ]
    columns = (
        Column("leads below"),
        Column("leads above"),
        Column("budget, tokens [95% interval]", Unit.TOKENS),
        Column("of resamples %", Unit.SHARE),
    )
    return _table("where methods change places", "crossovers", place, columns, rows, [])


def _table(
    what: str,
    key: str,
    place: Place,
    columns: Sequence[Column],
    rows: Sequence[Row],
    notes: Sequence[str],
) -> Table:
    return Table(
        kind=Kind.CURVES,
        key=slug(key, place.task, place.model, place.engine),
        title=heading(what, place),
        columns=tuple(columns),
        rows=tuple(rows),
        notes=tuple(notes),
        where={
            "task": place.task,
            "model": place.model,
            "engine": place.engine,
            "metric": "score",
        },
    )
