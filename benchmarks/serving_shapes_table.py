"""The table of `serving_shapes.py`, from its cells: medians over repetitions, bytes before tokens.

Medians, intervals and paired ratios are those of `kvbench report`, the share of the limit that of
`kvbench bench roofline`; only here cells of their own folders are put together again.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentbench_kv.engines.embedded.model import model_path
from agentbench_kv.errors import KVBenchError, UsageError
from agentbench_kv.results.stats import median
from agentbench_kv.results.tables.model import Cell, Column, Kind, Row, Table, Unit, slug
from agentbench_kv.serving_bench.achieved import read_achieved
from agentbench_kv.serving_bench.hardware import read_hardware
from agentbench_kv.serving_bench.measurements import (
    LoadMeasurement,
    ServingFolder,
    ServingPlan,
    serving_folders,
)
from agentbench_kv.serving_bench.roofline import IMPOSSIBLE, Decoder, read_decoder
from agentbench_kv.serving_bench.summary import (
    BASES,
    SPEED,
    ArmFigures,
    disturbances,
    summarize_serving,
)
from agentbench_kv.serving_bench.table_notes import SIMULATED, few_notes, pairing_notes

CELL = "cell.json"
TRACE = "trace.jsonl"
ABOUT = "about.json"
BEGUN = "begun"  # in `ABOUT`: how often each cell was
DECODER = "decoder"  # in `ABOUT`: the model's shape, None of one that the roofline does not count
HARDWARE = "hardware.json"  # of a cell
_OF_REPETITION = "hardware-rep{:02d}.json"  # of a place, where cells have none: older ones
COLUMNS = (
    *(Column("engine"), Column("arm"), Column("repeats", Unit.NUMBER)),
    Column("peak live MB a session", Unit.MEGABYTES),
    Column("pool MB", Unit.MEGABYTES),
    Column("read MB a token", Unit.MEGABYTES),
    Column("peak live", Unit.TOKENS),
    *(Column("TTFT turn 1 s", Unit.SECONDS), Column("TTFT turns 2+ s", Unit.SECONDS)),
    *(Column("output tok/s", Unit.RATE), Column("x base", Unit.RATIO), Column("base")),
    Column("of the roofline %", Unit.SHARE),
)
# Whichever the engine has of those that share what sessions have in common; else plain `full`.
_PREFERRED = ("full@prefix", "full")
_NOTES = (
    "medians over repetitions with 95% intervals (of a few repetitions about their range); ratios "
    "of output tok/s are paired by repetition",
    "peak live MB: keys and values of a session over all layers and heads; pool MB: slots or "
    "blocks that all sessions, and what they share, took up together at the most; read MB a token: "
    "keys and values that a decoded token's attention read; tokens are per layer and KV head",
    "base: full@prefix where the engine has it; on vLLM and SGLang full is as shipped, with their "
    "prefix cache",
    "of the roofline: a decode step's limit, of the machine measured before the cell (older ones: "
    "at the beginning of the repetition), over the median time per token; between two steps other "
    "sessions may be prefilled; of the sessions that decode at once, in older cells over the whole "
    "time",
)


@dataclass
class Engine:
    """What was measured of an engine at one place."""

    plan: ServingPlan
    measured: list[LoadMeasurement] = field(default_factory=list)
    shares: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))


def shapes_tables(out: Path) -> list[Table]:
    """Return a table for each model and prompt below a folder, of what is measured so far."""
    places = sorted({path.parents[3] for path in out.glob(f"*/*/rep*/*/{CELL}")})
    return [table for place in places if (table := _table(place)) is not None]


def _table(place: Path) -> Table | None:
    engines: dict[str, Engine] = {}
    failed: dict[tuple[str, str], list[str]] = defaultdict(list)
    seconds, first = 0.0, None
    known = [(_record(path), path.parent) for path in place.glob(f"*/rep*/*/{CELL}")]
    for record, path in sorted(known, key=lambda each: (each[0]["rank"], str(each[1]))):
        seconds += record["wall_s"]
        if "error" in record:
            failed[record["engine"], record["arm"]].append(record["error"])
            continue
        folder = _measured(path)
        first = first or folder
        if folder.plan.trace != first.plan.trace:
            raise UsageError(f"{path} played another trace than {first.path}; remove one of them")
        _add(engines, folder, record, place)
    if not engines and not failed:
        return None
    found = {name: _summary(engine) for name, engine in engines.items()}
    rows = [row for name, engine in engines.items() for row in _rows(name, engine, found[name])]
    apart = (f"{name}: {note}" for name, cells in found.items() for note in pairing_notes(cells))
    about = [_about(first)] if first else []
    notes = [*about, *_notes(engines, found), *apart, *_own(place), *_begun(place)]
    reasons = [f"{e} {a}: {said[-1]} ({len(said)} x)" for (e, a), said in failed.items()]
    return Table(
        Kind.THROUGHPUT,
        slug("serving", "shapes", place.name),
        f"sessions at long prompts: {place.name}",
        COLUMNS,
        rows,
        [*notes, f"measured in {seconds / 3600:.1f} h", *sorted(reasons)],
        {"task": "serving shapes", "model": place.name, "engine": "several"},
    )


def _record(path: Path) -> dict[str, Any]:
    """Return a cell's record; a UsageError if it lies where another cell's would."""
    record: dict[str, Any] = json.loads(path.read_text())
    own = cell_path(record["engine"], record["repetition"], record["arm"])
    if path.parts[-4:-1] != own.parts:
        raise UsageError(f"{path} is of {own} by what it holds; a copied cell is no other one")
    return record


def cell_path(engine: str, repetition: int, arm: str) -> Path:
    """Return where a cell lies below the folder of its model and prompt."""
    return Path(engine) / f"rep{repetition + 1:02d}" / slug(arm)


def _measured(path: Path) -> ServingFolder:
    """Return the folder of a cell's measurement, beside those that only began with other code."""
    folders = [
        each for each in map(ServingFolder.read, serving_folders([path])) if each.measurements()
    ]
    if len(folders) != 1:
        raise UsageError(f"{path} holds {len(folders)} folders of measurements, not one; remove it")
    return folders[0]


def _begun(place: Path) -> Iterator[str]:
    """Name cells without a record, or begun anew: whoever ends slow ones has a fast arm."""
    about = place / ABOUT
    known = json.loads(about.read_text()) if about.is_file() else {}
    counts: dict[str, int] = known.get(BEGUN) or {}
    logs = (path.parent.relative_to(place) for path in place.glob("*/rep*/*/log.txt"))
    begun = sorted({*counts, *map(str, logs)})
    if said := ", ".join(name for name in begun if not (place / name / CELL).is_file()):
        yield f"begun, and not there (running, interrupted or removed): {said}"
    if said := ", ".join(name for name in begun if counts.get(name, 0) > 1):
        yield (
            f"begun more than once (failed, interrupted or removed before): {said}; what was "
            "discarded might have been slower"
        )


def _own(place: Path) -> Iterator[str]:
    """Say what engines were given of their own, which other engines were not."""
    about = place / ABOUT
    engines = json.loads(about.read_text()).get("engines", {}) if about.is_file() else {}
    for engine, given in engines.items():
        said = " ".join(f"{name}={value}" for own in given.values() for name, value in own.items())
        if said:
            yield f"{engine} was given: {said}"


def _about(folder: ServingFolder) -> str:
    plan, machine = folder.plan, folder.provenance.get("hardware") or {}
    trace = "" if plan.trace is None else f"; {plan.trace.sentence}"
    return f"{plan.model_name}, {plan.dtype}, {machine.get('cpu', 'a machine unknown')}{trace}"


def _notes(engines: dict[str, Engine], found: dict[str, list[ArmFigures]]) -> Iterator[str]:
    yield from _NOTES
    plans = [engine.plan for engine in engines.values()]
    if len({plan.dtype for plan in plans}) > 1:
        said = ", ".join(f"{plan.engine} {plan.dtype}" for plan in plans)
        yield f"weights and rows as computed: {said}; the roofline's products are in one of them"
    if cells := [cell for each in found.values() for cell in each]:
        yield from few_notes(cells)
    if any(share > 1 for engine in engines.values() for s in engine.shares.values() for share in s):
        yield f"of the roofline: {IMPOSSIBLE}"
    if any(arm.kv_dtype for plan in plans if plan.engine == "embedded" for arm in plan.arms):
        yield SIMULATED


def _add(
    engines: dict[str, Engine], folder: ServingFolder, record: dict[str, Any], place: Path
) -> None:
    """Put a cell's measurement among those of its engine, under its own repetition."""
    known = engines.setdefault(folder.plan.engine, Engine(folder.plan))
    arms = {arm.name: arm for arm in known.plan.arms}
    new = [arm for arm in folder.plan.arms if arm.name not in arms]
    same = all(arms.get(arm.name, arm) == arm for arm in folder.plan.arms)
    if not same or _shared(folder.plan) != _shared(known.plan):
        raise UsageError(f"{folder.path} has other settings than cells beside it; remove it")
    known.plan = known.plan.model_copy(update={"arms": [*known.plan.arms, *new]})
    number = int(record["repetition"])
    for each in folder.measurements():
        own = (other for other in known.measured if other.arm == each.arm)
        if any(each.figures == other.figures for other in own):
            raise UsageError(f"{folder.path} is a copy of another cell's measurement; remove it")
        known.measured.append(each.model_copy(update={"repetition": number}))
    machine = place / cell_path(record["engine"], number, record["arm"]) / HARDWARE
    if not machine.is_file():
        machine = place / _OF_REPETITION.format(number + 1)
    (arm,) = folder.plan.arms
    if (share := _share(folder, machine, place / ABOUT)) is not None:
        known.shares[arm.name].append(share)


def _shared(plan: ServingPlan) -> ServingPlan:
    """Return what of a plan is the same for all arms."""
    return plan.model_copy(update={"arms": [], "model": plan.model_name})


def _share(folder: ServingFolder, machine: Path, about: Path) -> float | None:
    """Return how near a cell's decoding came to the machine's limit; None if that is not known."""
    measured = [each for each in folder.measurements() if not disturbances([each])]
    timed = all(each.kv and each.figures.get("median_tpot_ms") for each in measured)
    if not measured or not timed or not machine.is_file():
        return None
    (found,) = read_achieved(str(folder.path), folder.path)
    decoder = _decoder(about, found.model)
    if decoder is None:
        return None
    kinds = found.kinds()
    work = found.work(decoder, **kinds)
    limits = read_hardware(machine)
    known = kinds["dtype"] in limits.products
    measured_in = kinds["dtype"] if known else next(iter(limits.products))
    return found.share(work.limit(limits, measured_in))


def _decoder(about: Path, model: str) -> Decoder | None:
    """Return the model's shape as it was noted; in older folders that of the model, if it is there.

    None where it is not known.
    """
    noted = json.loads(about.read_text()) if about.is_file() else {}
    if DECODER in noted:
        known = noted[DECODER]
        return known and Decoder(**known | {"windows": tuple(known["windows"])})
    return counted(model)


def counted(model: str) -> Decoder | None:
    """Return a model's shape; None if it is not there, or of a kind the roofline does not count."""
    try:
        return read_decoder(model_path(model))
    except KVBenchError:
        return None


def _summary(engine: Engine) -> list[ArmFigures]:
    counts = {m.repetition for m in engine.measured}
    plan = engine.plan.model_copy(update={"repeats": max(counts) + 1})
    return summarize_serving(plan, engine.measured).cells


def _rows(name: str, engine: Engine, found: Sequence[ArmFigures]) -> Iterator[Row]:
    arms = {cell.arm for cell in found}
    base = next((each for each in _PREFERRED if each in arms and each in BASES), "")
    for cell in found:
        yield Row(
            _cells(name, cell, base, engine.shares[cell.arm]), "; ".join(cell.reasons) or None
        )


def _cells(name: str, cell: ArmFigures, base: str, shares: Sequence[float]) -> tuple[Cell, ...]:
    ratio, known = cell.ratios.get(base), cell.figures

    def megabytes(figure: str) -> Cell:
        value = cell.kv.get(figure)
        return Cell(value / 1e6) if value else Cell(text="not known")

    def seconds(figure: str) -> Cell:
        found = known.get(figure)
        if found is None:
            return Cell()
        return Cell(
            found.point / 1e3, *((found.low / 1e3, found.high / 1e3) if found.n > 1 else ())
        )

    def plain(figure: Any) -> Cell:
        if figure is None:
            return Cell()
        return Cell(figure.point, *((figure.low, figure.high) if figure.n > 1 else ()))

    return (
        *(Cell(name), Cell(cell.arm), Cell(cell.repetitions)),
        *map(megabytes, ("median_peak_bytes", "pool_bytes", "bytes_read")),
        Cell(cell.kv.get("median_peak_live")),
        *(seconds("median_ttft_first_ms"), seconds("median_ttft_later_ms")),
        *(plain(known.get(SPEED)), plain(ratio), Cell(base if ratio is not None else "")),
        plain(median(shares) if shares else None),
    )
