"""`kvbench bench serving`: a server under load, full against constrained against compressed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from agentbench_kv.cli import options as opt
from agentbench_kv.cli.recorded import like_run

if TYPE_CHECKING:
    from agentbench_kv.run.recordings import Recording
    from agentbench_kv.serving_bench.bench import ServingRun
    from agentbench_kv.serving_bench.jobs import Load
    from agentbench_kv.serving_bench.measurements import LoadMeasurement, ServingPlan
    from agentbench_kv.serving_bench.summary import ServingSummary
    from agentbench_kv.serving_bench.trace import LoadTrace


@click.command()
@opt.engine_option
@opt.option("--model", default="micro")
@opt.local(
    "--method methods", "Compared with full and full-constrained; repeatable.", default=("agentkv",)
)
@opt.local_flag("--alone", "Measure the methods only, without full and full-constrained.")
@opt.option("--budget TOKENS", "Of the methods.")
@opt.set_option("Of the methods.", envvar=None)
@opt.dtype_option
@opt.local(
    "--kv-dtype kv_dtypes",
    "Precision of cached rows, as kvbench run takes it; `auto` is the dtype's. Every arm comes at "
    "each; repeatable.",
    default=("auto",),
)
@opt.local(
    "--pool-mb",
    "Equal memory: MB of cached rows for every arm.  [default: the engine's choice]",
    opt.ABOVE_ZERO,
)
@opt.device_option
@opt.local(
    "--load-format",
    "dummy: random weights of the model's shapes, for speed alone.",
    click.Choice(["auto", "dummy"]),
    default="auto",
)
@opt.local(
    "--engine-arg engine_pairs NAME=VALUE",
    opt.ENGINE_ARG_HELP,
    multiple=True,
)
@opt.local_flag(
    "--allow-untested-engine allow_untested",
    "Go on with a version of a serving engine that was not tried.",
)
@opt.local(
    "--url urls [NAME=]URL",
    "A server that stands already, instead of an engine started here; repeatable.",
    multiple=True,
)
@opt.local(
    "--wire",
    "What servers at --url understand: kvbench serve, or an engine's own endpoints.",
    click.Choice(["gateway", "vllm", "sglang"]),
    default="gateway",
)
@opt.local("--tokenizer", "With --url: the model's folder, to draw token ids from.", opt.FOLDER)
@opt.local("--vocab", "With --url: ids below this number instead.", opt.POSITIVE)
@opt.local(
    "--shape shapes IN/OUT",
    "First prompt and tokens generated in each turn, k = 1,024; repeatable.  [default: 2k/256]",
    multiple=True,
)
@opt.local(
    "--trace",
    "Sessions to play instead of shapes: a file in this project's form, Mooncake's, BurstGPT's, or "
    "of messages; or a run's folder, whose own sessions are played to the token.",
    opt.PATH,
)
@opt.local(
    "--fixed-schedule fixed_schedule",
    "Begin the trace's sessions, and send their calls, when the trace says.",
    is_flag=True,
)
@opt.local(
    "--time-scale",
    "The trace's gaps and clock are as many times as long.",
    opt.ABOVE_ZERO,
    default=1.0,
    show_default=False,
)
@opt.local(
    "--goodput targets KEY:MS",
    "What a good request stays within, as vllm bench serve takes it: ttft:2000, tpot:50 or e2el; "
    "repeatable.",
    multiple=True,
)
@opt.local("--turns", kind=opt.POSITIVE, default=3)
@opt.local("--tool-tokens", "New prompt tokens of every later turn.", opt.POSITIVE, default=256)
@opt.local(
    "--think-time",
    "Seconds between turns; of a trace, only of messages.",
    click.FloatRange(0),
    default=0.0,
    show_default=False,
)
@opt.local(
    "--concurrency",
    "Closed loop: sessions at once; repeatable: an arm's best load is one of these.  [default: 8]",
    opt.POSITIVE,
    multiple=True,
)
@opt.local(
    "--rate rates",
    "Open loop: sessions that begin per second; repeatable.",
    opt.ABOVE_ZERO,
    multiple=True,
)
@opt.local(
    "--sessions",
    "Of one measurement.  [default: twice the concurrency; 32 in an open loop; all of a trace]",
    opt.POSITIVE,
)
@opt.local("--warmup", "Sessions.", opt.NATURAL, default=2)
@opt.local("--repeats", kind=opt.POSITIVE, default=9)
@opt.local_flag(
    "--together", "Start every arm's engine once and keep all, instead of one at a time."
)
@opt.local("--seed", kind=opt.NATURAL, default=0)
@opt.local("--timeout", "Seconds.", opt.ABOVE_ZERO, default=1800.0, show_default=False)
@opt.local_flag(
    "--no-exact-calls",
    "Do not play a trace's recorded answers once more on every arm, to count exact calls.",
)
@opt.local_flag("--save-detailed", "Keep every request in the files.")
@opt.out_option()
@opt.quiet_option
@opt.json_option
def serving(out: Path, quiet: bool, as_json: bool, **options: Any) -> None:
    """Measure throughput and latency of sessions with several turns.

    Every repetition measures full, full-constrained and the methods, in rotated order. Figures go
    to a folder below --out as they come; the same command goes on where it stopped, measures
    again what has failed requests, and kvbench report shows the folder again.

    \b
    kvbench bench serving --budget 512 --shape 2k/256 --concurrency 4 --concurrency 8
    """  # noqa: D301  \b is click's mark for "do not wrap"
    from agentbench_kv.serving_bench.bench import folder_of, measure_serving

    run = _run(options)
    path = folder_of(run.plan, out)
    summary = measure_serving(run, path, lambda *news: None if quiet else _tell(run.plan, *news))
    _show(summary, path, as_json)
    if unanswered := [cell for cell in summary.cells if not cell.answered]:
        said = (f"{each.arm}, {each.shape}, {each.load}: {each.reasons[0]}" for each in unanswered)
        click.echo("error: no request was answered: " + "; ".join(said), err=True)
        raise SystemExit(1)


def _run(options: dict[str, Any]) -> ServingRun:
    from agentbench_kv.serving_bench.bench import ServingRun
    from agentbench_kv.serving_bench.jobs import SessionShape, Vocabulary, Workload
    from agentbench_kv.serving_bench.prompts import read_vocabulary

    trace = _trace(options)
    if trace is not None:
        options |= {"sessions": len(trace.sessions), "turns": 0, "tool_tokens": 0}
    asked = [] if trace is not None else options["shapes"] or ("2k/256",)
    shapes = dict.fromkeys(SessionShape.parse(text) for text in asked)
    same = (options["turns"], options["tool_tokens"], options["think_time"])
    workloads = (trace,) if trace is not None else tuple(Workload(one, *same) for one in shapes)
    loads = _loads(options)
    vocabulary = Vocabulary(options["vocab"]) if options["vocab"] else None
    if options["tokenizer"]:
        vocabulary = read_vocabulary(options["tokenizer"])
    return ServingRun(
        plan=_plan(options, trace, [each.label for each in workloads], [e.label for e in loads]),
        workloads=workloads,
        loads=loads,
        vocabulary=vocabulary,
        timeout_s=options["timeout"],
        detailed=options["save_detailed"],
        recordings=_recordings(options, trace),
        messages=options["trace"] if _of_messages(trace) else None,
    )


def _of_messages(trace: LoadTrace | None) -> bool:
    return trace is not None and trace.form == "messages"


def _recordings(options: dict[str, Any], trace: LoadTrace | None) -> tuple[Recording, ...]:
    """Return the sessions of a trace that says what was answered; for engines started here."""
    if trace is None or options["urls"] or options["no_exact_calls"]:
        return ()
    return tuple(options["recordings"][: len(trace.sessions)])


def _trace(options: dict[str, Any]) -> LoadTrace | None:
    """Read the trace; a UsageError for options that say something else than it."""
    from agentbench_kv.errors import UsageError
    from agentbench_kv.serving_bench.recorded import recorded_messages
    from agentbench_kv.serving_bench.trace import read_trace

    path: Path | None = options["trace"]
    options |= {"recordings": [], "tool_syntax": "auto"}
    given = click.get_current_context().get_parameter_source
    if path is None:
        for name in ("fixed_schedule", "time_scale"):
            if given(name) is not ParameterSource.DEFAULT:
                raise UsageError(f"--{name.replace('_', '-')} is for a --trace; shapes have none")
        return None
    alike = {"shapes": "--shape", "turns": "--turns", "tool_tokens": "--tool-tokens"}
    for name, option in alike.items():
        if given(name) is not ParameterSource.DEFAULT:
            raise UsageError(f"{option} is for sessions that are all alike; --trace has its own")
    if path.is_dir():
        trace = _of_run(path, options)
    else:
        folder = options["tokenizer"] if options["urls"] else options["model"]
        about = (str(folder), options["think_time"], options["recordings"])
        messages = recorded_messages(*about) if folder else None
        trace = read_trace(path, messages).first(options["sessions"])
    if options["think_time"] and trace.form not in ("messages", "run"):
        raise UsageError("--think-time: this trace has gaps of its own; see --time-scale")
    if options["fixed_schedule"] and not trace.timed:
        raise UsageError(f"--fixed-schedule: {path} does not say when its sessions begin")
    return trace


def _of_run(path: Path, options: dict[str, Any]) -> LoadTrace:
    """Read a run's own sessions, which are then of its model and dtype."""
    from agentbench_kv.run.fidelity import one_run
    from agentbench_kv.run.recordings import record_run
    from agentbench_kv.serving_bench.recorded import run_trace

    folder = one_run(path)
    like_run(folder, options)
    recorded = record_run(folder, options["sessions"])
    options["recordings"] = recorded.recordings
    options |= {"model": recorded.model, "tool_syntax": recorded.tool_syntax}
    trace = run_trace(folder, recorded, options["think_time"])
    return trace.first(options["sessions"])


def _loads(options: dict[str, Any]) -> tuple[Load, ...]:
    from agentbench_kv.serving_bench.jobs import Load

    asked, rates = options["concurrency"], dict.fromkeys(options["rates"])
    sessions, warmup = options["sessions"], options["warmup"]
    fixed = options["fixed_schedule"]
    closed = dict.fromkeys(asked if asked or rates or fixed else (8,))
    return (
        *(Load(sessions or 2 * many, concurrency=many, warmup=warmup) for many in closed),
        *(Load(sessions or 32, rate=rate, warmup=warmup) for rate in rates),
        *[Load(sessions, warmup=warmup)] * fixed,
    )


def _targets(texts: Sequence[str]) -> dict[str, float]:
    """Read `ttft:2000`; a UsageError for what is no such target."""
    from agentbench_kv.errors import UsageError
    from agentbench_kv.serving_bench.figures import TARGETS

    found = {}
    for text in texts:
        name, _, value = text.partition(":")
        try:
            most = float(value)
        except ValueError:
            most = 0.0
        if name not in TARGETS or not 0 < most < float("inf"):
            raise UsageError(f"--goodput {text!r}: expected KEY:MS with {', '.join(TARGETS)}")
        if name in found:
            raise UsageError(f"--goodput {name} is given twice")
        found[name] = most
    return found


def _plan(
    options: dict[str, Any], trace: LoadTrace | None, shapes: list[str], loads: list[str]
) -> ServingPlan:
    from agentbench_kv.engines.base import spelled_arguments
    from agentbench_kv.errors import UsageError
    from agentbench_kv.serving_bench.arms import engine_arms, url_arms
    from agentbench_kv.serving_bench.measurements import ServingPlan
    from agentbench_kv.serving_bench.recorded import trace_figures
    from agentbench_kv.serving_bench.summary import STANDARD

    same = ("turns", "tool_tokens", "sessions", "warmup", "repeats", "seed", "together")
    shared: dict[str, Any] = {name: options[name] for name in same}
    shared |= {"shapes": shapes, "loads": loads, "think_time_s": options["think_time"]}
    shared |= {"goodput": _targets(options["targets"]), "time_scale": options["time_scale"]}
    shared |= {name: options[name] for name in ("pool_mb", "tool_syntax")}
    shared |= {"trace": None if trace is None else trace_figures(trace)}
    model, wire = options["model"], options["wire"]
    if options["urls"]:
        if options["pool_mb"]:
            raise UsageError("--pool-mb is for engines started here")
        about = {"engine": "url", "model": model, "weights": "unknown", "wire": wire}
        folder = options["tokenizer"]
        about |= {"tokenizer": str(folder) if folder else None}
        shared |= {"vocab": None if folder else options["vocab"]}
        return ServingPlan(**about, arms=url_arms(options["urls"]), **shared)
    if wire != "gateway":
        raise UsageError("--wire is for servers at --url; engines started here speak as gateway")
    budget = opt.parse_budget(options["budget"])
    bases = () if options["alone"] else STANDARD
    wanted = [*((base, None) for base in bases), *((name, budget) for name in options["methods"])]
    where = {name: options[name] for name in ("dtype", "device")}
    dummy = options["load_format"] == "dummy"
    settings = opt.parse_settings(options["pairs"])
    asked = [name.replace("auto", "") for name in dict.fromkeys(options["kv_dtypes"])]
    same_for_all = {"dummy": dummy, "kv_dtypes": asked, "messages": _of_messages(trace), **where}
    arms = engine_arms(options["engine"], model, wanted, settings, **same_for_all)
    return ServingPlan(
        engine=options["engine"],
        model=model,
        weights="dummy" if dummy else "loaded",
        engine_args=spelled_arguments(opt.parse_settings(options["engine_pairs"], "--engine-arg")),
        allow_untested=options["allow_untested"],
        arms=arms,
        **where,
        **shared,
    )


def _tell(plan: ServingPlan, measured: LoadMeasurement, before: bool) -> None:
    from agentbench_kv.serving_bench.measurements import GOODPUT

    figures = measured.figures
    head = f"{measured.repetition + 1}/{plan.repeats} {measured.arm}, {measured.shape}"
    ttft = figures.get("median_ttft_ms")
    click.echo(
        f"{head}, {measured.load}: {figures['output_throughput']:,.1f} output tok/s, "
        + (f"TTFT {ttft:,.0f} ms, " if ttft is not None else "")
        + (f"{figures[GOODPUT]:.3g} good requests/s, " if GOODPUT in figures else "")
        + f"{figures['failed']:.0f} failed"
        + (" (measured before)" if before else ""),
        err=True,
    )
    for error, count in measured.errors.items():
        click.echo(f"  {count} x {error}", err=True)


def _show(summary: ServingSummary, path: Path, as_json: bool) -> None:
    from agentbench_kv.results.tables.formats import show
    from agentbench_kv.serving_bench.tables import summary_tables

    if as_json:
        opt.print_json({**summary.model_dump(mode="json"), "path": str(path)})
        return
    click.echo(path, err=True)
    show(summary_tables(summary), "terminal")
