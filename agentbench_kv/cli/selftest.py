"""`kvbench selftest`: whether a plug-in does what its contract says."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from agentbench_kv.cli.options import (
    POSITIVE,
    json_option,
    local,
    many,
    option,
    parse_budget,
    parse_settings,
    set_option,
)

if TYPE_CHECKING:
    from agentbench_kv.conformance.result import CheckResult
    from agentbench_kv.methods.base import Method


@click.group()
def selftest() -> None:
    """Run the conformance suite of a plug-in.

    Exit code 0 if every check passes, 1 if one fails, 2 if there is no such plug-in.
    """


@selftest.command()
@click.argument("name", metavar="NAME")
@option("--budget", "Tokens to keep; chosen for every check if not given.", metavar="TOKENS")
@set_option("Parameter of the method.", envvar=None)
@json_option
@click.pass_context
def method(
    ctx: click.Context, name: str, budget: str | None, pairs: tuple[str, ...], as_json: bool
) -> None:
    """Check a KV-cache method: its selections, and the engine with it against a masked model.

    NAME is a registered method (`agentkv`, `snapkv@kvpress`) or the path of a class that need not
    be installed (`my_package.my_module:MyMethod`, looked for in this folder too).
    """
    # Imported here: torch takes seconds, which `kvbench --help` should not.
    from agentbench_kv.conformance.suite import method_suite, passed

    built = _build(name, budget, pairs)
    results = method_suite(built, None if budget is None else built.budget)
    if as_json:
        _print_json("method", built.label, results)
    else:
        _print_table(built.label, results)
    ctx.exit(0 if passed(results) else 1)


@selftest.command()
@click.argument("name", metavar="NAME")
@option("--limit", "Only the first N samples.", type=POSITIVE, default=5)
@local("--full", "All samples.", is_flag=True)
@option("--concurrency", type=POSITIVE, default=8, show_default=False)
@set_option("Setting of the task.", envvar=None)
@json_option
@click.pass_context
def task(
    ctx: click.Context,
    name: str,
    limit: int,
    full: bool,
    concurrency: int,
    pairs: tuple[str, ...],
    as_json: bool,
) -> None:
    """Check a task with agents whose score is known: gold, corrupt and null.

    NAME is a registered task (kvbench ls tasks). The floor that the null agent measures is printed.
    Answers may be as long as the agents' longest. Without a corpus, frames/test and
    browsecomp-plus/test are checked by their synthetic variants.
    """
    # Imported here: torch takes seconds, which `kvbench --help` should not.
    from agentbench_kv.conformance.suite import passed
    from agentbench_kv.conformance.tasks import suite_task, task_suite

    settings = parse_settings(pairs)
    played = suite_task(name, settings)
    if played != name:
        click.echo(f"kvbench: {name} lacks what a user brings; checking {played}", err=True)
        name = played
    results = task_suite(
        name, limit=None if full else limit, settings=settings, concurrency=concurrency
    )
    if as_json:
        _print_json("task", name, results)
    else:
        _print_table(name, results)
    ctx.exit(0 if passed(results) else 1)


@selftest.command()
@click.argument("name", metavar="NAME")
@many("--method methods", "Only this method; repeatable.", metavar="METHOD")
@local(
    "--family families",
    "Only this model family; repeatable.",
    type=click.Choice(("qwen3", "llama")),
    multiple=True,
)
@local("--quick", "Three methods, one family, fewer random sessions.", is_flag=True)
@local(
    "--engine-arg pairs",
    "Option of the engine's own command line, without dashes; repeatable.",
    multiple=True,
    metavar="KEY=VALUE",
)
@json_option
@click.pass_context
def engine(
    ctx: click.Context,
    name: str,
    methods: tuple[str, ...],
    families: tuple[str, ...],
    quick: bool,
    pairs: tuple[str, ...],
    as_json: bool,
) -> None:
    """Check an engine: its tokens, evictions, accounting, sessions and memory.

    It is driven on tiny random models, and compared with the embedded engine and with a plain
    Hugging Face model that is blind to what was evicted. NAME is a registered engine (kvbench ls
    engines); some need an environment of their own (kvbench env create NAME).
    """
    # Imported here: torch takes seconds, which `kvbench --help` should not.
    from agentbench_kv.conformance.engines import engine_suite
    from agentbench_kv.conformance.suite import passed

    results = engine_suite(
        name,
        methods=methods,
        families=families,
        quick=quick,
        engine_args=parse_settings(pairs, "--engine-arg"),
        report=_say_part,
    )
    if as_json:
        _print_json("engine", name, results)
    else:
        _print_table(name, results)
    ctx.exit(0 if passed(results) else 1)


def _say_part(part: str, results: list[CheckResult]) -> None:
    failed = sum(not each.ok for each in results)
    outcome = f"{failed} of {len(results)} checks failed" if failed else "ok"
    click.echo(f"{part}: {outcome}", err=True)


def _build(name: str, budget: str | None, pairs: tuple[str, ...]) -> Method:
    from agentbench_kv.conformance.methods import build_method
    from agentbench_kv.errors import UsageError
    from agentbench_kv.registry import load_class

    spec, _, preset = name.partition("@")
    size = None if budget is None else parse_budget(budget)
    if isinstance(size, str):
        raise UsageError(f"budget {size}: the self-test takes a number of tokens")
    return build_method(load_class(spec), size, preset=preset, settings=parse_settings(pairs))


def _print_json(kind: str, label: str, results: dict[str, list[CheckResult]]) -> None:
    from dataclasses import asdict

    from agentbench_kv.cli.documents import print_json
    from agentbench_kv.conformance.suite import passed

    checks = [{"part": part, **asdict(each)} for part, found in results.items() for each in found]
    print_json({kind: label, "ok": passed(results), "checks": checks})


def _print_table(label: str, results: dict[str, list[CheckResult]]) -> None:
    from rich.table import Table

    from agentbench_kv.results.terminal import console, plain

    table = Table(box=None, pad_edge=False)
    for column in ("part", "check", "", "detail"):
        table.add_column(column, overflow="fold")
    for part, found in results.items():
        for each in found:
            verdict = "skipped" if each.skipped else "ok" if each.ok else "FAILED"
            table.add_row(part, plain(each.name), verdict, plain(each.detail))
    console().print(table)
    every = [each for found in results.values() for each in found]
    failed = sum(not each.ok for each in every)
    outcome = f"{failed} of {len(every)} checks failed" if failed else _passed(every)
    console().print(f"{label}: {outcome}", markup=False)


def _passed(results: list[CheckResult]) -> str:
    skipped = sum(each.skipped for each in results)
    left = f", {skipped} skipped" if skipped else ""
    return f"{len(results) - skipped} checks passed{left}"
