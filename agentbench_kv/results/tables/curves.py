"""Curves as tables: area relative to full, smallest budget that keeps 95%, crossovers."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from agentbench_kv.results.curves import CurveSummary, Keeps, Point, curve_summary
from agentbench_kv.results.groups import RunGroup
from agentbench_kv.results.ranking import Board, Entry, boards
from agentbench_kv.results.runs import Run
from agentbench_kv.results.tables.model import (
    Cell,
    Column,
    Kind,
    Row,
    Table,
    Unit,
    heading,
    place,
    slug,
)

LEGEND = (
    "area: under the curve over log2(budget), relative to full; 1 is as good as full",
    "keeps 95% of full from: of a curve that never falls and that goes on, straight over "
    "log2(budget), to full at the length of its longest session, where nothing is evicted",
)


def curve_tables(runs: Sequence[Run]) -> list[Table]:
    """Return the curves of every board with full and a method with a budget."""
    return [
        table
        for board in boards(runs)
        if board.full is not None and any(entry.group.compressed for entry in board.entries)
        for table in _of_board(board, board.full)
    ]


def _of_board(board: Board, full: Entry) -> list[Table]:
    points, left_out = [], []
    for entry in board.entries:
        tokens = _tokens(entry.group)
        if entry.group.compressed and tokens:
            points.append(Point(entry.group.label, tokens, entry.scores))
        elif entry.group.compressed:
            left_out.append(f"left out: {entry.group.name}, whose budget is no number of tokens")
    summary = curve_summary(full.scores, points, _lengths(full.group))
    if summary is None or summary.full <= 0:
        return []
    tables = [_curves(board, summary, left_out)]
    return [*tables, *[_crossovers(board, summary)] * bool(summary.crossovers)]


def _tokens(group: RunGroup) -> int:
    """Return the budget in tokens; a share is as many as in the median run."""
    return round(median(run.tokens or 0 for run in group.runs))


def _lengths(group: RunGroup) -> dict[str, float]:
    """Return how long a sample's session is that keeps everything, median over its trials."""
    found: dict[str, list[int]] = {}
    for run in group.runs:
        for sample, peaks in run.trials.peaks.items():
            found.setdefault(sample, []).extend(peaks)
    return {sample: median(peaks) for sample, peaks in found.items()}


def _curves(board: Board, summary: CurveSummary, left_out: Sequence[str]) -> Table:
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
    groups = f" in {summary.groups} groups" if summary.groups else ""
    notes = [f"{summary.samples} samples{groups}; full scores {100 * summary.full:.1f}%", *left_out]
    columns = (
        Column("method"),
        Column("budgets", Unit.NUMBER),
        Column("area [95% interval]", Unit.RATIO),
        Column("keeps 95% of full from, tokens", Unit.TOKENS),
    )
    return _table("accuracy over budget", "curves", board, columns, rows, notes, LEGEND)


def _keeps(keeps: Keeps) -> Cell:
    text = str(keeps)
    return Cell(text if keeps.point is None else keeps.point, keeps.low, keeps.high, text=text)


def _crossovers(board: Board, summary: CurveSummary) -> Table:
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
    return _table("where methods change places", "crossovers", board, columns, rows)


def _table(
    what: str,
    key: str,
    board: Board,
    columns: Sequence[Column],
    rows: Sequence[Row],
    notes: Sequence[str] = (),
    legend: tuple[str, ...] = (),
) -> Table:
    setting, number = board.setting, len(board.samples)
    names = (setting.task, setting.model, setting.engine, board.conditions, str(number))
    return Table(
        kind=Kind.CURVES,
        key=slug(key, *names),
        title=heading(f"{what}, {number} samples", setting, board.conditions),
        columns=tuple(columns),
        rows=tuple(rows),
        notes=tuple(notes),
        where=place(setting) | {"metric": board.metric, "samples": number},
        legend=legend,
    )
