"""Accuracy against budget: all samples, those with an event, and the difference to full."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from agentbench_kv.results.tables.beside import published_rows
from agentbench_kv.results.tables.cells import NULL, Budgets, View, views
from agentbench_kv.results.tables.conditions import conditions
from agentbench_kv.results.tables.gaps import Entry, Gap, against_full, marks, unshared
from agentbench_kv.results.tables.groups import Group, budget_order
from agentbench_kv.results.tables.measured import SCORE, Measured
from agentbench_kv.results.tables.model import Cell, Column, Kind, Row, Table, Unit
from agentbench_kv.results.tables.noise import noise_line
from agentbench_kv.results.tables.pairing import Scores, intervals
from agentbench_kv.results.tables.words import heading, slug, spoken

__all__ = ["accuracy_tables"]

LEGEND = (
    "best of a budget: the highest compressed method, and every one whose paired 95% interval "
    "against it includes 0"
)
NO_BUDGET = "no budget"
FEW_GROUPS = 20

Cells = Mapping[tuple[str, int | str | None], Cell]


def accuracy_tables(measured: Sequence[Measured], metric: str = SCORE) -> list[Table]:
    """Return the tables of every task, model and engine that has the metric.

    Parameters
    ----------
    measured : sequence of Measured
        Valid runs are ranked; the others come below the line with the reason.
    metric : str
        `score` or a sub-score.
    """
    return [table for view in views(measured, metric) for table in _tables(view)]


def _tables(view: View) -> list[Table]:
    whole = _entries(view, lambda group: group.scores(view.metric))
    some = _entries(view, lambda group: _triggered(group, view.metric))
    tables = [_scores_table(view, whole, all(map(_wholly_triggered, some)) and bool(some))]
    if not all(map(_wholly_triggered, some)):
        tables.append(_triggered_table(view, some))
    if any(entry.group.compressed for entry in whole):
        tables.append(_gap_table(view, whole, against_full(whole)))
    return tables


def _entries(view: View, choose: Callable[[Group], Scores | None]) -> list[Entry]:
    """Return the groups that have what is asked for."""
    found = [(group, choose(group)) for group in view.groups]
    return [Entry(group, scores) for group, scores in found if scores and scores.parts]


def _triggered(group: Group, metric: str) -> Scores | None:
    scores = group.scores(metric) if group.compressed else None
    return scores.only(group.triggered) if scores else None


def _wholly_triggered(entry: Entry) -> bool:
    whole = {name for run in entry.group.runs for name in run.arm.scores}
    return entry.group.triggered >= whole


def _scores_table(view: View, entries: Sequence[Entry], same: bool) -> Table:
    null = [Entry(group, scores) for group in view.null if (scores := group.scores(view.metric))]
    rows = _measured_rows(entries, view.budgets)
    rows = published_rows(rows, view.place, [e.group for e in entries], view.budgets, view.metric)
    rows += [_row(NULL, view.budgets, _score_cells([entry]), [entry]) for entry in null]
    rows += _unranked(view)
    notes = [*_notes(entries), noise_line(view.runs, view.metric), *conditions(view.runs)]
    if same:
        notes.append("every sample of every compressed run had an event: the subset is the whole")
    if any(row.published for row in rows):
        notes.append("published: a paper's figure, from other hardware and prompts; never ranked")
    return _table(view, "all samples", Unit.SHARE, rows, notes)


def _triggered_table(view: View, entries: Sequence[Entry]) -> Table:
    budgets = sorted({entry.group.budget for entry in entries}, key=budget_order)
    rows = _measured_rows(entries, budgets)
    return _table(view, "samples with an event", Unit.SHARE, rows, _notes(entries), budgets)


def _gap_table(view: View, entries: Sequence[Entry], gaps: Sequence[Gap]) -> Table:
    cells = {
        (gap.entry.group.label, gap.entry.group.budget): Cell(
            gap.difference.point, gap.difference.low, gap.difference.high, gap.adjusted
        )
        for gap in gaps
    }
    budgets = sorted({gap.entry.group.budget for gap in gaps}, key=budget_order)
    labels = dict.fromkeys(gap.entry.group.label for gap in gaps)
    rows = []
    for label in labels:
        shared = min(gap.difference.n for gap in gaps if gap.entry.group.label == label)
        values = [cells.get((label, budget), Cell()) for budget in budgets]
        rows.append(Row((Cell(label), Cell(shared), *values)))
    return _table(view, "difference to full", Unit.POINTS, rows, _gap_notes(entries, gaps), budgets)


def _gap_notes(entries: Sequence[Entry], gaps: Sequence[Gap]) -> list[str]:
    if all(entry.group.compressed for entry in entries):
        return ["no run of full: nothing to compare with"]
    compared = {id(gap.entry) for gap in gaps}
    alone = [e for e in entries if e.group.compressed and id(e) not in compared]
    names = dict.fromkeys(f"{e.group.label} at {e.group.budget}" for e in alone)
    notes = [f"no full of the same settings and samples: {', '.join(names)}"] * bool(names)
    if gaps:
        fulls = dict.fromkeys(gap.full.group.label for gap in gaps)
        which = f"{' or '.join(fulls)}{', the one of the same settings' * (len(fulls) > 1)}"
        adjusted = f"p adjusted for the {len(gaps)} comparisons of this table (Holm)"
        notes.append(f"less {which}, in points, paired by sample; {adjusted}")
    return notes


def _measured_rows(entries: Sequence[Entry], budgets: Budgets) -> list[Row]:
    cells = _score_cells(entries)
    labels: dict[str, list[Entry]] = {}
    for entry in entries:
        labels.setdefault(entry.group.label, []).append(entry)
    return [_row(label, budgets, cells, same) for label, same in labels.items()]


def _score_cells(entries: Sequence[Entry]) -> Cells:
    found = zip(
        entries, intervals([entry.scores for entry in entries]), marks(entries), strict=True
    )
    return {
        (entry.group.label, entry.group.budget): Cell(ends.point, ends.low, ends.high, mark=mark)
        for entry, ends, mark in found
    }


def _row(label: str, budgets: Budgets, cells: Cells, entries: Sequence[Entry]) -> Row:
    """Return a row of one method; its samples are those of its smallest cell."""
    fewest = min(len(entry.scores.parts) for entry in entries)
    name = entries[0].group.label
    values = [cells.get((name, budget), Cell()) for budget in budgets]
    return Row((Cell(label), Cell(fewest), *values))


def _unranked(view: View) -> list[Row]:
    """Return the rows below the line, one for each run."""
    scored = [run for run in view.below if view.metric in run.scores]
    ends = intervals([run.scores[view.metric] for run in scored])
    cells = {
        id(run): Cell(each.point, each.low, each.high)
        for run, each in zip(scored, ends, strict=True)
    }
    return [_below(view, run, cells.get(id(run), Cell())) for run in view.below]


def _below(view: View, run: Measured, cell: Cell) -> Row:
    number = len(run.scores[view.metric].parts) if view.metric in run.scores else 0
    values = [cell if budget == run.arm.budget else Cell() for budget in view.budgets]
    return Row((Cell(run.label), Cell(number), *values), below=run.reason)


def _notes(entries: Sequence[Entry]) -> list[str]:
    compressed = any(entry.group.compressed for entry in entries)
    notes = (LEGEND * compressed, unshared(entries), _groups_note(entries))
    return [note for note in notes if note]


def _groups_note(entries: Sequence[Entry]) -> str:
    """Say how many units the intervals really rest on, where samples are not independent."""
    groups = [entry.scores.groups for entry in entries if entry.scores.groups]
    if not groups:
        return ""
    rough = f"; with fewer than {FEW_GROUPS} the interval is rough" * (min(groups) < FEW_GROUPS)
    return f"samples come in {min(groups)} groups, and groups are what is resampled{rough}"


def _table(
    view: View,
    subset: str,
    unit: Unit,
    rows: Sequence[Row],
    notes: Sequence[str],
    budgets: Budgets | None = None,
) -> Table:
    place, metric = view.place, view.metric
    columns = [
        Column(NO_BUDGET if budget is None else str(budget), unit)
        for budget in (view.budgets if budgets is None else budgets)
    ]
    percent = "%" if unit is Unit.SHARE else "points"
    return Table(
        kind=Kind.ACCURACY,
        key=slug("accuracy", place.task, place.model, place.engine, metric, subset),
        title=heading(f"{spoken(metric)}, {percent} [95% interval], {subset}", place),
        columns=(Column("method"), Column("samples", Unit.NUMBER), *columns),
        rows=tuple(rows),
        notes=tuple(notes),
        where={
            "task": place.task,
            "model": place.model,
            "engine": place.engine,
            "metric": metric,
            "subset": subset,
        },
    )
