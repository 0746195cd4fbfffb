"""`kvbench run`: play a task with a method, check the answers, keep the proof."""

from __future__ import annotations

from pathlib import Path

import click

from agentbench_kv.cli.options import parse_budget, parse_settings

__all__ = ["run"]


@click.command()
@click.option(
    "--method",
    "methods",
    multiple=True,
    envvar="KVBENCH_METHOD",
    show_envvar=True,
    help="Method, or method@preset; repeatable. [default: agentkv, full on an engine that cannot "
    "compress]",
)
@click.option(
    "--budget",
    "budgets",
    multiple=True,
    metavar="TOKENS",
    envvar="KVBENCH_BUDGET",
    show_envvar=True,
    help="Tokens kept per (layer, KV head); repeatable.",
)
@click.option("--engine", default="embedded", envvar="KVBENCH_ENGINE", show_default=True)
@click.option(
    "--model",
    default="micro",
    envvar="KVBENCH_MODEL",
    show_default=True,
    help="The shipped micro model, or a Hugging Face model folder.",
)
@click.option(
    "--task",
    "tasks",
    multiple=True,
    default=("micro/recall-5k",),
    envvar="KVBENCH_TASK",
    show_default=True,
    help="Benchmark slice; repeatable. See kvbench ls tasks.",
)
@click.option("--limit", type=int, envvar="KVBENCH_LIMIT", help="Only the first N samples.")
@click.option("--trials", type=int, default=1, envvar="KVBENCH_TRIALS", show_default=True)
@click.option(
    "--seed", "seeds", type=int, multiple=True, default=(0,), envvar="KVBENCH_SEED",
    show_default=True, help="Repeatable.",
)  # fmt: skip
@click.option(
    "--concurrency",
    type=int,
    default=16,
    envvar="KVBENCH_CONCURRENCY",
    show_default=True,
    help="Sessions driven at once.",
)
@click.option(
    "--set",
    "pairs",
    multiple=True,
    metavar="KEY=VALUE",
    envvar="KVBENCH_SET",
    help="Method parameter; repeatable. See kvbench ls methods.",
)
@click.option("--temperature", type=float, default=0.0, envvar="KVBENCH_TEMPERATURE")
@click.option("--max-tokens", type=int, default=1024, envvar="KVBENCH_MAX_TOKENS")
@click.option(
    "--timeout", type=float, default=3600.0, envvar="KVBENCH_TIMEOUT", help="Seconds per trial."
)
@click.option("--dtype", default="float32", envvar="KVBENCH_DTYPE", show_default=True)
@click.option("--device", default="auto", envvar="KVBENCH_DEVICE", show_default=True)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("runs"),
    envvar="KVBENCH_OUT",
    show_default=True,
    help="Folder of runs.",
)
@click.option("--dry-run", is_flag=True, help="Check everything, show what would run, and stop.")
@click.option("--json", "as_json", is_flag=True, envvar="KVBENCH_JSON", help="One JSON document.")
def run(
    methods: tuple[str, ...],
    budgets: tuple[str, ...],
    engine: str,
    model: str,
    tasks: tuple[str, ...],
    limit: int | None,
    trials: int,
    seeds: tuple[int, ...],
    concurrency: int,
    pairs: tuple[str, ...],
    temperature: float,
    max_tokens: int,
    timeout: float,
    dtype: str,
    device: str,
    out: Path,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Run METHOD at BUDGET on TASK and print score, KV figures and validity.

    Repeated options make a grid. The same command finishes a run that was interrupted.
    """
    # Imported here: torch takes seconds, which `kvbench --help` should not.
    from agentbench_kv.cli.output import TrialProgress, show_outcome, show_plan
    from agentbench_kv.runner import run_all
    from agentbench_kv.spec import RunSpec, default_methods, grid

    base = RunSpec(
        engine=engine,
        model=model,
        method="",
        budget=None,
        task="",
        limit=limit,
        trials=trials,
        concurrency=concurrency,
        temperature=temperature,
        max_tokens=max_tokens,
        timeout_s=timeout,
        dtype=dtype,
        device=device,
    )
    sizes: list[int | None] = [parse_budget(text) for text in budgets]
    specs = grid(
        base,
        methods or default_methods(engine),
        sizes or [None],
        tasks,
        seeds,
        parse_settings(pairs),
    )
    if dry_run:
        show_plan(specs, out, as_json)
        return 0
    return show_outcome(run_all(specs, out, TrialProgress()), out, as_json)
