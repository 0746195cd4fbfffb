"""Accuracy against budget for every board, with pass^k and the figures that papers publish."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from agentbench_kv.results.gate import describe, repeats
from agentbench_kv.results.papers import (
    QUALITY,
    PublishedFigure,
    count_first,
    figures,
    headlines,
    leaders,
)
from agentbench_kv.results.ranking import Board, Entry, boards, rank
from agentbench_kv.results.runs import SCORE, Run, RunGroup, budget_order
from agentbench_kv.results.stats import Interval, Scores, change, holm, level, pass_k, pass_levels
from agentbench_kv.results.tables import model
from agentbench_kv.results.tables.costs import conditions
from agentbench_kv.results.tables.floors import OFF, asked, floor_note, floor_of, floors_of, null_of
from agentbench_kv.results.tables.model import Cell, Column, Kind, Mark, Row, Table, Unit

OURS = "agentkv"  # the method whose firsts its authors count

_LISTED = {
    "locomo_quality": (Kind.ACCURACY, "LoCoMo answer quality"),
    "ablations": (Kind.ACCURACY, "ablations"),
    "utility_coverage": (Kind.ACCURACY, "utility coverage"),
    "efficiency": (Kind.EFFICIENCY, "efficiency"),
    "sidequest_ranges": (Kind.EFFICIENCY, "reductions, as ranges"),
}


def published_rows(
    rows: Sequence[Row], board: Board, budgets: Sequence[int | str | None]
) -> list[Row]:
    """Return a board's rows, each followed by the published figures of its method and budgets."""
    known = headlines(board.setting.task, board.setting.model, board.metric)
    if not known:
        return list(rows)
    groups = [entry.group for entry in board.entries]
    methods = {group.label: group.method for group in groups}
    measured = {(group.method, group.budget) for group in groups if asked_all(group)}
    if any(QUALITY not in run.counts for group in groups for run in group.runs):
        known = [figure for figure in known if figure.metric != QUALITY]
    last = {methods[str(row.cells[0].value)]: i for i, row in enumerate(rows)}
    beside: list[Row] = []
    for i, row in enumerate(rows):
        beside.append(row)
        method = methods[str(row.cells[0].value)]
        if last[method] == i:
            beside += _cited([f for f in known if f.method == method], measured, budgets)
    return beside


def asked_all(group: RunGroup) -> bool:
    """Whether runs read what a paper's did: nothing taken away, and the published data."""
    task = group.first.info.provenance.get("task")
    data = task.get("published_data") if isinstance(task, Mapping) else None
    return floor_of(group.first) == OFF and data is not False


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
        if (method, budget) in measured and figure.value is not None:  # no range
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
        model.slug("published", first.cited, first.benchmark or "", first.model),
        f"published ({first.cited}): {', '.join(map(str, about))}",
        (Column("method"), *(Column(f"{task} {budget}", Unit.NUMBER) for task, budget in columns)),
        rows,
        ("best: highest of the compressed methods, or tied with it", *counts),
        where={"model": first.model, "engine": first.engine or "", "metric": first.metric},
    )


def _listing(file: str) -> Table:
    """Return one row per figure, with every column that any of them fills."""
    kind, what = _LISTED[file]
    skipped = {"file", "value", "low", "high", "setting"}
    known = [
        (f, f.model_dump(exclude=skipped, exclude_none=True) | f.setting) for f in figures(file)
    ]
    names = list(dict.fromkeys(name for _, facts in known for name in facts))
    rows = []
    for figure, facts in known:
        cells = [Cell(str(facts[name])) if name in facts else Cell() for name in names]
        value = figure.value
        if value is None:
            cells.append(Cell(f"{figure.low:g} to {figure.high:g}", figure.low, figure.high))
        else:
            cells.append(Cell(value))
        rows.append(Row(tuple(cells), published=True))
    columns = (*map(Column, names), Column("value", Unit.NUMBER))
    return Table(kind, model.slug("published", file), f"published: {what}", columns, rows)


LEGEND = (
    "marked: of two or more compressed methods at a budget the best, if it leads alone, or it and "
    "all that are tied with it: not to be told from it (paired by sample; in 19 of 20 tables no "
    "two equal methods are told apart)"
)

OWN_SAMPLES = (
    "samples with an event: each method has its own, so that these rows do not compare; samples: "
    "of the row's smallest cell"
)
PUBLISHED = "published: a paper's figure, from other hardware and prompts; never ranked"
GAPS = (
    "p: adjusted for all comparisons of a table with full (Holm); intervals are not: each holds "
    "for itself in 19 of 20 cases"
)
PASSES = (
    "pass^k: the chance that k trials of a sample all succeed: C(c, k) / C(K, k) of its K trials "
    "with c successes, mean over samples (tau2-bench's convention)"
)
NO_BUDGET = "no budget"
FEW_GROUPS = 20
Budgets = Sequence[int | str | None]
Values = Mapping[tuple[str, int | str | None], Cell]  # what stands at a row's name and a budget


@dataclass(frozen=True)
class BoardPage:
    """A board with what stands around it."""

    board: Board
    # Valid runs of the agent that does nothing, on the same task, and of its floors: name and runs.
    null: tuple[tuple[str, RunGroup], ...]

    @property
    def runs(self) -> list[Run]:
        return _placed(self.board)

    @property
    def groups(self) -> int | None:
        return next((e.level.groups for e in self.board.entries if e.level.groups), None)

    @property
    def size(self) -> str:
        inside = f" in {self.groups} groups" if self.groups else ""
        beside = f", {self.board.beside}" if self.board.beside else ""
        return f"{len(self.board.samples)} samples{inside}{beside}"


def accuracy_tables(runs: Sequence[Run], metric: str = SCORE) -> list[Table]:
    """Return the tables of every board that has the metric, `score` or a sub-score."""
    return list(chain(*map(_tables, pages(runs, metric))))


def pass_tables(runs: Sequence[Run]) -> list[Table]:
    """Return a table for each board with scores of 0 or 1 in several trials."""
    # Rows with one trial are left out, and graded scores, of which none need be a success.
    found = (_pass_table(page) for page in pages(runs, SCORE))
    return [table for table in found if table is not None]


def pages(runs: Sequence[Run], metric: str) -> Iterator[BoardPage]:
    """Yield the boards in order; the null agent has its own only where nobody else was asked so."""
    known = boards(runs, metric)
    played = [asked(run) for run in runs if not run.setting.null]
    whole = {
        board.setting for board in known if any(floor_of(run) == OFF for run in _placed(board))
    }
    for board in known:
        placed = _placed(board)
        if board.setting.null and all(asked(run) in played for run in placed):
            continue
        if board.entries or any(metric == SCORE or _own(run, metric) for run, _ in board.out):
            if board.setting in whole and all(floor_of(run) != OFF for run in placed):
                continue
            beside: list[tuple[str, RunGroup]] = []
            if not board.setting.null:
                null = null_of(placed, runs)
                beside = [*([(null.label, null)] if null else []), *floors_of(placed, runs)]
            yield BoardPage(board, tuple(beside))


def _placed(board: Board) -> list[Run]:
    """Return all runs of a board, and those that are on none."""
    inside = [run for entry in board.entries for run in entry.group.runs]
    return [*inside, *(run for run, _ in board.out)]


def _tables(page: BoardPage) -> list[Table]:
    compressed = [entry for entry in page.board.entries if entry.group.compressed]
    idle = [e for e in compressed if not e.scores.parts.keys() <= e.group.triggered]
    tables = [_scores_table(page, compressed, all_triggered=bool(compressed) and not idle)]
    if idle:
        tables.append(_triggered_table(page, compressed))
    full = page.board.full
    if compressed and full is not None:
        tables.append(_gap_table(page, compressed, full))
    return tables


def _scores_table(page: BoardPage, compressed: Sequence[Entry], all_triggered: bool) -> Table:
    board = page.board
    null = [(name, each, own) for name, each in page.null if (own := _floor(each, board))]
    groups = [*(entry.group for entry in board.entries), *(group for _, group, _ in null)]
    budgets = _budgets([*groups, *(run for run, _ in board.out)])
    marks = _marks(board)
    values = {
        (entry.group.label, entry.group.budget): _cell(entry.level, marks.get(id(entry)))
        for entry in board.entries
    }
    rows = [_row(label, budgets, values) for label in _labels(board.entries)]
    rows = published_rows(rows, board, budgets)
    for name, group, scores in null:
        partial = scores.parts.keys() != board.samples and bool(board.samples)
        name = f"{name} on {len(scores.parts)} samples" if partial else name
        rows.append(_row(name, budgets, {(name, group.budget): _cell(level(scores))}))
    for run, reason in board.out:
        own = _own(run, board.metric)
        found = {(run.label, run.budget): _cell(level(own))} if own else {}
        rows.append(Row(_row(run.label, budgets, found).cells, reason))
    again = repeats(page.runs, board.metric)
    notes = [*_notes(page), *[describe(again)] * bool(again), *conditions(page.runs)]
    full = None if board.full is None else board.full.group
    notes += filter(None, [floor_note(full, [group for _, group, _ in null], board.metric)])
    if compressed and board.full is None:
        notes.append("no run of full on these samples: nothing to compare with")
    notes += [*board.unplaced, *board.seeds]
    if all_triggered:
        notes.append("every sample of every compressed run had an event: the subset is the whole")
    legend = [LEGEND] * bool(compressed) + [PUBLISHED] * any(row.published for row in rows)
    legend += [describe(again)] * (not again)
    columns = _columns(budgets, Unit.SHARE)
    return _table(page, "all samples", "%", columns, rows, notes, legend)


def _triggered_table(page: BoardPage, compressed: Sequence[Entry]) -> Table:
    """Return the scores of samples with an event, without ranks: they are others for each row."""
    some = [(entry.group, entry.scores.only(entry.group.triggered)) for entry in compressed]
    known = [(group, scores) for group, scores in some if scores.parts]
    values = {(group.label, group.budget): _cell(level(scores)) for group, scores in known}
    fewest: dict[str, int] = {}
    for group, scores in known:
        fewest[group.label] = min(len(scores.parts), fewest.get(group.label, len(scores.parts)))
    budgets = _budgets(group for group, _ in known)
    rows = [_row(label, budgets, values, Cell(number)) for label, number in fewest.items()]
    columns = (Column("samples", Unit.NUMBER), *_columns(budgets, Unit.SHARE))
    return _table(page, "samples with an event", "%", columns, rows, [], [OWN_SAMPLES])


def _gap_table(page: BoardPage, compressed: Sequence[Entry], full: Entry) -> Table:
    gaps = [(entry.group, change(entry.scores, full.scores)) for entry in compressed]
    known = [(group, gap) for group, gap in gaps if gap is not None]
    adjusted = holm([gap.p_value for _, gap in known])
    values = {
        (group.label, group.budget): Cell(gap.point, gap.low, gap.high, p_value)
        for (group, gap), p_value in zip(known, adjusted, strict=True)
    }
    budgets = _budgets(entry.group for entry in compressed)
    rows = [_row(label, budgets, values) for label in _labels(compressed)]
    notes = [f"less {full.group.label}, in points, paired by sample; {len(known)} comparisons"]
    columns = _columns(budgets, Unit.POINTS)
    return _table(page, "difference to full", "points", columns, rows, notes, [GAPS])


def _marks(board: Board) -> dict[int, Mark]:
    """Mark who leads a budget of two methods, alone or with others; never a score of 0."""
    contests: dict[int | str | None, list[Entry]] = {}
    for entry in board.placed:
        contests.setdefault(entry.group.budget, []).append(entry)
    marks: dict[int, Mark] = {}
    for contest in rank(list(contests.values()), small=board.too_small is not None):
        if len({placed.entry.group.method for placed in contest}) > 1:
            first = [placed.entry for placed in contest if placed.rank == 1]
            mark = Mark.BEST if len(first) == 1 else Mark.TIED
            marks |= {id(entry): mark for entry in first if entry.scores.mean > 0}
    return marks


def _labels(entries: Iterable[Entry]) -> list[str]:
    """Return the names of the rows, full first."""
    first = sorted(entries, key=lambda e: (e.group.compressed, e.group.method != "full"))
    return list(dict.fromkeys(entry.group.label for entry in first))


def _budgets(groups: Iterable[RunGroup | Run]) -> Budgets:
    return sorted({group.budget for group in groups}, key=budget_order)


def _columns(budgets: Budgets, unit: Unit) -> list[Column]:
    return [Column(NO_BUDGET if budget is None else str(budget), unit) for budget in budgets]


def _cell(known: Interval, mark: Mark | None = None) -> Cell:
    return Cell(known.point, known.low, known.high, mark=mark)


def _row(label: str, budgets: Budgets, values: Values, *more: Cell) -> Row:
    return Row((Cell(label), *more, *(values.get((label, each), Cell()) for each in budgets)))


def _floor(group: RunGroup, board: Board) -> Scores | None:
    """Return what doing nothing scores on the board's samples; None if it played none of them."""
    scores = group.scores(board.metric)
    own = scores.only(set(board.samples)) if scores and board.samples else scores
    return own if own and own.parts else None


def _own(run: Run, metric: str) -> Scores | None:
    scores = RunGroup(run.label, (run,)).scores(metric)
    return scores if scores and scores.parts else None


def _notes(page: BoardPage) -> list[str]:
    """Say what the figures rest on: too little, few groups, trials that were played twice."""
    board = page.board
    few = page.groups is not None and page.groups < FEW_GROUPS
    again = [f"{e.group.name} ({e.group.repeated})" for e in board.entries if e.group.repeated]
    notes = (
        board.too_small if board.entries else None,
        f"fewer than {FEW_GROUPS} groups: intervals are wide and p-values rough" * few,
        f"trials played more than once count once, the earliest: {', '.join(again)}" * bool(again),
    )
    return [note for note in notes if note]


def _table(
    page: BoardPage,
    subset: str,
    unit: str,
    columns: Sequence[Column],
    rows: Sequence[Row],
    notes: Sequence[str],
    legend: Sequence[str],
) -> Table:
    board = page.board
    metric, number = board.metric, len(board.samples)
    spoken = "score" if metric == SCORE else f"sub-score {metric}"
    return model.setting_table(
        Kind.ACCURACY,
        f"{spoken}, {unit} [95% interval], {subset}, {page.size}",
        board.setting,
        (Column("method"), *columns),
        rows,
        notes,
        legend,
        board.conditions,
        ("accuracy", metric, subset, str(number) * bool(board.beside)),
        metric=metric,
        subset=subset,
        samples=number,
    )


def _pass_table(page: BoardPage) -> Table | None:
    board = page.board
    asked: list[tuple[str, RunGroup, Iterable[str], str | None]]
    asked = [(e.group.label, e.group, board.samples, None) for e in board.entries]
    asked += [(name, group, board.samples or group.trials, None) for name, group in page.null]
    for run, reason in board.out:
        group = RunGroup(run.label, (run,))
        asked.append((run.label, group, group.trials, reason))
    found = []
    for name, group, samples, below in asked:
        trials = {each: group.trials[each] for each in samples if each in group.trials}
        if powers := pass_levels(trials, group.clusters):
            budget = None if group.budget is None else str(group.budget)
            most = min(map(len, trials.values()))  # that each sample has at least
            first = (Cell(name), Cell(budget), Cell(len(trials)), Cell(most))
            found.append((most, first, powers, below))
    if not found:
        return None
    names = {name for _, _, powers, _ in found for name in powers}
    ordered = sorted(names, key=lambda name: pass_k(name) or 0)
    tries = sorted({most for most, *_ in found})
    return model.setting_table(
        Kind.ACCURACY,
        f"pass^k, % [95% interval], {page.size}",
        board.setting,
        (
            *(Column("method"), Column("budget")),
            *(Column("samples", Unit.NUMBER), Column("K", Unit.NUMBER)),
            *(Column(name, Unit.SHARE) for name in ordered),
        ),
        [
            Row((*first, *(_cell(powers[k]) if k in powers else Cell() for k in ordered)), below)
            for _, first, powers, below in found
        ],
        (f"K = {', '.join(map(str, tries))} trials", *conditions(page.runs)),
        (PASSES,),
        board.conditions,
        ("passk", str(len(board.samples)) * bool(board.beside)),
        metric="pass^k",
        samples=len(board.samples),
    )
