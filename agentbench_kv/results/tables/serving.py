"""Tables of repeated measurements under load: every load, then each arm at its best."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentbench_kv.results.papers import PublishedFigure, figures
from agentbench_kv.results.serving.folder import ServingFolder
from agentbench_kv.results.serving.records import BASES, ServingPlan
from agentbench_kv.results.serving.summary import (
    Best,
    ServingCell,
    ServingSummary,
    summarize_serving,
)
from agentbench_kv.results.stats import REPETITIONS, Median
from agentbench_kv.results.tables.model import Cell, Column, Kind, Row, Table, Unit, slug

DUMMY = "dummy weights: speed of these shapes only; nothing here says anything about accuracy"
_RATIO = "best_output_tok_s_ratio_vs_full"

Value = Callable[[ServingCell], Cell]


@dataclass(frozen=True)
class _Figure:
    title: str
    unit: Unit
    of: Value


def serving_tables(folders: Sequence[Path]) -> list[Table]:
    """Return the tables of some folders of measurements.

    Raises
    ------
    UsageError
        If a folder holds no measurement, or something that cannot be read.
    """
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
        Row(
            (Cell(cell.load), Cell(cell.arm), *(column.of(cell) for column in columns)),
            below="; ".join(cell.reasons) or None,
        )
        for cell in cells
    ]
    return _table(
        plan,
        shape,
        "under load",
        (Column("load"), Column("arm"), *(Column(c.title, c.unit) for c in columns)),
        rows,
        _notes(plan, cells),
    )


def _columns(cells: Sequence[ServingCell]) -> list[_Figure]:
    bases = [base for base in BASES if any(base in cell.ratios for cell in cells)]
    known = [
        _Figure("repeats", Unit.NUMBER, lambda cell: Cell(cell.repetitions)),
        _median("output tok/s", Unit.RATE, "output_throughput"),
        *(_Figure(f"x {base}", Unit.RATIO, _ratio(base)) for base in bases),
        _median("TTFT ms", Unit.MILLISECONDS, "median_ttft_ms", interval=False),
        _median("TTFT p99", Unit.MILLISECONDS, "p99_ttft_ms", interval=False),
        _median("TPOT ms", Unit.MILLISECONDS, "median_tpot_ms", interval=False),
        _median("TPOT p99", Unit.MILLISECONDS, "p99_tpot_ms", interval=False),
        _median("E2E ms", Unit.MILLISECONDS, "median_e2el_ms", interval=False),
        _median("decoding at once", Unit.NUMBER, "max_concurrent_decodes", interval=False),
        _median("failed", Unit.NUMBER, "failed", interval=False),
    ]
    if any(cell.kv for cell in cells):
        known.append(_Figure("peak live", Unit.TOKENS, _kv("median_peak_live")))
        known.append(_Figure("decode KV", Unit.TOKENS, _kv("mean_decode_kv")))
        known.append(_Figure("logical", Unit.TOKENS, _kv("median_logical")))
    return known


def _median(title: str, unit: Unit, name: str, *, interval: bool = True) -> _Figure:
    def of(cell: ServingCell) -> Cell:
        known = cell.figures.get(name)
        if known is None:
            return Cell()
        return _cell(known) if interval else Cell(known.point)

    return _Figure(title, unit, of)


def _ratio(base: str) -> Value:
    return lambda cell: _cell(cell.ratios[base]) if base in cell.ratios else Cell()


def _kv(name: str) -> Value:
    return lambda cell: Cell(cell.kv.get(name))


def _cell(known: Median) -> Cell:
    return Cell(known.point, known.low, known.high) if known.n > 1 else Cell(known.point)


def _bests(plan: ServingPlan, shape: str, best: Sequence[Best]) -> Table:
    bases = [base for base in BASES if any(base in each.ratios for each in best)]
    rows = [
        Row(
            (
                Cell(each.arm),
                Cell(each.load),
                _cell(each.speed),
                *(_cell(each.ratios[base]) if base in each.ratios else Cell() for base in bases),
            )
        )
        for each in best
    ]
    if "full" in bases:
        rows += [_published(figure, bases) for figure in _papers(plan, shape)]
    return _table(
        plan,
        shape,
        "each arm at its best load",
        (
            Column("arm"),
            Column("load"),
            Column("output tok/s", Unit.RATE),
            *(Column(f"x {base}", Unit.RATIO) for base in bases),
        ),
        rows,
        (
            "best load: highest median of those without a failed request; ratios pair repetitions",
            *[DUMMY] * (plan.weights == "dummy"),
        ),
    )


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


def _notes(plan: ServingPlan, cells: Sequence[ServingCell]) -> tuple[str, ...]:
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
    return tuple(notes)


def _table(
    plan: ServingPlan,
    shape: str,
    what: str,
    columns: tuple[Column, ...],
    rows: Sequence[Row],
    notes: Sequence[str],
) -> Table:
    turns = "1 turn" if plan.turns == 1 else f"{plan.turns} turns"
    return Table(
        kind=Kind.THROUGHPUT,
        key=slug("serving", plan.model_name, plan.engine, shape, what),
        title=f"serving, {what}: {shape}, {turns}, {plan.model_name}, {plan.engine}",
        columns=columns,
        rows=tuple(rows),
        notes=tuple(notes),
        where={"task": f"serving {shape}", "model": plan.model_name, "engine": plan.engine},
    )
