"""`kvbench bench serving`: a server under load, full against constrained against compressed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from agentbench_kv.cli.options import parse_budget, parse_settings
from agentbench_kv.cli.spec_options import out_option, quiet_option

if TYPE_CHECKING:
    from agentbench_kv.loadgen.jobs import Load
    from agentbench_kv.results.serving.records import Measurement, ServingPlan
    from agentbench_kv.results.serving.summary import ServingSummary
    from agentbench_kv.serving_bench import ServingRun

__all__ = ["serving"]


@click.command()
@click.option("--engine", default="embedded", envvar="KVBENCH_ENGINE", show_default=True)
@click.option("--model", default="micro", envvar="KVBENCH_MODEL", show_default=True)
@click.option(
    "--method",
    "methods",
    multiple=True,
    default=("agentkv",),
    show_default=True,
    help="Compared with full and full-constrained; repeatable.",
)
@click.option("--budget", metavar="TOKENS", envvar="KVBENCH_BUDGET", help="Of the methods.")
@click.option("--set", "pairs", multiple=True, metavar="KEY=VALUE", help="Of the methods.")
@click.option("--dtype", default="float32", envvar="KVBENCH_DTYPE", show_default=True)
@click.option("--device", default="auto", envvar="KVBENCH_DEVICE", show_default=True)
@click.option(
    "--load-format",
    type=click.Choice(["auto", "dummy"]),
    default="auto",
    show_default=True,
    help="dummy: random weights of the model's shapes, for speed alone.",
)
@click.option(
    "--engine-arg",
    "engine_pairs",
    multiple=True,
    metavar="KEY=VALUE",
    help="Passed on to a serving engine, e.g. max-num-seqs=64; repeatable.",
)
@click.option(
    "--allow-untested-engine",
    "allow_untested",
    is_flag=True,
    help="Go on with a version of a serving engine that was not tried.",
)
@click.option(
    "--url",
    "urls",
    multiple=True,
    metavar="[NAME=]URL",
    help="A server that stands already, instead of an engine started here; repeatable.",
)
@click.option(
    "--wire",
    type=click.Choice(["gateway", "vllm", "sglang"]),
    default="gateway",
    show_default=True,
    help="What servers at --url understand: kvbench serve, or an engine's own endpoints.",
)
@click.option(
    "--tokenizer",
    type=click.Path(file_okay=False, path_type=Path),
    help="With --url: the model's folder, to draw token ids from.",
)
@click.option("--vocab", type=click.IntRange(1), help="With --url: ids below this number instead.")
@click.option(
    "--shape",
    "shapes",
    multiple=True,
    default=("2k/256",),
    show_default=True,
    metavar="IN/OUT",
    help="First prompt and tokens generated in each turn, k = 1,024; repeatable.",
)
@click.option("--turns", type=click.IntRange(1), default=3, show_default=True)
@click.option(
    "--tool-tokens",
    type=click.IntRange(1),
    default=256,
    show_default=True,
    help="New prompt tokens of every later turn.",
)
@click.option("--think-time", type=click.FloatRange(0), default=0.0, help="Seconds between turns.")
@click.option(
    "--concurrency",
    multiple=True,
    type=click.IntRange(1),
    help="Closed loop: sessions at once; repeatable.  [default: 8]",
)
@click.option(
    "--rate",
    "rates",
    multiple=True,
    type=click.FloatRange(0, min_open=True),
    help="Open loop: sessions that begin per second; repeatable.",
)
@click.option(
    "--sessions",
    type=click.IntRange(1),
    help="Of one measurement.  [default: twice the concurrency; 32 in an open loop]",
)
@click.option("--warmup", type=click.IntRange(0), default=2, show_default=True, help="Sessions.")
@click.option("--repeats", type=click.IntRange(1), default=9, show_default=True)
@click.option(
    "--together",
    is_flag=True,
    help="Start every arm's engine once and keep all, instead of one at a time.",
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--timeout", type=click.FloatRange(0, min_open=True), default=1800.0, help="Seconds.")
@click.option("--save-detailed", is_flag=True, help="Keep every request in the files.")
@out_option
@quiet_option
@click.option("--json", "as_json", is_flag=True, envvar="KVBENCH_JSON", help="One JSON document.")
def serving(out: Path, quiet: bool, as_json: bool, **options: Any) -> None:
    """Measure throughput and latency of sessions with several turns.

    Every repetition measures full, full-constrained and the methods, in rotated order. Figures go
    to a folder below --out as they come; the same command goes on where it stopped, and
    kvbench report shows the folder again.

    \b
    kvbench bench serving --budget 512 --shape 2k/256 --concurrency 4 --concurrency 8
    """  # noqa: D301  \b is click's mark for "do not wrap"
    from agentbench_kv.serving_bench import folder_of, measure_serving

    run = _run(options)
    path = folder_of(run.plan, out)
    summary = measure_serving(run, path, lambda *news: None if quiet else _tell(run.plan, *news))
    _show(summary, path, as_json)


def _run(options: dict[str, Any]) -> ServingRun:
    from agentbench_kv.loadgen.jobs import Shape, Vocabulary
    from agentbench_kv.loadgen.prompts import read_vocabulary
    from agentbench_kv.serving_bench import ServingRun

    shapes = tuple(dict.fromkeys(Shape.parse(text) for text in options["shapes"]))
    loads = _loads(
        **{name: options[name] for name in ("concurrency", "rates", "sessions", "warmup")}
    )
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
    from agentbench_kv.loadgen.jobs import Load

    closed = dict.fromkeys(concurrency if concurrency or rates else (8,))
    return (
        *(Load(sessions or 2 * many, concurrency=many, warmup=warmup) for many in closed),
        *(Load(sessions or 32, rate=rate, warmup=warmup) for rate in dict.fromkeys(rates)),
    )


def _plan(options: dict[str, Any], shapes: list[str], loads: list[str]) -> ServingPlan:
    from agentbench_kv.errors import UsageError
    from agentbench_kv.results.serving.records import BASES, ServingPlan
    from agentbench_kv.serving_arms import engine_arms, url_arms

    same = ("turns", "tool_tokens", "sessions", "warmup", "repeats", "seed", "together")
    shared: dict[str, Any] = {name: options[name] for name in same}
    shared |= {"shapes": shapes, "loads": loads, "think_time_s": options["think_time"]}
    model, wire = options["model"], options["wire"]
    if options["urls"]:
        arms = url_arms(options["urls"])
        return ServingPlan(
            engine="url", model=model, weights="unknown", wire=wire, arms=arms, **shared
        )
    if wire != "gateway":
        raise UsageError("--wire is for servers at --url; engines started here speak as gateway")
    budget = parse_budget(options["budget"]) if options["budget"] else None
    wanted = [*((base, None) for base in BASES), *((name, budget) for name in options["methods"])]
    where = {name: options[name] for name in ("dtype", "device")}
    dummy = options["load_format"] == "dummy"
    settings = parse_settings(options["pairs"])
    arms = engine_arms(options["engine"], model, wanted, settings, dummy=dummy, **where)
    return ServingPlan(
        engine=options["engine"],
        model=model,
        weights="dummy" if dummy else "loaded",
        engine_args=parse_settings(options["engine_pairs"], "--engine-arg"),
        allow_untested=options["allow_untested"],
        arms=arms,
        **where,
        **shared,
    )


def _tell(plan: ServingPlan, measured: Measurement, before: bool) -> None:
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
    from agentbench_kv.cli.documents import print_json
    from agentbench_kv.results.tables.formats import show
    from agentbench_kv.results.tables.serving import summary_tables

    if as_json:
        print_json({**summary.model_dump(mode="json"), "path": str(path)})
        return
    click.echo(path, err=True)
    show(summary_tables(summary), "terminal")
