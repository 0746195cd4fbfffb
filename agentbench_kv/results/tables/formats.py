"""One renderer per format, and where what they render goes.

Terminal, Markdown and LaTeX are for people; CSV and JSON keep values exact and unrounded.
"""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from agentbench_kv.errors import PrerequisiteError, UsageError
from agentbench_kv.results.tables import latex
from agentbench_kv.results.tables.model import Cell, Column, Row, Table, Unit
from agentbench_kv.results.tables.text import headings, lines
from agentbench_kv.results.terminal import console, visible

SCHEMA = 1
_WHERE = ("task", "model", "engine", "metric")
_CELL = ("value", "low", "high", "p_value", "mark")
CSV_COLUMNS = (
    *("table", "kind", *_WHERE, "row", "column", "unit", *_CELL),
    *("published", "below_the_line"),
)
WIDTH = 200
_FORMULA = ("=", "+", "-", "@")
_MARKUP = re.compile(r"([\\`*_{}\[\]<>|#~!&$])")


def said_once(tables: Sequence[Table]) -> list[Table]:
    """Return the tables with each line of a legend among the notes of the first that has it."""
    said: set[str] = set()
    found = []
    for table in tables:
        fresh = [line for line in table.legend if line not in said]
        said |= set(fresh)
        found.append(replace(table, notes=(*table.notes, *fresh), legend=()))
    return found


def render_terminal(tables: Sequence[Table]) -> str:
    """Return the tables as plain text, wide enough that rows stay whole."""
    stream = io.StringIO()
    _print(Console(file=stream, width=WIDTH, highlight=False), tables)
    return stream.getvalue()


def render_markdown(tables: Sequence[Table]) -> str:
    """Return GitHub-flavoured Markdown: a heading each, a marked cell bold, notes as a list."""
    return "\n\n".join(map(_markdown, said_once(tables))) + "\n"


def render_csv(tables: Sequence[Table]) -> str:
    """Return one CSV with a line for every cell that has a value, whatever tables there are.

    A row's texts (method, seed, run) join to its name. Text that a spreadsheet would take for a
    formula begins with an apostrophe.
    """
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for table in tables:
        for row, column, cell in table.cells():
            if column.unit is not Unit.TEXT and cell.value is not None:
                writer.writerow(map(_harmless, _csv_row(table, row, column, cell)))
    return stream.getvalue()


def render_json(tables: Sequence[Table]) -> str:
    """Return one JSON document: schema version and tables, shares as shares."""
    document = {"schema": SCHEMA, "tables": [_document(table) for table in tables]}
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


FORMATS: dict[str, tuple[str, Callable[[Sequence[Table]], str]]] = {
    "terminal": ("txt", render_terminal),
    "markdown": ("md", render_markdown),
    "csv": ("csv", render_csv),
    "latex": ("tex", lambda tables: latex.render(said_once(tables))),
    "json": ("json", render_json),
}


def choose_format(name: str | None, out: Path | None) -> str:
    """Return the format asked for, else the one of the file's suffix, else `terminal`."""
    if name is not None or out is None or _is_folder(out):
        return name or "terminal"
    by_suffix = {f".{suffix}": known for known, (suffix, _) in FORMATS.items()}
    if out.suffix not in by_suffix:
        raise UsageError(
            f"{out}: no format ends in {out.suffix!r}; add --format or use {', '.join(by_suffix)}"
        )
    return by_suffix[out.suffix]


def show(tables: Sequence[Table], name: str) -> None:
    """Print the tables on stdout."""
    if name == "terminal":
        _print(console(), tables)
    else:
        sys.stdout.write(FORMATS[name][1](tables))


def write(tables: Sequence[Table], name: str, out: Path) -> list[Path]:
    """Write one file, or one file per table into a folder; return what was written.

    A path that exists as a folder or has no suffix is a folder.
    """
    suffix, render = FORMATS[name]
    if _is_folder(out):
        texts = {path: render([table]) for path, table in _named(tables, out, suffix).items()}
    else:
        texts = {out: render(tables)}
    try:
        for path, text in texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise PrerequisiteError(f"cannot write {out}: {error.strerror or error}") from error
    return list(texts)


def _named(tables: Sequence[Table], folder: Path, suffix: str) -> dict[Path, Table]:
    """Give each table a file of its own, also where two keys are equal but for odd characters."""
    named: dict[Path, Table] = {}
    for table in tables:
        path, copy = folder / f"{table.key}.{suffix}", 2
        while path in named:
            path, copy = folder / f"{table.key}-{copy}.{suffix}", copy + 1
        named[path] = table
    return named


def _is_folder(out: Path) -> bool:
    return out.is_dir() or not out.suffix


def _print(where: Console, tables: Sequence[Table]) -> None:
    """Print each table under its title, with its notes; a marked cell is bold and ends in `*`."""
    for index, table in enumerate(said_once(tables)):
        if index:
            where.print()
        where.print(Text(visible(table.title), style="bold"), soft_wrap=True)
        where.print(_grid(table))
        for note in table.notes:
            where.print(Text(visible(note), style="dim"), soft_wrap=True)


def _grid(table: Table) -> RichTable:
    grid = RichTable(box=None, pad_edge=False, header_style="bold")
    for title, number in headings(table):
        justify: Literal["left", "right"] = "right" if number else "left"
        grid.add_column(Text(visible(title)), justify=justify, overflow="fold")
    above = True
    for line in lines(table):
        if line.below and above:
            grid.add_row("--")
        above = not line.below
        cells = (
            Text(f"{text} *", style="bold") if strong else Text(text or "-")
            for text, strong in zip(line.texts, line.strong, strict=True)
        )
        grid.add_row(*cells, style="dim" if line.below else "")
    return grid


def _markdown(table: Table) -> str:
    columns = headings(table)
    grid = [
        _markdown_row(markdown_text(title) for title, _ in columns),
        _markdown_row("--:" if number else ":--" for _, number in columns),
    ]
    for line in lines(table):
        cells = zip(map(markdown_text, line.texts), line.strong, strict=True)
        grid.append(_markdown_row(f"**{text}**" if strong else text for text, strong in cells))
    notes = [f"- {markdown_text(note)}" for note in table.notes]
    parts = [f"### {markdown_text(table.title)}", "\n".join(grid), "\n".join(notes)]
    return "\n\n".join(part for part in parts if part)


def _markdown_row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def markdown_text(text: str) -> str:
    """Return text that Markdown shows as it is: no markup, no link, no tag, no new cell."""
    return _MARKUP.sub(r"\\\1", visible(text))


def _csv_row(table: Table, row: Row, column: Column, cell: Cell) -> list[object]:
    texts = (
        str(cell.value)
        for column, cell in zip(table.columns, row.cells, strict=True)
        if column.unit is Unit.TEXT and cell.value is not None
    )
    return [
        *(table.key, table.kind.value, *map(table.where.get, _WHERE)),
        *(", ".join(texts), column.title, column.unit.value),
        *(getattr(cell, name) for name in _CELL),
        *(int(row.published), row.below),
    ]


def _harmless(value: object) -> object:
    if not isinstance(value, str):
        return value
    text = visible(value)
    return f"'{text}" if text.startswith(_FORMULA) else text


def _document(table: Table) -> dict[str, Any]:
    return {
        "kind": table.kind.value,
        "key": table.key,
        "title": table.title,
        **table.where,
        "columns": [{"title": c.title, "unit": c.unit.value} for c in table.columns],
        "rows": [_row_document(row) for row in (*table.ranked, *table.unranked)],
        "notes": [*table.notes, *table.legend],
    }


def _row_document(row: Row) -> dict[str, Any]:
    cells = [{name: getattr(cell, name) for name in _CELL} for cell in row.cells]
    return {"cells": cells, "published": row.published, "below_the_line": row.below}
