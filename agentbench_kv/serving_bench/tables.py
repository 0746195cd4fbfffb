"""Tables of a folder of measurements."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from agentbench_kv.results.papers import PublishedFigure, figures
from agentbench_kv.results.stats import Median, Scores, level
from agentbench_kv.results.tables.model import Cell, Column, Kind, Row, Table, Unit, slug
from agentbench_kv.serving_bench.measurements import (
    GOODPUT,
    SPEED,
    ServingFolder,
    ServingPlan,
)
from agentbench_kv.serving_bench.summary import (
    BASES,
    ArmFigures,
    BestLoad,
    ServingSummary,
    summarize_serving,
)
from agentbench_kv.serving_bench.table_notes import (
    DUMMY,
    end_notes,
    few_notes,
    loads_notes,
    missing_notes,
    pairing_notes,
    setting_notes,
    timeout_notes,
    unranked_notes,
)

_PUBLISHED_RATIO = "best_output_tok_s_ratio_vs_full"
_SPEED_COLUMN = Column("output tok/s", Unit.RATE)
_EXACT = Column("exact calls %", Unit.SHARE)
_BEHIND = Column("behind an event %", Unit.SHARE)
# What agents notice comes first.
_FIRST_COLUMNS = {
    "session_goodput": Column("good sessions/s", Unit.PER_SECOND),
    GOODPUT: Column("good requests/s", Unit.PER_SECOND),
    "median_ttft_later_ms": Column("TTFT turns 2+ ms", Unit.MILLISECONDS),
    "p99_ttft_later_ms": Column("p99", Unit.MILLISECONDS),
}
_FIGURE_COLUMNS = {
    "median_ttft_first_ms": Column("TTFT turn 1 ms", Unit.MILLISECONDS),
    "median_ttft_ms": Column("TTFT ms", Unit.MILLISECONDS),
    "p99_ttft_ms": Column("TTFT p99", Unit.MILLISECONDS),
    "p99_late_ms": Column("late p99", Unit.MILLISECONDS),
    "median_tpot_ms": Column("TPOT ms", Unit.MILLISECONDS),
    "p99_tpot_ms": Column("TPOT p99", Unit.MILLISECONDS),
    "median_e2el_ms": Column("E2E ms", Unit.MILLISECONDS),
    "prefix_hit_rate": Column("prefix hits %", Unit.SHARE),
    "prefix_hit_bound": Column("at most %", Unit.SHARE),
    "max_concurrent_decodes": Column("decoding at once", Unit.NUMBER),
    "failed": Column("failed", Unit.NUMBER),
}
_KV_COLUMNS = {
    "median_peak_bytes": Column("peak live MB", Unit.MEGABYTES),
    "pool_bytes": Column("pool MB", Unit.MEGABYTES),
    "bytes_read": Column("read MB a token", Unit.MEGABYTES),
    "median_peak_live": Column("peak live", Unit.TOKENS),
    "mean_decode_kv": Column("decode KV", Unit.TOKENS),
    "median_logical": Column("logical", Unit.TOKENS),
}
_IN_BYTES = ("median_peak_bytes", "pool_bytes", "bytes_read")
# Where some arm reads tokens twice.
_AGAIN_COLUMNS = {
    "prefill_tokens": Column("prefilled", Unit.TOKENS),
    "recomputed": Column("computed again", Unit.TOKENS),
}


def serving_tables(folders: Sequence[Path]) -> list[Table]:
    """Return the tables of folders of measurements; a UsageError if one cannot be read."""
    tables = []
    for path in folders:
        folder = ServingFolder.read(path)
        found = summarize_serving(folder.plan, folder.measurements(), folder.missing())
        tables += summary_tables(found)
    return tables


def summary_tables(summary: ServingSummary) -> list[Table]:
    """Return two tables for every shape that was measured: all loads, each arm at its best."""
    tables = []
    for shape in summary.plan.shapes:
        cells = [cell for cell in summary.cells if cell.shape == shape]
        more = [*timeout_notes(cells), *missing_notes(summary.missing)]
        if cells:
            tables.append(_loads_table(summary.plan, shape, cells, more))
        if best := [each for each in summary.best if each.shape == shape]:
            more = [*unranked_notes([u for u in summary.unranked if u.shape == shape]), *more]
            tables.append(_best_table(summary.plan, shape, best, more))
    return tables


def _loads_table(
    plan: ServingPlan, shape: str, cells: Sequence[ArmFigures], more: Sequence[str]
) -> Table:
    bases = _bases(cells)
    counted = {name for cell in cells for name, count in cell.kv.items() if count}
    of_kv = _KV_COLUMNS if any(cell.kv for cell in cells) else {}
    of_kv = {n: c for n, c in of_kv.items() if n not in _IN_BYTES or n in counted}
    of_kv = of_kv | (_AGAIN_COLUMNS if "recomputed" in counted else {})
    first, later = _known(_FIRST_COLUMNS, cells), _known(_FIGURE_COLUMNS, cells)
    titles = (Column("load"), Column("arm"), Column("repeats", Unit.NUMBER), *first.values())
    judged = [_EXACT] * any(cell.quality for cell in cells)
    late = any(cell.quality and cell.quality.behind for cell in cells)
    judged += [_BEHIND] * late
    columns = (*titles, _SPEED_COLUMN, *bases.values(), *judged, *later.values(), *of_kv.values())
    rows = []
    for cell in cells:
        row = (
            Cell(cell.load),
            Cell(cell.arm),
            Cell(cell.repetitions),
            *(_median_cell(cell.figures.get(name)) for name in first),
            _median_cell(cell.figures.get(SPEED)),
            *(_median_cell(cell.ratios.get(base)) for base in bases),
            *[_exact_cell(cell), _behind_cell(cell)][: len(judged)],
            *(
                Cell(figure.point) if (figure := cell.figures.get(name)) else Cell()
                for name in later
            ),
            *(_kv_cell(cell, name) for name in of_kv),
        )
        rows.append(Row(row, "; ".join(cell.reasons) or None))
    notes = [*loads_notes(plan, cells), *more]
    return _table(plan, shape, "under load", columns, rows, notes)


def _exact_cell(cell: ArmFigures) -> Cell:
    found = cell.quality
    if found is None or found.exact is None:
        return Cell(text="not measured")
    if not found.parts:
        return Cell(found.exact)
    share = level(Scores.of_counts(found.parts))
    return Cell(share.point, share.low, share.high)


def _behind_cell(cell: ArmFigures) -> Cell:
    if cell.quality is None or not cell.quality.behind:
        return Cell()
    share = level(Scores.of_counts(cell.quality.behind))
    return Cell(share.point, share.low, share.high)


def _kv_cell(cell: ArmFigures, name: str) -> Cell:
    value = cell.kv.get(name)
    if name in _IN_BYTES:  # 0 where the server does not count them
        return Cell(value / 1e6 if value else None)
    return Cell(value)


def _known(columns: Mapping[str, Column], cells: Sequence[ArmFigures]) -> dict[str, Column]:
    """Return the columns of figures that some cell has."""
    return {
        name: column
        for name, column in columns.items()
        if any(name in cell.figures for cell in cells)
    }


def _best_table(
    plan: ServingPlan, shape: str, best: Sequence[BestLoad], more: Sequence[str]
) -> Table:
    bases = _bases(best)
    rows = []
    for each in best:
        ratios = (_median_cell(each.ratios.get(base)) for base in bases)
        good = [_median_cell(each.goodput)] * bool(plan.goodput)
        titles = (Cell(each.arm), Cell(each.load), Cell(each.repetitions), *good)
        rows.append(Row((*titles, _median_cell(each.speed), *ratios)))
    if "full" in bases and not plan.goodput:  # published ratios are of output
        for figure in _papers(plan, shape):
            place = f"{figure.cited}, {figure.setting.get('gpu')}"
            name = f"{figure.method} at {figure.budget}, {place}"
            ratios = (Cell(figure.value) if base == "full" else Cell() for base in bases)
            empty = [Cell()] * 3
            rows.append(Row((Cell(name), *empty, *ratios), published=True))
    columns = (
        *(Column("arm"), Column("load"), Column("repeats", Unit.NUMBER)),
        *[_FIRST_COLUMNS[GOODPUT]] * bool(plan.goodput),
        *(_SPEED_COLUMN, *bases.values()),
    )
    by = "good requests/s" if plan.goodput else "output tok/s"
    notes = [
        f"best load: highest median {by} of those without a failed request; ratios, of {by}, "
        "pair repetitions",
        *end_notes(best),
        *few_notes(best),
        *pairing_notes(best),
        *setting_notes(plan),
        *more,
        *[DUMMY] * (plan.weights == "dummy"),
    ]
    return _table(plan, shape, "each arm at its best load", columns, rows, notes)


def _bases(known: Sequence[ArmFigures | BestLoad]) -> dict[str, Column]:
    """Return the arms that others are compared with here, and the column of each."""
    bases = [base for base in BASES if any(base in each.ratios for each in known)]
    return {base: Column(f"x {base}", Unit.RATIO) for base in bases}


def _median_cell(known: Median | None) -> Cell:
    if known is None:
        return Cell()
    return Cell(known.point, known.low, known.high) if known.n > 1 else Cell(known.point)


def _papers(plan: ServingPlan, shape: str) -> list[PublishedFigure]:
    """Return published ratios at best load for this model, shape and methods."""
    methods = {(arm.method or "").partition("@")[0] for arm in plan.arms}
    return [
        figure
        for figure in figures("efficiency")
        if figure.metric == _PUBLISHED_RATIO
        and figure.method in methods
        and figure.setting.get("workload") == shape
        and plan.model_name.startswith(figure.model)
    ]


def _table(
    plan: ServingPlan,
    shape: str,
    what: str,
    columns: Iterable[Column],
    rows: Sequence[Row],
    notes: Sequence[str],
) -> Table:
    turns = "1 turn" if plan.turns == 1 else f"{plan.turns} turns"
    if plan.trace is not None:
        turns = f"{plan.trace.sessions} sessions"
    return Table(
        Kind.THROUGHPUT,
        slug("serving", plan.model_name, plan.engine, shape, what),
        f"serving, {what}: {shape}, {turns}, {plan.model_name}, {plan.engine}",
        tuple(columns),
        rows,
        notes,
        {"task": f"serving {shape}", "model": plan.model_name, "engine": plan.engine},
    )
