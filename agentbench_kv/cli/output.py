"""What the verbs print: tables for people, one JSON document for programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from agentbench_kv.cli.documents import print_json
from agentbench_kv.engines.base import Capability
from agentbench_kv.errors import KVBenchError
from agentbench_kv.methods.kvpress_adapter import HINT as KVPRESS_HINT
from agentbench_kv.registry import load_engine, load_method, load_task, names
from agentbench_kv.results import render, terminal
from agentbench_kv.results.summary import Summary
from agentbench_kv.spec import RunSpec

AMPLE = 1 << 20  # a budget that every method takes


def evidence_table(groups: Mapping[tuple[str, str, bool], Mapping[str, float]]) -> Table:
    """Return one row per source, kind and outcome of evidence, see `audits.by_outcome`."""
    rows = [
        (
            *(source, kind, "knew it" if right else "got it wrong", f"{values['facts']:.0f}"),
            *(f"{values['held']:.0%}", f"{values['rank_over_places']:.2f}"),
        )
        for (source, kind, right), values in groups.items()
    ]
    columns = ("source", "kind", "agent", "facts", "still held", "rank / places")
    return terminal.new_table(*columns, rows=rows)


def show_plan(specs: Sequence[RunSpec], out: Path, as_json: bool) -> None:
    """Print what would run."""
    if as_json:
        print_json([{"run_id": spec.id, "spec": spec.document()} for spec in specs])
        return
    console = terminal.console()
    for spec in specs:
        console.print(f"{out / spec.id}", markup=False, soft_wrap=True)
    console.print(f"{len(specs)} runs; nothing was started", markup=False)


def show_outcome(summaries: Sequence[Summary], out: Path, as_json: bool) -> int:
    """Print the tables of finished runs and where they are; return the exit code."""
    if as_json:
        documents = [(each.model_dump(mode="json"), out / each.run_id) for each in summaries]
        print_json([{**document, "path": str(path)} for document, path in documents])
        return 0
    console = terminal.console()
    console.print(render.summary_table(summaries))
    for table in render.finer_tables(summaries):
        console.print(table)
    for summary in summaries:
        for note in (*summary.validity.reasons, *summary.notes):
            console.print(f"{summary.run_id}: {note}", markup=False, soft_wrap=True)
    for summary in summaries:
        console.print(str(out / summary.run_id), markup=False, soft_wrap=True)
    return 0


def show_listing(kind: str, engine: str | None, as_json: bool) -> None:
    """Print the methods, engines or tasks there are."""
    rows = {"methods": _methods, "engines": _engines, "tasks": _tasks}[kind](engine)
    if as_json:
        print_json(rows)
        return
    columns = [column.replace("_", " ") for column in (rows[0] if rows else ())]
    cells = [map(_cell, row.values()) for row in rows]
    terminal.console().print(terminal.new_table(*columns, rows=cells))
    if kind == "methods":
        terminal.console().print(KVPRESS_HINT, markup=False, soft_wrap=True)


def _described(kind: str, describe: Callable[[str], dict[str, Any]]) -> list[dict[str, Any]]:
    """Describe every registered name; a plug-in that does not load is named and left out."""
    rows = []
    for name in names(kind):
        try:
            rows.append(describe(name))
        except KVBenchError as error:
            click.echo(f"kvbench: {kind} {name!r} is left out: {error}", err=True)
    return rows


def _methods(engine: str | None) -> list[dict[str, Any]]:
    able = set() if engine is None else set(load_engine(engine).capabilities)
    return _described("method", lambda name: _method(name, engine, able))


def _method(name: str, engine: str | None, able: set[Capability]) -> dict[str, Any]:
    cls = load_method(name)
    plain = cls.create("", AMPLE if cls.compresses else None)
    row: dict[str, Any] = {
        "name": name,
        "summary": cls.summary,
        "presets": {key: dict(value) for key, value in cls.presets.items()},
        "default_preset": cls.default_preset or None,
        "needs_budget": cls.compresses,
        "parameters": [
            {
                "name": spec.name,
                "default": getattr(plain, spec.name),
                "allowed": spec.allowed(),
                "doc": spec.doc,
            }
            for spec in cls.parameters().values()
        ],
        "source": cls.source,
    }
    return row if engine is None else row | {f"on_{engine}": plain.needs <= able}


def _engines(_: str | None) -> list[dict[str, Any]]:
    return _described("engine", _engine)


def _engine(name: str) -> dict[str, Any]:
    cls = load_engine(name)
    summary = (cls.__doc__ or "").strip().splitlines()[0]
    return {"name": name, "summary": summary, "capabilities": sorted(cls.capabilities)}


def _tasks(_: str | None) -> list[dict[str, Any]]:
    return _described("task", lambda name: {"name": name, "summary": load_task(name).summary})


def _cell(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(map(str, value))
    if isinstance(value, list):
        return ", ".join(
            f"{item['name']}={item['default']}" if isinstance(item, dict) else str(item)
            for item in value
        )
    return "" if value is None else str(value)
