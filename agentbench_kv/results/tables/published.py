"""Papers' figures: beside ours where the cell is the same, and the papers' own tables."""

from __future__ import annotations

from collections.abc import Sequence

from agentbench_kv.results.papers import HEADLINES, PublishedFigure, count_first, figures, leaders
from agentbench_kv.results.ranking import Board
from agentbench_kv.results.runs import SCORE, Setting
from agentbench_kv.results.tables.model import Cell, Column, Kind, Mark, Row, Table, Unit, slug

OURS = "agentkv"
"""The method whose firsts its authors count."""

_LISTED = {
    "locomo_quality": (Kind.ACCURACY, "LoCoMo answer quality"),
    "ablations": (Kind.ACCURACY, "ablations"),
    "utility_coverage": (Kind.ACCURACY, "utility coverage"),
    "efficiency": (Kind.EFFICIENCY, "efficiency"),
    "sidequest_ranges": (Kind.EFFICIENCY, "reductions, as ranges"),
}


def same_cell(setting: Setting) -> list[PublishedFigure]:
    """Return the headline figures of the same benchmark, task and model."""
    return [
        figure
        for figure in figures("accuracy_vs_budget")
        if f"{figure.benchmark}/{figure.task}" == setting.task
        and figure.model.casefold() == setting.model.casefold()
        and figure.metric in HEADLINES
    ]


def published_rows(
    rows: Sequence[Row], board: Board, budgets: Sequence[int | str | None]
) -> list[Row]:
    """Return a board's rows, each followed by the published figures of its method and budgets."""
    # Papers only publish the headline score.
    known = same_cell(board.setting) if board.metric == SCORE else []
    groups = [entry.group for entry in board.entries]
    methods = {group.label: group.method for group in groups}
    measured = {(group.method, group.budget) for group in groups}
    last = {methods[str(row.cells[0].value)]: i for i, row in enumerate(rows)}
    beside: list[Row] = []
    for i, row in enumerate(rows):
        beside.append(row)
        method = methods[str(row.cells[0].value)]
        if last[method] == i:
            beside += _cited([f for f in known if f.method == method], measured, budgets)
    return beside


def _cited(
    known: Sequence[PublishedFigure],
    measured: set[tuple[str, int | str | None]],
    budgets: Sequence[int | str | None],
) -> list[Row]:
    cited: dict[str, dict[int | str | None, Cell]] = {}
    for figure in known:
        # A paper repeats full at every budget; ours has none.
        method = figure.method or ""
        budget = figure.budget if (method, None) not in measured else None
        if (method, budget) in measured and figure.value is not None:
            name = f"{method}, {figure.cited}"
            cited.setdefault(name, {})[budget] = Cell(figure.value / 100)
    return [
        Row((Cell(name), *(cells.get(budget, Cell()) for budget in budgets)), published=True)
        for name, cells in cited.items()
    ]


def published_tables() -> list[Table]:
    """Return accuracy against budget as the paper lays it out, then everything else as lists."""
    known = figures("accuracy_vs_budget")
    places = dict.fromkeys((f.cited, f.benchmark or "", f.model) for f in known)
    tables = [
        _accuracy([f for f in known if (f.cited, f.benchmark, f.model) == place])
        for place in places
    ]
    return tables + [_listing(file) for file in _LISTED]


def _accuracy(known: Sequence[PublishedFigure]) -> Table:
    first = known[0]
    columns = dict.fromkeys((f.task, f.budget) for f in known)
    best: dict[int, Mark] = {}
    for column in columns:
        first_ones = leaders(f for f in known if (f.task, f.budget) == column)
        mark = Mark.BEST if len(first_ones) == 1 else Mark.TIED
        best |= dict.fromkeys(map(id, first_ones), mark)
    rows = []
    for method in dict.fromkeys(f.method for f in known):
        own = {(f.task, f.budget): f for f in known if f.method == method}
        cells = [
            Cell(f.value, mark=best.get(id(f))) if f else Cell() for f in map(own.get, columns)
        ]
        rows.append(Row((Cell(method), *cells), published=True))
    counts = [
        f"{count.method} is first or tied first among compressed methods in {count.first} of "
        f"{count.cells} {count.benchmark} cells (all models)"
        for count in count_first(OURS)
        if count.benchmark == first.benchmark
    ]
    about = (first.metric, first.benchmark, first.model, first.engine)
    return Table(
        Kind.ACCURACY,
        slug("published", first.cited, first.benchmark or "", first.model),
        f"published ({first.cited}): {', '.join(map(str, about))}",
        (Column("method"), *(Column(f"{task} {budget}", Unit.NUMBER) for task, budget in columns)),
        rows,
        ("best: highest of the compressed methods, or tied with it", *counts),
        where={"model": first.model, "engine": first.engine or "", "metric": first.metric},
    )


def _listing(file: str) -> Table:
    """Return one row per figure, with every column that any of them fills."""
    kind, what = _LISTED[file]
    known = [(figure, _description(figure)) for figure in figures(file)]
    names = list(dict.fromkeys(name for _, texts in known for name in texts))
    rows = [
        Row((*(Cell(texts.get(name)) for name in names), _value(figure)), published=True)
        for figure, texts in known
    ]
    columns = (*map(Column, names), Column("value", Unit.NUMBER))
    return Table(kind, slug("published", file), f"published: {what}", columns, rows)


def _description(figure: PublishedFigure) -> dict[str, str]:
    skipped = {"file", "value", "low", "high", "setting"}
    texts = figure.model_dump(exclude=skipped, exclude_none=True) | figure.setting
    return {name: str(text) for name, text in texts.items()}


def _value(figure: PublishedFigure) -> Cell:
    if figure.value is not None:
        return Cell(figure.value)
    return Cell(f"{figure.low:g} to {figure.high:g}", figure.low, figure.high)
