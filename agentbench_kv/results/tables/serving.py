"""Tables of repeated measurements under load: every load, then each arm at its best."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from agentbench_kv.results.papers import PublishedFigure, figures
from agentbench_kv.results.serving.folder import ServingFolder
from agentbench_kv.results.serving.records import BASES, ServingPlan
from agentbench_kv.results.serving.summary import (
    SPEED,
    Best,
    ServingCell,
    ServingSummary,
    summarize_serving,
)
from agentbench_kv.results.stats import REPETITIONS, Median
from agentbench_kv.results.tables.model import Cell, Column, Kind, Row, Table, Unit, slug

DUMMY = "dummy weights: speed of these shapes only; nothing here says anything about accuracy"
_SPEED = Column("output tok/s", Unit.RATE)
_RATIO = "best_output_tok_s_ratio_vs_full"

Value = Callable[[ServingCell], Cell]


def serving_tables(folders: Sequence[Path]) -> list[Table]:
    """Return the tables of folders of measurements; a UsageError if one cannot be read."""
    tables = []
    for path in folders:
        folder = ServingFolder.read(path)
        tables += summary_tables(summarize_serving(folder.plan, folder.measurements()))
    return tables


def summary_tables(summary: ServingSummary) -> list[Table]:
    """Return two tables for every shape that was measured."""
    tables = []
    for shape in summary.plan.shapes:
        cells = [cell for cell in summary.cells if cell.shape == shape]
        best = [each for each in summary.best if each.shape == shape]
        if cells:
            tables.append(_loads(summary.plan, shape, cells))
        if best:
            tables.append(_bests(summary.plan, shape, best))
    return tables


def _loads(plan: ServingPlan, shape: str, cells: Sequence[ServingCell]) -> Table:
    columns = _columns(cells)
    rows = [
        Row(tuple(of(cell) for of in columns.values()), "; ".join(cell.reasons) or None)
        for cell in cells
    ]
    return _table(plan, shape, "under load", columns, rows, _notes(plan, cells))


def _columns(cells: Sequence[ServingCell]) -> dict[Column, Value]:
    medians = {
        Column("TTFT ms", Unit.MILLISECONDS): "median_ttft_ms",
        Column("TTFT p99", Unit.MILLISECONDS): "p99_ttft_ms",
        Column("TPOT ms", Unit.MILLISECONDS): "median_tpot_ms",
        Column("TPOT p99", Unit.MILLISECONDS): "p99_tpot_ms",
        Column("E2E ms", Unit.MILLISECONDS): "median_e2el_ms",
        Column("decoding at once", Unit.NUMBER): "max_concurrent_decodes",
        Column("failed", Unit.NUMBER): "failed",
    }
    accounts = {
        Column("peak live", Unit.TOKENS): "median_peak_live",
        Column("decode KV", Unit.TOKENS): "mean_decode_kv",
        Column("logical", Unit.TOKENS): "median_logical",
    }
    columns: dict[Column, Value] = {
        Column("load"): lambda cell: Cell(cell.load),
        Column("arm"): lambda cell: Cell(cell.arm),
        Column("repeats", Unit.NUMBER): lambda cell: Cell(cell.repetitions),
        _SPEED: lambda cell: _cell(cell.figures.get(SPEED)),
    }
    columns |= {column: partial(_ratio, base) for base, column in _bases(cells).items()}
    columns |= {column: partial(_median, name) for column, name in medians.items()}
    if any(cell.kv for cell in cells):
        columns |= {column: partial(_kv, name) for column, name in accounts.items()}
    return columns


def _bases(known: Sequence[ServingCell | Best]) -> dict[str, Column]:
    """Return the arms that others are compared with here, and the column of each."""
    bases = [base for base in BASES if any(base in each.ratios for each in known)]
    return {base: Column(f"x {base}", Unit.RATIO) for base in bases}


def _ratio(base: str, cell: ServingCell | Best) -> Cell:
    return _cell(cell.ratios.get(base))


def _median(name: str, cell: ServingCell) -> Cell:
    return Cell(cell.figures[name].point) if name in cell.figures else Cell()


def _kv(name: str, cell: ServingCell) -> Cell:
    return Cell(cell.kv.get(name))


def _cell(known: Median | None) -> Cell:
    if known is None:
        return Cell()
    return Cell(known.point, known.low, known.high) if known.n > 1 else Cell(known.point)


def _bests(plan: ServingPlan, shape: str, best: Sequence[Best]) -> Table:
    bases = _bases(best)
    rows = [
        Row((
            Cell(each.arm), Cell(each.load), _cell(each.speed),
            *(_ratio(base, each) for base in bases),
        ))
        for each in best
    ]  # fmt: skip
    if "full" in bases:
        rows += [_published(figure, [*bases]) for figure in _papers(plan, shape)]
    columns = (Column("arm"), Column("load"), _SPEED, *bases.values())
    notes = [
        "best load: highest median of those without a failed request; ratios pair repetitions",
        *[DUMMY] * (plan.weights == "dummy"),
    ]
    return _table(plan, shape, "each arm at its best load", columns, rows, notes)


def _papers(plan: ServingPlan, shape: str) -> list[PublishedFigure]:
    """Return published ratios at best load for this model, shape and methods."""
    methods = {(arm.method or "").partition("@")[0] for arm in plan.arms}
    return [
        figure
        for figure in figures("efficiency")
        if figure.metric == _RATIO
        and figure.method in methods
        and figure.setting.get("workload") == shape
        and plan.model_name.startswith(figure.model)
    ]


def _published(figure: PublishedFigure, bases: Sequence[str]) -> Row:
    name = f"{figure.method} at {figure.budget}, {figure.cited}, {figure.setting.get('gpu')}"
    ratios = [Cell(figure.value) if base == "full" else Cell() for base in bases]
    return Row((Cell(name), Cell(), Cell(), *ratios), published=True)


def _notes(plan: ServingPlan, cells: Sequence[ServingCell]) -> list[str]:
    fewest = min(cell.repetitions for cell in cells)
    notes = [
        "load: cN is N sessions at once, N/s is sessions that begin per second (Poisson)",
        "medians over repetitions with 95% intervals; ratios are paired by repetition",
        "TTFT, TPOT, E2E: median and p99 of requests; a request is one turn",
    ]
    if any(cell.kv for cell in cells):
        notes.append(
            "peak live, decode KV, logical: tokens per layer and KV head; medians over sessions, "
            "and the mean over decoded tokens"
        )
    if fewest < REPETITIONS:
        notes.append(f"fewest repetitions: {fewest}; fewer than {REPETITIONS} decide nothing")
    if plan.weights == "dummy":
        notes.append(DUMMY)
    if plan.weights == "unknown":
        notes.append("servers were given by URL: what they run is what their arms are called")
    return notes


def _table(
    plan: ServingPlan,
    shape: str,
    what: str,
    columns: Iterable[Column],
    rows: Sequence[Row],
    notes: Sequence[str],
) -> Table:
    turns = "1 turn" if plan.turns == 1 else f"{plan.turns} turns"
    return Table(
        Kind.THROUGHPUT,
        slug("serving", plan.model_name, plan.engine, shape, what),
        f"serving, {what}: {shape}, {turns}, {plan.model_name}, {plan.engine}",
        tuple(columns),
        rows,
        notes,
        {"task": f"serving {shape}", "model": plan.model_name, "engine": plan.engine},
    )
