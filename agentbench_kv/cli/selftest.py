"""`kvbench selftest`: whether a plug-in does what its contract says."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NoReturn

import click

from agentbench_kv.cli import options as opt

if TYPE_CHECKING:
    from agentbench_kv.conformance import CheckResult
    from agentbench_kv.methods.base import Method


@click.group()
def selftest() -> None:
    """Run the conformance suite of a plug-in.

    Exit code 0 if every check passes, 1 if one fails, 2 if there is no such plug-in.
    """


@selftest.command()
@click.argument("name", metavar="NAME")
@opt.option("--budget TOKENS", "Tokens to keep; chosen for every check if not given.")
@opt.set_option("Parameter of the method.", envvar=None)
@opt.json_option
def method(name: str, budget: str | None, pairs: tuple[str, ...], as_json: bool) -> None:
    """Check a KV-cache method: its selections, and the engine with it against a masked model.

    NAME is a registered method (`agentkv`, `snapkv@kvpress`) or the path of a class that need not
    be installed (`my_package.my_module:MyMethod`, looked for in this folder too).
    """
    from agentbench_kv.conformance.methods import method_suite

    built = _build(name, budget, pairs)
    results = method_suite(built, None if budget is None else built.budget)
    _show("method", built.label, results, as_json)


@selftest.command()
@click.argument("name", metavar="NAME")
@opt.option("--limit", "Only the first N samples.", opt.POSITIVE, default=5)
@opt.local_flag("--full", "All samples.")
@opt.option("--concurrency", kind=opt.POSITIVE, default=8, show_default=False)
@opt.set_option("Setting of the task.", envvar=None)
@opt.json_option
def task(
    name: str, limit: int, full: bool, concurrency: int, pairs: tuple[str, ...], as_json: bool
) -> None:
    """Check a task with agents whose score is known: gold, corrupt and null.

    NAME is a registered task (kvbench ls tasks). The floor that the null agent measures is printed.
    Answers may be as long as the agents' longest. Without a corpus, frames/test and
    browsecomp-plus/test are checked by their synthetic variants.
    """
    from agentbench_kv.conformance.tasks import suite_task, task_suite

    settings = opt.parse_settings(pairs)
    played = suite_task(name, settings)
    if played != name:
        click.echo(f"kvbench: {name} lacks what a user brings; checking {played}", err=True)
        name = played
    results = task_suite(
        name, limit=None if full else limit, settings=settings, concurrency=concurrency
    )
    _show("task", name, results, as_json)


@selftest.command()
@click.argument("name", metavar="NAME")
@opt.many("--method methods METHOD", "Only this method; repeatable.")
@opt.local(
    "--family families",
    "Only this model family; repeatable.",
    click.Choice(("qwen3", "llama")),
    multiple=True,
)
@opt.local_flag("--quick", "Three methods, one family, fewer random sessions.")
@opt.local(
    "--engine-arg pairs NAME=VALUE",
    opt.ENGINE_ARG_HELP,
    multiple=True,
)
@opt.device_option
@opt.json_option
def engine(name: str, pairs: tuple[str, ...], as_json: bool, **chosen: Any) -> None:
    """Check an engine: its tokens, evictions, accounting, sessions and memory.

    It is driven on tiny random models, and compared with the embedded engine and with a plain
    Hugging Face model that is blind to what was evicted. NAME is a registered engine (kvbench ls
    engines); some need an environment of their own (kvbench env create NAME).
    """
    from agentbench_kv.conformance.engines import engine_suite

    engine_args = opt.parse_settings(pairs, "--engine-arg")
    # Triton takes TF32 for float32 on a GPU unless told otherwise, which moves choices.
    os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
    results = engine_suite(name, engine_args=engine_args, report=_say_part, **chosen)
    _show("engine", name, results, as_json)


@selftest.command()
@opt.many("--engine engines NAME", "An engine; repeatable. [default: embedded]")
@opt.many("--family families NAME", "Only this family; repeatable.")
@opt.many("--method methods METHOD", "Only this method; repeatable.")
@opt.local(
    "--engine-arg pairs NAME=VALUE",
    opt.ENGINE_ARG_HELP,
    multiple=True,
)
@opt.local_flag("--markdown", "The table as Markdown.")
@opt.json_option
def models(pairs: tuple[str, ...], markdown: bool, as_json: bool, **chosen: Any) -> NoReturn:
    """Check engines on tiny random models of every family: exact, or refused in one line.

    Tokens and kept sets of each are compared with Hugging Face's own eager attention, blind to what
    was evicted. An engine whose environment is missing is skipped with the reason.
    """
    from agentbench_kv.conformance.models import METHODS, FamilyRow, as_markdown, model_suite
    from agentbench_kv.results.terminal import console, new_table

    def say(row: FamilyRow) -> None:
        click.echo(f"{row.family}, {row.engine}: {row.outcome}", err=True)

    rows = model_suite(
        chosen["engines"] or ("embedded",),
        chosen["families"],
        methods=chosen["methods"] or METHODS,
        engine_args=opt.parse_settings(pairs, "--engine-arg"),
        report=say,
    )
    if as_json:
        opt.print_json([row.document() for row in rows])
    elif markdown:
        click.echo("\n".join(as_markdown(rows)))
    else:
        titles = ("family", "attention", "engine", "layers in reach", "outcome")
        cells = [(row.family, row.attention, row.engine, row.reach, row.outcome) for row in rows]
        console().print(new_table(*titles, rows=cells))
    click.get_current_context().exit(1 if any(row.failed for row in rows) else 0)


def _say_part(part: str, results: list[CheckResult]) -> None:
    failed = sum(not each.ok for each in results)
    outcome = f"{failed} of {len(results)} checks failed" if failed else "ok"
    click.echo(f"{part}: {outcome}", err=True)


def _build(name: str, budget: str | None, pairs: tuple[str, ...]) -> Method:
    from agentbench_kv.conformance.methods import build_method
    from agentbench_kv.errors import UsageError
    from agentbench_kv.registry import load_class

    spec, _, preset = name.partition("@")
    size = opt.parse_budget(budget)
    if size is not None and size.share is not None:
        raise UsageError(f"budget {size}: the self-test takes a number of tokens")
    tokens = None if size is None else size.tokens
    return build_method(load_class(spec), tokens, preset=preset, settings=opt.parse_settings(pairs))


def _show(kind: str, label: str, results: dict[str, list[CheckResult]], as_json: bool) -> NoReturn:
    """Print the outcome and leave with its exit code."""
    from agentbench_kv.conformance import passed
    from agentbench_kv.results.terminal import console, new_table

    every = [(part, each) for part, found in results.items() for each in found]
    ok = passed(results)
    if as_json:
        checks = [{"part": part, **asdict(each)} for part, each in every]
        opt.print_json({kind: label, "ok": ok, "checks": checks})
    else:
        named = [("skipped" if r.skipped else "ok" if r.ok else "FAILED") for _, r in every]
        cells = zip(every, named, strict=True)
        rows = [(part, each.name, verdict, each.detail) for (part, each), verdict in cells]
        console().print(new_table("part", "check", "", "detail", rows=rows))
        verdicts = Counter(named)
        failed, skipped = verdicts["FAILED"], verdicts["skipped"]
        outcome = f"{verdicts['ok']} checks passed" + (f", {skipped} skipped" if skipped else "")
        if failed:
            outcome = f"{failed} of {len(rows)} checks failed"
        console().print(f"{label}: {outcome}", markup=False)
    click.get_current_context().exit(0 if ok else 1)
