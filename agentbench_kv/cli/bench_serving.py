"""`kvbench bench serving`: a server under load, full against constrained against compressed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from agentbench_kv.cli import options as opt

if TYPE_CHECKING:
    from agentbench_kv.serving_bench.bench import ServingRun
    from agentbench_kv.serving_bench.jobs import Load
    from agentbench_kv.serving_bench.measurements import LoadMeasurement, ServingPlan
    from agentbench_kv.serving_bench.summary import ServingSummary


@click.command()
@opt.engine_option
@opt.option("--model", default="micro")
@opt.local(
    "--method methods", "Compared with full and full-constrained; repeatable.", default=("agentkv",)
)
@opt.option("--budget TOKENS", "Of the methods.")
@opt.set_option("Of the methods.", envvar=None)
@opt.dtype_option
@opt.device_option
@opt.local(
    "--load-format",
    "dummy: random weights of the model's shapes, for speed alone.",
    click.Choice(["auto", "dummy"]),
    default="auto",
)
@opt.local(
    "--engine-arg engine_pairs KEY=VALUE",
    "Passed on to a serving engine, e.g. max-num-seqs=64; repeatable.",
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
    "First prompt and tokens generated in each turn, k = 1,024; repeatable.",
    default=("2k/256",),
)
@opt.local("--turns", kind=opt.POSITIVE, default=3)
@opt.local("--tool-tokens", "New prompt tokens of every later turn.", opt.POSITIVE, default=256)
@opt.local(
    "--think-time", "Seconds between turns.", click.FloatRange(0), default=0.0, show_default=False
)
@opt.local(
    "--concurrency",
    "Closed loop: sessions at once; repeatable.  [default: 8]",
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
    "Of one measurement.  [default: twice the concurrency; 32 in an open loop]",
    opt.POSITIVE,
)
@opt.local("--warmup", "Sessions.", opt.NATURAL, default=2)
@opt.local("--repeats", kind=opt.POSITIVE, default=9)
@opt.local_flag(
    "--together", "Start every arm's engine once and keep all, instead of one at a time."
)
@opt.local("--seed", kind=opt.NATURAL, default=0)
@opt.local("--timeout", "Seconds.", opt.ABOVE_ZERO, default=1800.0, show_default=False)
@opt.local_flag("--save-detailed", "Keep every request in the files.")
@opt.out_option()
@opt.quiet_option
@opt.json_option
def serving(out: Path, quiet: bool, as_json: bool, **options: Any) -> None:
    """Measure throughput and latency of sessions with several turns.

    Every repetition measures full, full-constrained and the methods, in rotated order. Figures go
    to a folder below --out as they come; the same command goes on where it stopped, and
    kvbench report shows the folder again.

    \b
    kvbench bench serving --budget 512 --shape 2k/256 --concurrency 4 --concurrency 8
    """  # noqa: D301  \b is click's mark for "do not wrap"
    from agentbench_kv.serving_bench.bench import folder_of, measure_serving

    run = _run(options)
    path = folder_of(run.plan, out)
    summary = measure_serving(run, path, lambda *news: None if quiet else _tell(run.plan, *news))
    _show(summary, path, as_json)


def _run(options: dict[str, Any]) -> ServingRun:
    from agentbench_kv.serving_bench.bench import ServingRun
    from agentbench_kv.serving_bench.jobs import SessionShape, Vocabulary
    from agentbench_kv.serving_bench.prompts import read_vocabulary

    shapes = tuple(dict.fromkeys(SessionShape.parse(text) for text in options["shapes"]))
    loads = _loads(*(options[name] for name in ("concurrency", "rates", "sessions", "warmup")))
    vocabulary = Vocabulary(options["vocab"]) if options["vocab"] else None
    if options["tokenizer"]:
        vocabulary = read_vocabulary(options["tokenizer"])
    return ServingRun(
        plan=_plan(options, [shape.label for shape in shapes], [load.label for load in loads]),
        shapes=shapes,
        loads=loads,
        vocabulary=vocabulary,
        timeout_s=options["timeout"],
        detailed=options["save_detailed"],
    )


def _loads(
    concurrency: Sequence[int], rates: Sequence[float], sessions: int | None, warmup: int
) -> tuple[Load, ...]:
    from agentbench_kv.serving_bench.jobs import Load

    closed = dict.fromkeys(concurrency if concurrency or rates else (8,))
    return (
        *(Load(sessions or 2 * many, concurrency=many, warmup=warmup) for many in closed),
        *(Load(sessions or 32, rate=rate, warmup=warmup) for rate in dict.fromkeys(rates)),
    )


def _plan(options: dict[str, Any], shapes: list[str], loads: list[str]) -> ServingPlan:
    from agentbench_kv.errors import UsageError
    from agentbench_kv.serving_bench.bench import engine_arms, url_arms
    from agentbench_kv.serving_bench.measurements import ServingPlan
    from agentbench_kv.serving_bench.summary import BASES

    same = ("turns", "tool_tokens", "sessions", "warmup", "repeats", "seed", "together")
    shared: dict[str, Any] = {name: options[name] for name in same}
    shared |= {"shapes": shapes, "loads": loads, "think_time_s": options["think_time"]}
    model, wire = options["model"], options["wire"]
    if options["urls"]:
        about = {"engine": "url", "model": model, "weights": "unknown", "wire": wire}
        return ServingPlan(**about, arms=url_arms(options["urls"]), **shared)
    if wire != "gateway":
        raise UsageError("--wire is for servers at --url; engines started here speak as gateway")
    budget = opt.parse_budget(options["budget"])
    wanted = [*((base, None) for base in BASES), *((name, budget) for name in options["methods"])]
    where = {name: options[name] for name in ("dtype", "device")}
    dummy = options["load_format"] == "dummy"
    settings = opt.parse_settings(options["pairs"])
    arms = engine_arms(options["engine"], model, wanted, settings, dummy=dummy, **where)
    return ServingPlan(
        engine=options["engine"],
        model=model,
        weights="dummy" if dummy else "loaded",
        engine_args=opt.parse_settings(options["engine_pairs"], "--engine-arg"),
        allow_untested=options["allow_untested"],
        arms=arms,
        **where,
        **shared,
    )


def _tell(plan: ServingPlan, measured: LoadMeasurement, before: bool) -> None:
    figures = measured.figures
    head = f"{measured.repetition + 1}/{plan.repeats} {measured.arm}, {measured.shape}"
    ttft = figures.get("median_ttft_ms")
    click.echo(
        f"{head}, {measured.load}: {figures['output_throughput']:,.1f} output tok/s, "
        + (f"TTFT {ttft:,.0f} ms, " if ttft is not None else "")
        + f"{figures['failed']:.0f} failed"
        + (" (measured before)" if before else ""),
        err=True,
    )
    for error, count in measured.errors.items():
        click.echo(f"  {count} x {error}", err=True)


def _show(summary: ServingSummary, path: Path, as_json: bool) -> None:
    from agentbench_kv.results.tables.formats import show
    from agentbench_kv.serving_bench.summary import summary_tables

    if as_json:
        opt.print_json({**summary.model_dump(mode="json"), "path": str(path)})
        return
    click.echo(path, err=True)
    show(summary_tables(summary), "terminal")
