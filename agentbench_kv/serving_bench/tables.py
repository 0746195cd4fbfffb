"""Tables of a folder of measurements."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from math import inf
from pathlib import Path

from agentbench_kv.errors import KVBenchError
from agentbench_kv.registry import make_method
from agentbench_kv.results.papers import PublishedFigure, figures
from agentbench_kv.results.stats import REPETITIONS, Median, Scores, level
from agentbench_kv.results.tables.costs import runner_notes
from agentbench_kv.results.tables.model import Cell, Column, Kind, Row, Table, Unit, slug
from agentbench_kv.serving_bench.measurements import (
    GOODPUT,
    SPEED,
    Quality,
    ServingFolder,
    ServingPlan,
)
from agentbench_kv.serving_bench.summary import (
    BASES,
    ArmFigures,
    BestLoad,
    ServingSummary,
    UnrankedLoad,
    summarize_serving,
)

DUMMY = "dummy weights: speed of these shapes only; nothing here says anything about accuracy"
SIMULATED = (
    "simulated: rows are quantised and dequantised when written, and counted at the bytes they "
    "would take; speed at lower precision is not what an engine with such a cache has"
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
_SHOWN = 5  # names of a list
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
        more = [*_timeouts(cells), *_missing(summary.missing)]
        if cells:
            tables.append(_loads_table(summary.plan, shape, cells, more))
        if best := [each for each in summary.best if each.shape == shape]:
            more = [*_unranked([u for u in summary.unranked if u.shape == shape]), *more]
            tables.append(_best_table(summary.plan, shape, best, more))
    return tables


def _loads_table(
    plan: ServingPlan, shape: str, cells: Sequence[ArmFigures], more: Sequence[str]
) -> Table:
    bases = _bases(cells)
    of_kv = _KV_COLUMNS if any(cell.kv for cell in cells) else {}
    of_kv = {n: c for n, c in of_kv.items() if n not in _IN_BYTES or _any_has(cells, n)}
    of_kv = of_kv | (_AGAIN_COLUMNS if any(cell.kv.get("recomputed") for cell in cells) else {})
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
    notes = [*_notes(plan, cells), *more]
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


def _any_has(cells: Sequence[ArmFigures], name: str) -> bool:
    return any(cell.kv.get(name) for cell in cells)


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
        *_ends(best),
        *few_notes(best),
        *pairing_notes(best),
        *_setting_notes(plan),
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


def _notes(plan: ServingPlan, cells: Sequence[ArmFigures]) -> list[str]:
    notes = [
        "load: cN is at most N sessions at once, N/s is sessions that begin per second (Poisson)"
        + ", schedule is the trace's own times" * (plan.trace is not None),
        "medians over repetitions with 95% intervals; ratios are paired by repetition",
        "TTFT, TPOT, E2E: median and p99 of requests; a request is one turn",
    ]
    notes += _setting_notes(plan)
    if plan.pool_mb is not None and plan.engine == "embedded":
        notes.append(
            "sessions are admitted by their rows, and slots are powers of two, so that pool MB may "
            "come to twice as much"
        )
    if plan.goodput:
        kept = ", ".join(f"{name.upper()} {most:g} ms" for name, most in plan.goodput.items())
        notes.append(f"good: a request within {kept}; a session, if all of its requests are")
    if any("prefix_hit_rate" in cell.figures for cell in cells):
        notes.append(
            "prefix hits: prompt tokens that the server says it had cached; at most: those that "
            "an endless cache would have"
        )
    if plan.trace is not None:
        scale = f"; its gaps and clock x {plan.time_scale:g}" * (plan.time_scale != 1)
        notes += [plan.trace.sentence + scale, *plan.trace.notes]
        notes += _quality_notes(cells)
    if any(cell.kv for cell in cells):
        notes.append(
            "peak live MB: keys and values of a session over all layers and heads; peak live, "
            "decode KV, logical: tokens per layer and KV head; medians over sessions, and the mean "
            "over decoded tokens"
        )
    if any(_any_has(cells, name) for name in ("pool_bytes", "bytes_read")):
        notes.append(
            "pool MB: slots or blocks that all sessions, and what they share, took up together at "
            "the most; read MB a token: keys and values that a decoded token's attention read"
        )
    if any(cell.kv.get("recomputed") for cell in cells):
        notes.append(
            "computed again: rows that were lost, or read again; of a server as shipped these come "
            "on top of prefilled, else they are part of it"
        )
    notes += _event_notes(cells)
    notes += runner_notes((cell.arm, cell.model_runner) for cell in cells)
    if dropping := [arm.name for arm in plan.arms if arm.drops]:
        notes.append(
            f"{', '.join(dropping)}: the recorded messages without what the method drops; what "
            "follows the first change is read again (prefilled, computed again: all sessions), "
            "with the recorded answers in it"
        )
    notes += few_notes(cells)
    notes += pairing_notes(cells)
    if plan.engine == "embedded" and any(arm.kv_dtype for arm in plan.arms):
        notes.append(SIMULATED)
    if plan.weights == "dummy":
        notes.append(DUMMY)
    if plan.weights == "unknown":
        notes.append("servers were given by URL: what they run is what their arms are called")
    return notes


def _setting_notes(plan: ServingPlan) -> list[str]:
    """Say what changes every figure and stands in no row."""
    notes = []
    if plan.pool_mb is not None:
        moving = [arm.name for arm in plan.arms if arm.settings.get("offload")]
        more = f"; {', '.join(moving)} may move rows to the machine's own memory beside it"
        notes.append(
            f"equal memory: every arm has {plan.pool_mb:g} MB for cached rows{more * bool(moving)}"
        )
    if plan.engine_args:
        given = " ".join(f"{name}={value}" for name, value in plan.engine_args.items())
        notes.append(f"engine arguments of every arm: {given}")
    if chosen := list(_chosen(plan)):
        notes.append(f"settings other than the preset's: {'; '.join(chosen)}")
    if plan.together:
        notes.append("all arms' servers were up at once, and one of them was measured at a time")
    most = plan.open_at_most
    above = [load for load in plan.loads if load.startswith("c") and int(load[1:]) > (most or inf)]
    if above:
        notes.append(f"{', '.join(above)}: there are {most} sessions, so no more were open at once")
    return notes


def _chosen(plan: ServingPlan) -> Iterator[str]:
    """Yield the settings of arms that are not those of their methods' presets."""
    for arm in plan.arms:
        if not arm.method or not arm.settings:
            continue
        with suppress(KVBenchError):  # a plug-in's method that is not here
            usual = make_method(arm.method, arm.budget).settings()
            own = {name: arm.settings[name] for name in arm.settings.keys() & usual.keys()}
            said = [f"{name}={own[name]}" for name in sorted(own) if own[name] != usual[name]]
            if said:
                yield f"{arm.name} {' '.join(said)}"


def _timeouts(cells: Sequence[ArmFigures]) -> list[str]:
    """Say after which time requests have failed, where it is not the same for all."""
    known: dict[float, list[str]] = {}
    for cell in cells:
        for timeout in cell.timeouts_s:
            known.setdefault(timeout, []).append(f"{cell.arm} {cell.load}")
    if len(known) < 2:
        return []
    said = "; ".join(f"{s:g} s ({', '.join(known[s])})" for s in sorted(known))
    return [f"requests failed after different times (--timeout): {said}"]


def _unranked(loads: Sequence[UnrankedLoad]) -> list[str]:
    """Name the loads at which arms are better than shown, but may not be ranked."""
    said = "; ".join(f"{each.arm} {each.load} ({each.reason})" for each in loads)
    return [f"better than the load shown, and not ranked: {said}"] * bool(said)


def _event_notes(cells: Sequence[ArmFigures]) -> list[str]:
    """Name arms of which some sessions had no event, and were the full cache all along."""
    some = [
        f"{cell.arm} {cell.load} ({cell.kv['compressed_sessions']:g} of {cell.kv['sessions']:g})"
        for cell in cells
        if 0 < cell.kv.get("compressed_sessions", 0) < cell.kv.get("sessions", 0)
    ]
    return [f"sessions with an event, where not all had one: {', '.join(some)}"] * bool(some)


def pairing_notes(cells: Sequence[ArmFigures | BestLoad]) -> list[str]:
    """Say that not all was measured in one place, and that pairs lie hours apart, if so."""
    notes = []
    origins = sorted({origin for cell in cells for origin in cell.origins})
    if len(origins) > 1:
        notes.append(
            f"measured with {len(origins)} machines or versions, of which repetitions are "
            f"not paired: {'; '.join(origins)}"
        )
    if (apart := max((cell.apart_h for cell in cells), default=0.0)) >= 1:
        notes.append(
            f"paired repetitions lie up to {apart:.1f} h apart: a machine that changed meanwhile "
            "looks like a difference"
        )
    return [*notes, *_begun_again(cells)]


def _ends(best: Sequence[BestLoad]) -> list[str]:
    """Name arms that may have a better load than was tried."""
    said = ", ".join(f"{each.arm} ({each.load}, the {each.end})" for each in best if each.end)
    return [f"best at the end of the loads tried, so another may be better: {said}"] * bool(said)


def _begun_again(known: Sequence[ArmFigures | BestLoad]) -> list[str]:
    """Name arms whose repetitions were begun more than once: ends of slow ones make an arm fast."""
    again = [
        f"{each.arm} {each.load} ({each.again} of {each.repetitions})"
        for each in known
        if each.again
    ]
    said = (
        f"begun more than once (failed, interrupted or removed before): {', '.join(again)}; what "
        "was discarded might have been slower"
    )
    return [said] * bool(again)


def _missing(names: Sequence[str]) -> list[str]:
    """Name measurements that were begun and are not there."""
    if not names:
        return []
    shown = ", ".join(names[:_SHOWN]) + f" and {len(names) - _SHOWN} more" * (len(names) > _SHOWN)
    return [f"begun, and not there (running, interrupted or removed): {shown}"]


def few_notes(known: Sequence[ArmFigures | BestLoad]) -> list[str]:
    """Say that there are few repetitions or pairs, and where not all repetitions have a pair."""
    fewest = min(each.repetitions for each in known)
    pairs = min((ratio.n for each in known for ratio in each.ratios.values()), default=fewest)
    what, least = ("pairs", pairs) if pairs < fewest else ("repetitions", fewest)
    notes = [f"fewest {what}: {least}; fewer than {REPETITIONS} decide nothing"]
    notes = notes * (least < REPETITIONS)
    lost = [
        f"{each.arm} {each.load} {ratio.n} of {each.repetitions}"
        for each in known
        for ratio in [min(each.ratios.values(), key=lambda ratio: ratio.n, default=None)]
        if ratio is not None and ratio.n < each.repetitions
    ]
    if lost:
        notes.append(f"repetitions that could be paired, where not all could: {', '.join(lost)}")
    return notes


def _quality_notes(cells: Sequence[ArmFigures]) -> list[str]:
    """Say what exact calls are, and why there are none."""
    found = {cell.arm: cell.quality for cell in cells if cell.quality is not None}
    if not found:
        return ["exact calls: not measured: no recorded answers came, or nobody asked for them"]
    behind = {
        arm: sum(asked for _, asked in quality.behind.values())
        for arm, quality in found.items()
        if quality.behind
    }
    counts = ", ".join(f"{count:,} ({arm})" for arm, count in behind.items())
    others = [f"calls behind an event, which are others for each arm: {counts}"] * bool(counts)
    said = _exact_note([each for each in found.values() if each.exact is not None])
    reasons: dict[str, list[str]] = {}
    for arm, quality in found.items():
        if quality.reason:
            reasons.setdefault(quality.reason, []).append(arm)
    later = {
        cell.arm
        for cell in cells
        if (own := cell.quality) and own.origin not in ("", *cell.origins)
    }
    return [
        *said,
        *others,
        *[
            f"exact calls of {', '.join(sorted(later))}: counted on another machine, or with other "
            "versions or code, than the speed"
        ]
        * bool(later),
        *(f"exact calls of {', '.join(arms)}: not measured: {r}" for r, arms in reasons.items()),
    ]


def _exact_note(found: Sequence[Quality]) -> list[str]:
    if not found:
        return []
    seconds, sessions = sum(each.seconds for each in found), len(found[0].parts)
    of = f"{found[0].calls:,} recorded tool calls" + f" in {sessions:,} sessions" * bool(sessions)
    return [
        f"exact calls: of {of} those whose every token is the arm's own best (fidelity's "
        "calls_exact; full's share is calls_exact_full), with 95% intervals over sessions, where "
        "there are enough; behind an event: of those in answers that had one before or with their "
        "first token; answers given, played once an arm after a measurement, in "
        f"{seconds:.1f} s beside the measured time"
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
