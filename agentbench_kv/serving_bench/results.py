"""A folder of measurements: the plan, a file for each measurement, a summary.

What was measured, and one measurement: a repetition of one arm at one shape and load.

Medians over repetitions, ratios paired by repetition, and what may not be ranked.

Tables of repeated measurements under load: every load, then each arm at its best.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median as middle
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentbench_kv.errors import UsageError
from agentbench_kv.results.files import json_bytes, write_atomic, writing
from agentbench_kv.results.papers import PublishedFigure, figures
from agentbench_kv.results.stats import REPETITIONS, Median, median
from agentbench_kv.results.summary import DEFAULT_INTERVAL
from agentbench_kv.results.tables.model import Cell, Column, Kind, Row, Table, Unit, slug

BASES = ("full", "full-constrained")


"""Arms that the others are compared with."""


class ServingArm(BaseModel):
    """One of the things compared."""

    model_config = ConfigDict(frozen=True)

    name: str  # unique in a plan
    method: str | None = None  # `name` or `name@preset`; None of a server whose method is unknown
    budget: int | str | None = None
    settings: dict[str, Any] = Field(default_factory=dict)  # every parameter of the method
    url: str | None = None  # of a server that was not started here

    @property
    def interval(self) -> int:
        """Decoded tokens between two events: what a session may hold above its budget."""
        return int(self.settings.get("interval", DEFAULT_INTERVAL))


class ServingPlan(BaseModel):
    """Everything that can change a figure, hardware and versions aside."""

    model_config = ConfigDict(frozen=True)

    schema_version: Literal[1] = 1
    engine: str
    model: str
    dtype: str | None = None
    device: str | None = None
    weights: Literal["loaded", "dummy", "unknown"] = "loaded"  # unknown of a server by URL
    engine_args: dict[str, str] = Field(default_factory=dict)  # for the engine's command line
    allow_untested: bool = False  # engine versions that the adapter was not written for
    wire: str = "gateway"
    arms: list[ServingArm]
    shapes: list[str]  # as `loadgen.jobs` spells them: `16k/1k`
    loads: list[str]  # `c8`, `2/s`
    turns: int
    tool_tokens: int
    think_time_s: float
    sessions: int | None  # of one measurement; None: twice the concurrency
    warmup: int
    repeats: int
    seed: int
    together: bool = False  # whether all engines stood at once

    @property
    def model_name(self) -> str:
        """The model without its folder."""
        return self.model.rstrip("/").rsplit("/", 1)[-1]


class Measurement(BaseModel):
    """One repetition of one arm at one shape and load.

    On disk the figures stand beside the other keys, as in the files of `vllm bench serve`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    arm: str
    shape: str
    load: str
    repetition: int  # from 0
    place: int  # the arm's in the order of that repetition
    date: str
    backend: str
    model_id: str
    num_prompts: int
    max_concurrency: int | None
    request_rate: float | Literal["inf"]
    figures: dict[str, int | float]  # of `loadgen.metrics.figures`
    kv: dict[str, Any] | None = None  # of `loadgen.metrics.kv_figures`
    errors: dict[str, int] = Field(default_factory=dict)  # what failed requests said, how often
    warmup_errors: int = 0
    server: dict[str, Any] = Field(default_factory=dict)  # what the engine says of itself
    requests: list[dict[str, Any]] | None = None

    @property
    def key(self) -> tuple[str, str, str, int]:
        """What there is only one measurement of."""
        return (self.arm, self.shape, self.load, self.repetition)

    def document(self) -> dict[str, Any]:
        """Return the measurement as it is written."""
        return self.model_dump(exclude={"figures"}, exclude_none=True) | self.figures

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> Self:
        """Read what `document` returned; a pydantic.ValidationError if it is something else."""
        own = {name: value for name, value in document.items() if name in cls.model_fields}
        rest = {name: value for name, value in document.items() if name not in own}
        return cls.model_validate({"max_concurrency": None, **own, "figures": rest})


PLAN = "serving.json"


SUMMARY = "summary.json"


class ServingFolder:
    """Measurements of one plan; `provenance` is versions and hardware."""

    def __init__(self, path: Path, plan: ServingPlan, provenance: Mapping[str, Any]) -> None:
        self.path = path
        self.plan = plan
        self.provenance = dict(provenance)

    @classmethod
    def create(cls, path: Path, plan: ServingPlan, provenance: Mapping[str, Any]) -> Self:
        """Begin a folder, or go on with one of the same plan; a UsageError if it has another."""
        if (path / PLAN).exists():
            known = cls.read(path)
            if known.plan != plan:
                raise UsageError(
                    f"{path} holds measurements with other settings; choose another --out"
                )
            return known
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)
        document = {**plan.model_dump(), "provenance": dict(provenance)}
        write_atomic(path / PLAN, json_bytes(document, indent=2))
        return cls(path, plan, provenance)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Open a folder; a UsageError if it holds no plan that can be read."""
        document = _read_json(path / PLAN)
        provenance = document.pop("provenance", {})
        try:
            return cls(path, ServingPlan.model_validate(document), provenance)
        except ValidationError as error:
            raise UsageError(f"{path / PLAN}: {_first(error)}") from error

    def add(self, measurement: Measurement) -> Path:
        """Write a measurement; return its file."""
        name = slug(measurement.arm, measurement.shape, measurement.load)
        path = self.path / f"rep{measurement.repetition + 1:02d}-{name}.json"
        write_atomic(path, json_bytes(measurement.document(), indent=2))
        return path

    def measurements(self) -> list[Measurement]:
        """Return all measurements, by file name; a UsageError if a file is not one."""
        found = []
        for path in sorted(self.path.glob("rep*.json")):
            try:
                found.append(Measurement.from_document(_read_json(path)))
            except ValidationError as error:
                raise UsageError(f"{path}: {_first(error)}") from error
        return found

    def write_summary(self, document: Mapping[str, Any]) -> None:
        """Replace the summary."""
        write_atomic(self.path / SUMMARY, json_bytes(document, indent=2))


def serving_folders(paths: Iterable[Path]) -> list[Path]:
    """Return the folders of measurements at or directly below some paths, each once."""
    found: dict[Path, None] = {}
    for path in paths:
        own = [path] if (path / PLAN).is_file() else []
        below = sorted(each.parent for each in path.glob(f"*/{PLAN}")) if path.is_dir() else []
        found |= dict.fromkeys([*own, *below])
    return list(found)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    if not isinstance(document, dict):
        raise UsageError(f"{path} holds no JSON object")
    return document


def _first(error: ValidationError) -> str:
    problem = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}"


SPEED = "output_throughput"


_KV = ("median_peak_live", "median_logical", "mean_decode_kv", "events")


class ServingCell(BaseModel):
    """One arm at one shape and load; figures are medians over repetitions."""

    model_config = ConfigDict(frozen=True)

    arm: str
    shape: str
    load: str
    repetitions: int
    figures: dict[str, Median]
    ratios: dict[str, Median]  # output tokens/s over another arm's in the same repetition; by arm
    kv: dict[str, float]  # empty without accounting
    reasons: list[str]  # why the cell may not be ranked


class Best(BaseModel):
    """The load at which an arm is fastest (by its median), and its ratios to others at theirs."""

    model_config = ConfigDict(frozen=True)

    arm: str
    shape: str
    load: str
    speed: Median
    ratios: dict[str, Median]


class ServingSummary(BaseModel):
    """What a folder of measurements says."""

    model_config = ConfigDict(frozen=True)

    plan: ServingPlan
    cells: list[ServingCell]
    best: list[Best]


def summarize_serving(plan: ServingPlan, measured: Sequence[Measurement]) -> ServingSummary:
    """Sum up what there is of a plan; cells in its order of shapes, loads and arms."""
    groups: dict[tuple[str, str, str], list[Measurement]] = defaultdict(list)
    for each in measured:
        groups[each.shape, each.load, each.arm].append(each)
    cells, best = [], []
    for shape in plan.shapes:
        made = []
        for load, arm in product(plan.loads, plan.arms):
            bases = {base: groups.get((shape, load, base), []) for base in BASES}
            if runs := groups.get((shape, load, arm.name)):
                made.append(_cell(arm, runs, bases))
        cells += made
        best += _best(made, groups)
    return ServingSummary(plan=plan, cells=cells, best=best)


def _cell(
    arm: ServingArm, runs: Sequence[Measurement], bases: Mapping[str, Sequence[Measurement]]
) -> ServingCell:
    # A figure that some repetition lacks (nothing completed) has no median over repetitions.
    names = [name for name in runs[0].figures if all(name in run.figures for run in runs)]
    return ServingCell(
        arm=arm.name,
        shape=runs[0].shape,
        load=runs[0].load,
        repetitions=len(runs),
        figures={name: median([run.figures[name] for run in runs]) for name in names},
        ratios=_ratios(arm.name, runs, bases),
        kv=_kv(runs),
        reasons=_reasons(arm, runs),
    )


def _ratios(
    arm: str, runs: Sequence[Measurement], bases: Mapping[str, Sequence[Measurement]]
) -> dict[str, Median]:
    """Pair the repetitions in which no request of either side failed."""
    found = {}
    own = _speeds(runs)
    for base, others in bases.items():
        theirs = _speeds(others)
        pairs = [speed / theirs[number] for number, speed in own.items() if number in theirs]
        if pairs and base != arm:
            found[base] = median(pairs)
    return found


def _speeds(runs: Sequence[Measurement]) -> dict[int, float]:
    return {run.repetition: run.figures[SPEED] for run in runs if not _failures(run)}


def _best(
    cells: Sequence[ServingCell], groups: Mapping[tuple[str, str, str], Sequence[Measurement]]
) -> list[Best]:
    """Pick each arm's fastest load of one shape among those that may be ranked."""
    fastest: dict[str, ServingCell] = {}
    for cell in cells:
        held = fastest.get(cell.arm)
        if cell.reasons or (held and cell.figures[SPEED].point <= held.figures[SPEED].point):
            continue
        fastest[cell.arm] = cell
    runs = {arm: groups[cell.shape, cell.load, arm] for arm, cell in fastest.items()}
    bases = {base: runs[base] for base in BASES if base in runs}
    return [
        Best(
            arm=arm,
            shape=cell.shape,
            load=cell.load,
            speed=cell.figures[SPEED],
            ratios=_ratios(arm, runs[arm], bases),
        )
        for arm, cell in fastest.items()
    ]


def _kv(runs: Sequence[Measurement]) -> dict[str, float]:
    accounts = [run.kv for run in runs if run.kv]
    if not accounts:
        return {}
    return {name: middle(float(account.get(name) or 0) for account in accounts) for name in _KV}


def _reasons(arm: ServingArm, runs: Sequence[Measurement]) -> list[str]:
    reasons = []
    if failed := sum(_failures(run) for run in runs):
        sent = failed + sum(int(run.figures.get("completed", 0)) for run in runs)
        said = next((error for run in runs for error in run.errors), "no reason given")
        reasons.append(f"{failed} of {sent} requests failed: {said}")
    if resets := sum(int((run.kv or {}).get("session_resets", 0)) for run in runs):
        reasons.append(f"{resets} session resets: prompts were prefilled again")
    if unproved := _unproved(arm, runs):
        reasons.append(unproved)
    return reasons


def _failures(run: Measurement) -> int:
    return int(run.figures.get("failed", 0))


def _unproved(arm: ServingArm, runs: Sequence[Measurement]) -> str | None:
    """Say why nobody can know that the budget was applied: the arm's, or the one a server says."""
    accounts: list[Mapping[str, Any]] = [run.kv for run in runs if run.kv]
    said = next((account["budget"] for account in accounts if account.get("budget")), None)
    budget = said if arm.budget is None else arm.budget
    if budget is None:
        return None
    if len(accounts) < len(runs):
        return "no KV accounting: this endpoint does not prove that the budget was applied"
    if not all(account.get("events") for account in accounts):
        return f"never triggered at budget {budget}"
    over = max(account.get("max_over_budget") or 0 for account in accounts)
    if over > arm.interval:
        return (
            f"budget not applied: a session held {over} tokens above budget and longest prefill, "
            f"more than the interval of {arm.interval}"
        )
    return None


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
        _SPEED: lambda cell: _cell_serving(cell.figures.get(SPEED)),
    }
    columns |= {column: partial(_ratio, base) for base, column in _bases(cells).items()}
    columns |= {column: partial(_median, name) for column, name in medians.items()}
    if any(cell.kv for cell in cells):
        columns |= {column: partial(_kv_serving, name) for column, name in accounts.items()}
    return columns


def _bases(known: Sequence[ServingCell | Best]) -> dict[str, Column]:
    """Return the arms that others are compared with here, and the column of each."""
    bases = [base for base in BASES if any(base in each.ratios for each in known)]
    return {base: Column(f"x {base}", Unit.RATIO) for base in bases}


def _ratio(base: str, cell: ServingCell | Best) -> Cell:
    return _cell_serving(cell.ratios.get(base))


def _median(name: str, cell: ServingCell) -> Cell:
    return Cell(cell.figures[name].point) if name in cell.figures else Cell()


def _kv_serving(name: str, cell: ServingCell) -> Cell:
    return Cell(cell.kv.get(name))


def _cell_serving(known: Median | None) -> Cell:
    if known is None:
        return Cell()
    return Cell(known.point, known.low, known.high) if known.n > 1 else Cell(known.point)


def _bests(plan: ServingPlan, shape: str, best: Sequence[Best]) -> Table:
    bases = _bases(best)
    rows = [
        Row((
            Cell(each.arm), Cell(each.load), _cell_serving(each.speed),
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
