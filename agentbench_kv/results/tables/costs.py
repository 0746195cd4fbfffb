"""What a session cost, a row a run, and how fast runs were served, a row for runs served alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median as middle

from agentbench_kv.results.groups import by_setting, variants
from agentbench_kv.results.records import TrialStatus
from agentbench_kv.results.runs import Run, Setting
from agentbench_kv.results.stats import REPETITIONS, median, speed_change
from agentbench_kv.results.summary import KVSummary
from agentbench_kv.results.tables.model import (
    Cell,
    Column,
    Kind,
    Row,
    Table,
    Unit,
    heading,
    place,
    slug,
)

COSTS = (
    "tokens per layer and KV head; KV read, prefilled and restored: mean of a session",
    "failures: share of the trials that ended without a score, then trials by kind",
)
SPEEDS = (
    f"speed: a run is one measurement; intervals and ratios from {REPETITIONS} runs served alike, "
    "else the median of those there are, which ranks nobody",
    "in flight: sessions at once on average, of those allowed; TTFT, TPOT: medians of trials",
)
BASES = ("full", "full-constrained")

Value = Callable[[Run], float | None]


@dataclass(frozen=True)
class _Figure:
    """A column: its heading and how a run fills it."""

    title: str
    unit: Unit
    of: Value


def efficiency_tables(runs: Sequence[Run]) -> list[Table]:
    """Return KV memory and traffic of every run whose sessions reached the engine.

    Traffic is a mean over sessions, so that runs of different length compare.
    """
    return [
        _efficiency(setting, same)
        for setting, same in by_setting(run for run in runs if run.summary.kv is not None).items()
    ]


def throughput_tables(runs: Sequence[Run]) -> list[Table]:
    """Return serving figures of every run that generated anything."""
    return [
        _throughput(setting, same)
        for setting, same in by_setting(run for run in runs if run.summary.tokens_per_s).items()
        if not setting.null
    ]


def _efficiency(setting: Setting, runs: Sequence[Run]) -> Table:
    figures = _costs(runs)
    several = len({run.summary.seed for run in runs}) > 1
    rows = [
        Row(
            (
                *_identity(label, run),
                *[Cell(str(run.summary.seed))] * several,
                *(Cell(figure.of(run)) for figure in figures),
            ),
            below=run.reason,
        )
        for run, label in zip(runs, variants(runs), strict=True)
    ]
    columns = [
        *(Column(name) for name in ("method", "budget", *["seed"] * several)),
        *(Column(figure.title, figure.unit) for figure in figures),
    ]
    return _table(Kind.EFFICIENCY, "KV memory and traffic", setting, columns, rows, COSTS)


def _costs(runs: Sequence[Run]) -> list[_Figure]:
    def kv(of: Callable[[KVSummary], float], shared: bool = False) -> Value:
        """Return a figure of the KV summary, divided by the sessions if it is their total."""

        def value(run: Run) -> float | None:
            account = run.summary.kv
            sessions = max(sum(map(len, run.trials.peaks.values())), 1) if shared else 1
            return of(account) / sessions if account else None

        return value

    kinds = [s.value for s in TrialStatus if any(s.value in r.summary.failures for r in runs)]
    return [
        _Figure("trials", Unit.NUMBER, lambda run: run.summary.trials),
        _Figure("peak live", Unit.TOKENS, kv(lambda a: a.median_peak_live)),
        _Figure("worst peak", Unit.TOKENS, kv(lambda a: a.max_peak_live)),
        _Figure("logical", Unit.TOKENS, kv(lambda a: a.median_logical)),
        _Figure("live / logical %", Unit.SHARE, kv(lambda a: a.live_over_logical)),
        _Figure("mean decode KV", Unit.TOKENS, kv(lambda a: a.mean_decode_kv)),
        _Figure("KV read MB", Unit.MEGABYTES, kv(lambda a: a.bytes_read / 1e6, shared=True)),
        _Figure("prefilled", Unit.TOKENS, kv(lambda a: a.prefill_tokens, shared=True)),
        _Figure("restored", Unit.TOKENS, kv(lambda a: a.restored, shared=True)),
        _Figure("events", Unit.RATIO, kv(lambda a: a.events, shared=True)),
        _Figure("failed %", Unit.SHARE, lambda run: run.summary.non_completion_rate),
        *(_Figure(kind.replace("_", " "), Unit.NUMBER, _failures(kind)) for kind in kinds),
    ]


def _failures(kind: str) -> Value:
    return lambda run: run.summary.failures.get(kind, 0)


@dataclass(frozen=True)
class _Repeats:
    """Runs of one method and budget that were served alike."""

    label: str
    runs: list[Run]

    @property
    def speeds(self) -> list[float]:
        """Output tokens per second of each."""
        return [run.summary.tokens_per_s or 0.0 for run in self.runs]


def _throughput(setting: Setting, runs: Sequence[Run]) -> Table:
    alike: dict[tuple[object, ...], _Repeats] = {}
    for run, label in zip(runs, variants(runs), strict=True):
        # A run that is not valid stands alone, below the line.
        key = (label, run.budget, repr(_served(run)), run.reason and str(run.path))
        alike.setdefault(key, _Repeats(label, [])).runs.append(run)
    repeats = list(alike.values())
    enough = [each for each in repeats if len(each.runs) >= REPETITIONS]
    bases = [name for name in BASES if any(each.runs[0].method == name for each in enough)]
    rows = [
        Row(
            (
                *_identity(each.label, each.runs[0]),
                *(Cell(_allowed(each.runs[0])), Cell(len(each.runs))),
                _middle(each, lambda run: run.in_flight),
                _speed(each),
                *(_ratio(each, name, enough) for name in bases),
                _middle(each, lambda run: run.summary.ttft_ms),
                _middle(each, lambda run: run.summary.tpot_ms),
            ),
            below=each.runs[0].reason,
        )
        for each in repeats
    ]
    columns = [
        *(Column("method"), Column("budget")),
        *(Column("allowed", Unit.NUMBER), Column("runs", Unit.NUMBER)),
        *(Column("in flight", Unit.RATE), Column("output tok/s", Unit.RATE)),
        *(Column(f"x {name}", Unit.RATIO) for name in bases),
        *(Column("TTFT ms", Unit.MILLISECONDS), Column("TPOT ms", Unit.MILLISECONDS)),
    ]
    return _table(Kind.THROUGHPUT, "throughput and latency", setting, columns, rows, SPEEDS)


def _middle(repeats: _Repeats, of: Value) -> Cell:
    known = [value for run in repeats.runs if (value := of(run)) is not None]
    return Cell(middle(known)) if known else Cell()


def _speed(repeats: _Repeats) -> Cell:
    found = median(repeats.speeds)
    return Cell(found.point, found.low, found.high) if found.n >= REPETITIONS else Cell(found.point)


def _ratio(repeats: _Repeats, method: str, enough: Sequence[_Repeats]) -> Cell:
    """Compare with the runs of `method` that were served alike, if both sides have enough."""
    served = _served(repeats.runs[0])
    base = next(
        (e for e in enough if e.runs[0].method == method and _served(e.runs[0]) == served), None
    )
    if base is None or base is repeats or repeats not in enough:
        return Cell()
    found = speed_change(base.speeds, repeats.speeds)
    return Cell(1 + found.point, 1 + found.low, 1 + found.high)


def _served(run: Run) -> tuple[object, ...]:
    provenance = run.info.provenance
    return (_allowed(run), provenance.get("hardware"), provenance.get("device"))


def _allowed(run: Run) -> float | None:
    allowed = run.spec.get("concurrency")
    return allowed if isinstance(allowed, int) else None


def _identity(label: str, run: Run) -> tuple[Cell, Cell]:
    return Cell(label), Cell(None if run.budget is None else str(run.budget))


def _table(
    kind: Kind,
    what: str,
    setting: Setting,
    columns: Sequence[Column],
    rows: Sequence[Row],
    legend: tuple[str, ...],
) -> Table:
    return Table(
        kind=kind,
        key=slug(kind.value, setting.task, setting.model, setting.engine),
        title=heading(what, setting),
        columns=tuple(columns),
        rows=tuple(rows),
        where=place(setting),
        legend=legend,
    )
