"""What a session cost, a row a run, and how fast runs were served, a row for runs served alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from statistics import median as middle

from agentbench_kv.budget import Budget
from agentbench_kv.results.drift import speed_conditions
from agentbench_kv.results.records import TrialStatus
from agentbench_kv.results.runs import Run, RunGroup, Setting, by_setting, variants
from agentbench_kv.results.stats import REPETITIONS, median, speed_change
from agentbench_kv.results.summary import KVSummary
from agentbench_kv.results.tables.model import Cell, Column, Kind, Row, Table, Unit, setting_table

BEYOND = "beyond protected"
COSTS = (
    "MB: keys and values over all layers and heads, with scales and zero points at lower "
    "precision; of runs that recorded it in every session",
    "tokens per layer and KV head; KV read, prefilled and restored: mean of a session",
    f"{BEYOND}: the budget less the first tokens that the method must keep, median session",
    "failures: share of the trials that ended without a score, then trials by kind",
)
AUXILIARY = (
    "auxiliary: requests that the method makes of the model by itself, and tokens that those read "
    "and generated, mean of a session; peak live counts what they hold, the other figures do not"
)
SHARED = (
    "of them cached: prompt tokens that a prefix common to several sessions had already, mean of a "
    "session; shared: its first tokens whose rows are held once for all of them, median session; "
    "peak live counts them in every session"
)

SPEEDS = (
    f"speed: a run is one measurement; intervals and ratios from {REPETITIONS} runs served alike, "
    "else the median of those there are, which ranks nobody",
    "in flight: sessions at once on average, of those allowed; TTFT, TPOT: medians of trials",
)

BASES = ("full", "full-constrained")
Value = Callable[[Run], float | None]


def efficiency_tables(runs: Sequence[Run]) -> list[Table]:
    """Return KV memory and traffic (mean of a session) of every run that reached the engine."""
    known = by_setting(run for run in runs if run.summary.kv is not None)
    return [_efficiency(setting, same) for setting, same in known.items()]


def throughput_tables(runs: Sequence[Run]) -> list[Table]:
    """Return serving figures of every run that generated anything."""
    known = by_setting(run for run in runs if run.summary.tokens_per_s)
    return [_throughput(setting, same) for setting, same in known.items() if not setting.null]


def _efficiency(setting: Setting, runs: Sequence[Run]) -> Table:
    figures = _costs(runs)
    several = len({run.summary.seed for run in runs}) > 1
    rows = []
    for run, label in zip(runs, variants(runs), strict=True):
        texts = (label, budget_text(run), *[str(run.summary.seed)] * several)
        values = (of(run) for of in figures.values())
        rows.append(Row((*map(Cell, texts), *map(Cell, values)), run.reason))
    columns = (*map(Column, ("method", "budget", *["seed"] * several)), *figures)
    what = "KV memory and traffic"
    asks = any(run.summary.asks for run in runs)
    legend = (*COSTS, *[AUXILIARY] * asks, *[SHARED] * _share(runs))
    notes = _runners(runs)
    return setting_table(Kind.EFFICIENCY, what, setting, columns, rows, notes, legend)


def runner_notes(runners: Iterable[tuple[str, object]]) -> list[str]:
    """Return a line that names vLLM's model runner of each row, where one is known."""
    by_name: dict[str, dict[str, None]] = {}
    for label, runner in runners:
        if runner:
            by_name.setdefault(str(runner), {})[label] = None
    said = "; ".join(f"{name}: {', '.join(labels)}" for name, labels in by_name.items())
    return [f"vLLM's model runner, {said}"] if said else []


def _runners(runs: Sequence[Run]) -> list[str]:
    details = (run.info.provenance.get("engine_details") for run in runs)
    known = (each.get("model_runner") if isinstance(each, Mapping) else None for each in details)
    return runner_notes(zip(map(str, variants(runs)), known, strict=True))


def _share(runs: Sequence[Run]) -> bool:
    return any(run.summary.kv and run.summary.kv.median_shared for run in runs)


def _costs(runs: Sequence[Run]) -> dict[Column, Value]:
    def kv(of: Callable[[KVSummary], float], shared: bool = False) -> Value:
        """Return a figure of the KV summary, divided by the sessions if it is their total."""

        def value(run: Run) -> float | None:
            account = run.summary.kv
            sessions = max(run.sessions, 1) if shared else 1
            return of(account) / sessions if account else None

        return value

    def megabytes(of: Callable[[KVSummary], float]) -> Value:
        known = kv(of)
        return lambda run: value / 1e6 if (value := known(run)) else None

    def failed(kind: str) -> Value:
        return lambda run: run.summary.failures.get(kind, 0)

    def beyond(run: Run) -> float | None:
        account, budget = run.summary.kv, run.budget
        if account is None or budget is None or not account.median_protected:
            return None
        return Budget.parse(budget).at(round(account.median_logical)) - account.median_protected

    common: dict[Column, Value] = {
        Column("of them cached", Unit.TOKENS): kv(lambda a: a.cached_tokens, shared=True),
        Column("shared", Unit.TOKENS): kv(lambda a: a.median_shared),
    }
    protects = any(run.summary.kv and run.summary.kv.median_protected for run in runs)
    auxiliary: dict[Column, Value] = {
        Column("auxiliary calls", Unit.RATIO): kv(lambda a: a.auxiliary_calls, shared=True),
        Column("auxiliary tokens", Unit.TOKENS): kv(lambda a: a.auxiliary_tokens, shared=True),
    }
    kinds = [s.value for s in TrialStatus if any(s.value in r.summary.failures for r in runs)]
    return {
        **({Column(BEYOND, Unit.TOKENS): beyond} if protects else {}),
        Column("trials", Unit.NUMBER): lambda run: run.summary.trials,
        Column("peak live MB", Unit.MEGABYTES): megabytes(lambda a: a.median_peak_bytes),
        Column("worst peak MB", Unit.MEGABYTES): megabytes(lambda a: a.max_peak_bytes),
        Column("peak live", Unit.TOKENS): kv(lambda a: a.median_peak_live),
        Column("worst peak", Unit.TOKENS): kv(lambda a: a.max_peak_live),
        Column("logical", Unit.TOKENS): kv(lambda a: a.median_logical),
        Column("live / logical %", Unit.SHARE): kv(lambda a: a.live_over_logical),
        Column("mean decode KV", Unit.TOKENS): kv(lambda a: a.mean_decode_kv),
        Column("KV read MB", Unit.MEGABYTES): kv(
            lambda a: (a.bytes_read + a.auxiliary_bytes_read) / 1e6, shared=True
        ),
        Column("prefilled", Unit.TOKENS): kv(lambda a: a.prefill_tokens, shared=True),
        **(common if _share(runs) else {}),
        Column("restored", Unit.TOKENS): kv(lambda a: a.restored, shared=True),
        **(auxiliary if any(run.summary.asks for run in runs) else {}),
        Column("events", Unit.RATIO): kv(lambda a: a.events, shared=True),
        Column("failed %", Unit.SHARE): lambda run: run.summary.non_completion_rate,
        **{Column(kind.replace("_", " "), Unit.NUMBER): failed(kind) for kind in kinds},
    }


def _throughput(setting: Setting, runs: Sequence[Run]) -> Table:
    alike: dict[tuple[object, ...], list[Run]] = {}
    for run, label in zip(runs, variants(runs), strict=True):
        # A run that is not valid stands alone, below the line.
        key = (label, run.budget, speed_conditions(run), run.reason and str(run.path))
        alike.setdefault(key, []).append(run)
    repeats = [RunGroup(str(label), tuple(same)) for (label, *_), same in alike.items()]
    enough = [each for each in repeats if len(each.measured) >= REPETITIONS]
    bases = [name for name in BASES if any(each.first.method == name for each in enough)]
    figures: dict[Column, Callable[[RunGroup], Cell]] = {
        Column("method"): lambda each: Cell(each.label),
        Column("budget"): lambda each: Cell(budget_text(each.first)),
        Column("allowed", Unit.NUMBER): lambda each: Cell(_allowed(each.first)),
        Column("runs", Unit.NUMBER): lambda each: Cell(len(each.measured)),
        Column("in flight", Unit.RATE): _middle(lambda run: run.in_flight),
        Column("output tok/s", Unit.RATE): _speed,
        **{Column(f"x {name}", Unit.RATIO): partial(_ratio, name, enough) for name in bases},
        Column("TTFT ms", Unit.MILLISECONDS): _middle(lambda run: run.summary.ttft_ms),
        Column("TPOT ms", Unit.MILLISECONDS): _middle(lambda run: run.summary.tpot_ms),
    }
    rows = [Row(tuple(of(each) for of in figures.values()), each.first.reason) for each in repeats]
    what = "throughput and latency"
    return setting_table(Kind.THROUGHPUT, what, setting, figures, rows, _runners(runs), SPEEDS)


def _middle(of: Value) -> Callable[[RunGroup], Cell]:
    def cell(repeats: RunGroup) -> Cell:
        known = [value for run in repeats.measured if (value := of(run)) is not None]
        return Cell(middle(known)) if known else Cell()

    return cell


def _speeds(repeats: RunGroup) -> list[float]:
    return [run.summary.tokens_per_s or 0.0 for run in repeats.measured]


def _speed(repeats: RunGroup) -> Cell:
    found = median(_speeds(repeats))
    return Cell(found.point, found.low, found.high) if found.n >= REPETITIONS else Cell(found.point)


def _ratio(method: str, enough: Sequence[RunGroup], repeats: RunGroup) -> Cell:
    """Compare with the runs of `method` that were served alike, if both sides have enough."""
    served = speed_conditions(repeats.first)
    bases = (e for e in enough if e.first.method == method and speed_conditions(e.first) == served)
    base = next(bases, None)
    if base is None or base is repeats or repeats not in enough:
        return Cell()
    found = speed_change(_speeds(base), _speeds(repeats))
    return Cell(1 + found.point, 1 + found.low, 1 + found.high)


def _allowed(run: Run) -> float | None:
    allowed = run.spec.get("concurrency")
    return allowed if isinstance(allowed, int) else None


def budget_text(run: Run) -> str | None:
    """Return a run's budget as tables write it."""
    return None if run.budget is None else str(run.budget)


# Keys of a task's provenance or settings that a reader must see beside its scores.
SHOWN = (
    "route",
    "web",
    "encoder",
    "corpus",
    "user",
    "user_model",
    "judge",
    "ingest",
    "adversarial",
)


def conditions(runs: Iterable[Run]) -> list[str]:
    """Return a line for each condition of some runs, with all values it has among them."""
    known = list(runs)
    lines = []
    for name in SHOWN:
        values = sorted({value for run in known if (value := _value(run, name))})
        if values:
            lines.append(f"{name.replace('_', ' ')}: {'; '.join(values)}")
    return lines


def _value(run: Run, name: str) -> str:
    task = run.info.provenance.get("task")
    recorded = task.get(name) if isinstance(task, Mapping) else None
    settings = run.spec.get("task_params")
    given = settings.get(name) if isinstance(settings, Mapping) else None
    value = given if recorded is None else recorded
    if isinstance(value, Mapping):
        name, digest = value.get("name") or value.get("model") or "", value.get("sha256", "")
        words = "@".join(filter(None, (str(name), str(digest)[:12])))
        return f"{words} (synthetic)" if value.get("synthetic") else words
    return "" if value is None else str(value)
