"""`kvbench ls`: which methods, engines, tasks and runs there are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

import click

from agentbench_kv.cli import options as opt
from agentbench_kv.errors import UsageError
from agentbench_kv.results.terminal import console, new_table

if TYPE_CHECKING:
    from agentbench_kv.run.lengths import PromptLengths


KINDS = ("methods", "engines", "tasks", "runs")
SORTS = ("name", "newest", "score", "kv", "speed", "failures")
STATES = (
    "running", "interrupted", "unclear", "taken_over", "complete", "failed",
    "valid", "incomplete", "budget_not_applied", "drift",
)  # fmt: skip


@click.command()
@click.argument("kind", type=click.Choice(KINDS))
@opt.option("--engine", "Say which methods this engine can run.")
@opt.out_option()
@opt.option("--task", "Only this task (or its runs); * and ? match.")
@opt.option("--method", "Only runs of this method; without a preset, of all its presets.")
@opt.option(
    "--model",
    "Only runs of this model; with --lengths, whose tokenizer (a folder). [default: micro]",
)
@opt.option("--status", "Only runs of this status or validity.", click.Choice(STATES))
@opt.option(
    "--sort", "Order of runs; kv is peak live / logical.", click.Choice(SORTS), default="name"
)
@opt.option(
    "--limit",
    "Most runs in the table, or samples per task with --lengths; 0 for all.",
    opt.NATURAL,
    default=200,
    envvar="KVBENCH_ROWS",
)
@opt.flag(
    "--lengths",
    "For tasks: tokens of the first prompt, and how many samples pass each budget with it.",
    envvar=None,
)
@opt.set_option("With --lengths: setting of the tasks that have it; repeatable.")
@opt.json_option
def ls(
    kind: str,
    engine: str | None,
    out: Path,
    sort: str,
    limit: int,
    lengths: bool,
    pairs: tuple[str, ...],
    as_json: bool,
    **filters: str | None,
) -> None:
    """List methods (with presets and parameters), engines, tasks or runs.

    The filters, --sort and --limit are for runs.
    """
    if lengths:
        if kind != "tasks":
            raise click.UsageError("--lengths is for tasks: kvbench ls tasks --lengths")
        _show_lengths(filters["task"], filters["model"] or "micro", limit or None, pairs, as_json)
        return
    if kind == "runs":
        from agentbench_kv.results.index import Query, list_runs

        list_runs(out, Query(**filters, sort=sort), limit, as_json)
        return
    from agentbench_kv.cli.output import show_listing

    show_listing(kind, engine, as_json)


def _show_lengths(
    pattern: str | None, model: str, limit: int | None, pairs: Sequence[str], as_json: bool
) -> None:
    """Measure and print; `model` has the tokenizer; tasks that cannot be played go to stderr."""
    from agentbench_kv.registry import names
    from agentbench_kv.run.lengths import BUDGETS, prompt_lengths

    tasks = [name for name in names("task") if fnmatchcase(name, pattern or "*")]
    if not tasks:
        raise UsageError(f"no task is called {pattern!r} (kvbench ls tasks shows all)")
    rows = prompt_lengths(tasks, model, limit, opt.parse_settings(pairs), left_out=_left_out)
    if as_json:
        opt.print_json([asdict(row) for row in rows])
        return
    columns = ("task", "samples", "shortest", "median", "longest")
    over = [f"> {budget:,}" for budget in BUDGETS]
    console().print(new_table(*columns, *over, rows=map(_cells, rows)))
    for line in _notes(model, rows):
        console().print(line, markup=False, soft_wrap=True)


def _notes(model: str, rows: Sequence[PromptLengths]) -> list[str]:
    """Say what was counted with which tokenizer, and what the figures do not say."""
    from agentbench_kv.engines.embedded.model import SHIPPED

    entries = f" ({rows[0].vocabulary:,} entries)" if rows else ""
    notes = [
        f"tokens of the first prompt (system prompt, tools, first request), counted with the "
        f"tokenizer and chat template of {model}{entries}",
        "> B: share of samples whose first prompt alone exceeds a budget of B; tool results, "
        "answers and later turns come on top",
    ]
    if model in SHIPPED:
        notes.append(
            f"{model}'s vocabulary is small, so the same text is more tokens than in a large "
            "model's: for a model of yours, count with --model FOLDER"
        )
    return notes


def _cells(row: PromptLengths) -> list[str]:
    sizes = (row.shortest, row.median, row.longest)
    shares = [f"{share:.0%}" for share in row.over.values()]
    return [row.task, f"{row.samples:,}", *(f"{size:,.0f}" for size in sizes), *shares]


def _left_out(task: str, why: str) -> None:
    click.echo(f"kvbench: {task} is left out: {' '.join(why.split())}", err=True)
