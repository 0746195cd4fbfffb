"""`kvbench ls`: what there is."""

from __future__ import annotations

from pathlib import Path

import click

from agentbench_kv.cli.options import NATURAL, flag, json_option, option, out_option, set_option

KINDS = ("methods", "engines", "tasks", "runs")
SORTS = ("name", "newest", "score", "kv", "speed", "failures")
STATES = (
    "running", "interrupted", "complete", "failed",
    "valid", "incomplete", "budget_not_applied", "drift",
)  # fmt: skip


@click.command()
@click.argument("kind", type=click.Choice(KINDS))
@option("--engine", "Say which methods this engine can run.")
@out_option()
@option("--task", "Only this task (or its runs); * and ? match.")
@option("--method", "Only runs of this method; without a preset, of all its presets.")
@option(
    "--model",
    "Only runs of this model; with --lengths, whose tokenizer (a folder). [default: micro]",
)
@option("--status", "Only runs of this status or validity.", click.Choice(STATES))
@option("--sort", "Order of runs; kv is peak live / logical.", click.Choice(SORTS), default="name")
@option(
    "--limit",
    "Most runs in the table, or samples per task with --lengths; 0 for all.",
    NATURAL,
    default=200,
    envvar="KVBENCH_ROWS",
)
@flag(
    "--lengths",
    "For tasks: tokens of the first prompt, and how many samples pass each budget with it.",
    envvar=None,
)
@set_option("With --lengths: setting of the tasks that have it; repeatable.")
@json_option
def ls(
    kind: str, engine: str | None, out: Path, sort: str, limit: int, lengths: bool,
    pairs: tuple[str, ...], as_json: bool, **filters: str | None,
) -> None:  # fmt: skip
    """List methods (with presets and parameters), engines, tasks or runs.

    The filters, --sort and --limit are for runs.
    """
    if lengths:
        if kind != "tasks":
            raise click.UsageError("--lengths is for tasks: kvbench ls tasks --lengths")
        from agentbench_kv.cli.lengths import show_lengths

        show_lengths(filters["task"], filters["model"] or "micro", limit or None, pairs, as_json)
        return
    if kind == "runs":
        from agentbench_kv.results.listing import Query, list_runs

        list_runs(out, Query(**filters, sort=sort), limit, as_json)
        return
    from agentbench_kv.cli.output import show_listing

    show_listing(kind, engine, as_json)
