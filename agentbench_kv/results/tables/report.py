"""All tables of a set of runs, in the order people read them; curves over budgets as tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median

from agentbench_kv.errors import UsageError, unknown_name
from agentbench_kv.results.curves import CurveSummary, Point, curve_summary
from agentbench_kv.results.fidelity import of_fidelity
from agentbench_kv.results.ranking import Board, Entry, boards
from agentbench_kv.results.runs import SCORE, Run
from agentbench_kv.results.tables.accuracy import accuracy_tables, pass_tables
from agentbench_kv.results.tables.costs import efficiency_tables, throughput_tables
from agentbench_kv.results.tables.fidelity import fidelity_tables
from agentbench_kv.results.tables.ledger import ledger_tables
from agentbench_kv.results.tables.model import Cell, Column, Kind, Row, Table, Unit, setting_table
from agentbench_kv.results.tables.parts import part_tables

LEGEND = (
    "area: under the curve over log2(budget), relative to full; 1 is as good as full",
    "keeps 95% of full from: of a curve that never falls and that goes on, straight over "
    "log2(budget), to full at the length of its longest session, where nothing is evicted",
)

_CURVES = (
    Column("method"),
    Column("budgets", Unit.NUMBER),
    Column("area [95% interval]", Unit.RATIO),
    Column("keeps 95% of full from, tokens", Unit.TOKENS),
)

_CROSSOVERS = (
    Column("leads below"),
    Column("leads above"),
    Column("budget, tokens [95% interval]", Unit.TOKENS),
    Column("of resamples %", Unit.SHARE),
)


def curve_tables(runs: Sequence[Run]) -> list[Table]:
    """Return the curves of every board with full and a method with a budget."""
    return [
        table
        for board in boards(runs)
        if board.full is not None and any(entry.group.compressed for entry in board.entries)
        for table in _of_board(board, board.full)
    ]


def _of_board(board: Board, full: Entry) -> Iterator[Table]:
    points, left_out = [], []
    for entry in board.placed:
        # A share is as many tokens as in the median run.
        tokens = round(median(run.tokens or 0 for run in entry.group.runs))
        if tokens:
            first = entry.group.first
            lossless = not (first.remembers or first.spec.get("kv_dtype"))
            evicted = board.fired(entry) > 0.5
            points.append(Point(entry.group.label, tokens, entry.scores, lossless, evicted))
        else:
            left_out.append(f"left out: {entry.group.name}, whose budget is no number of tokens")
    # How long a sample's session is that keeps everything.
    lengths = {sample: median(peaks) for sample, peaks in full.group.sizes("peak_live").items()}
    summary = curve_summary(full.scores, points, lengths)
    if summary is None or summary.full <= 0:
        return
    number = len(board.samples)
    table = partial(
        setting_table, setting=board.setting, kind=Kind.CURVES, conditions=board.conditions,
        metric=board.metric, samples=number,
    )  # fmt: skip
    groups = f" in {summary.groups} groups" if summary.groups else ""
    notes = [f"{summary.samples} samples{groups}; full scores {100 * summary.full:.1f}%", *left_out]
    notes += board.unplaced
    yield table(
        what=f"accuracy over budget, {number} samples", apart=("curves", str(number)),
        columns=_CURVES, rows=_curves(summary), notes=notes, legend=LEGEND,
    )  # fmt: skip
    if crossovers := summary.crossovers:
        budgets = [Cell(each.budget, each.low, each.high) for each in crossovers]
        rows = [
            Row((Cell(each.below), Cell(each.above), budget, Cell(each.support)))
            for each, budget in zip(crossovers, budgets, strict=True)
        ]
        yield table(
            what=f"where methods change places, {number} samples",
            apart=("crossovers", str(number)), columns=_CROSSOVERS, rows=rows,
        )  # fmt: skip


def _curves(summary: CurveSummary) -> list[Row]:
    rows = []
    for curve in summary.curves:
        budgets, area = curve.budgets, curve.area
        text = f"{len(budgets)}, {budgets[0]} to {budgets[-1]}"
        over = Cell(area.point, area.low, area.high) if area else Cell()
        keeps = Cell()
        if found := curve.keeps:
            words = str(found)
            keeps = Cell(
                words if found.point is None else found.point, found.low, found.high, text=words
            )
        rows.append(Row((Cell(curve.label), Cell(len(budgets), text=text), over, keeps)))
    return rows


def report_tables(
    runs: Sequence[Run], kinds: Sequence[Kind] = (), metrics: Sequence[str] = ()
) -> list[Table]:
    """Build the tables that have data, all kinds unless named, of the score unless metrics are."""
    # A UsageError if no run has a metric, or there is nothing to show.
    wanted = list(dict.fromkeys(metrics)) or [SCORE]
    known = {SCORE} | {name for run in runs for name in run.summary.sub_scores}
    for metric in wanted:
        if metric not in known:
            raise unknown_name("metric", metric, known)
    # Those of fidelity have tables of their own in the place of a score's.
    scored = [run for run in runs if not of_fidelity(run)]
    builders: dict[Kind, Callable[[Sequence[Run]], list[Table]]] = {
        Kind.ACCURACY: partial(_accuracy, wanted, scored, parts=not metrics),
        Kind.EFFICIENCY: _efficiency,
        Kind.THROUGHPUT: throughput_tables,
        Kind.CURVES: lambda _: curve_tables(scored),
        Kind.FIDELITY: fidelity_tables,
    }
    chosen = [kind for kind in Kind if kind in (kinds or Kind)]
    tables = [table for kind in chosen for table in builders[kind](runs)]
    if not tables:
        asked = ", ".join(kind.value for kind in chosen)
        raise UsageError(f"nothing to show of {len(runs)} runs in {asked}")
    return tables


def _accuracy(
    metrics: Sequence[str], scored: Sequence[Run], runs: Sequence[Run], *, parts: bool
) -> list[Table]:
    """Return scores, pass^k, and if nobody chose a metric the parts that come first."""
    tables = [
        table
        for metric in metrics
        for table in accuracy_tables(scored if metric == SCORE else runs, metric)
    ]
    tables += part_tables(scored) if parts else []
    return tables + (pass_tables(scored) if SCORE in metrics else [])


def _efficiency(runs: Sequence[Run]) -> list[Table]:
    return [*efficiency_tables(runs), *ledger_tables(runs)]
