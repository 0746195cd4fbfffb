"""One renderer per format, and where what they render goes.

Terminal, Markdown and LaTeX are for people; CSV and JSON keep values exact and unrounded. LaTeX
needs `booktabs` and `graphicx`: a table is set small; one that would have to be scaled to less than
0.85 of that for the text of a one-column article is split between columns, the leading text columns
repeated; one that is longer than a page, between rows. Each piece is scaled to its column.
"""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from agentbench_kv.errors import PrerequisiteError, UsageError
from agentbench_kv.results.tables import model
from agentbench_kv.results.tables.model import Cell, Column, Line, Row, Table, Unit
from agentbench_kv.results.terminal import console, visible

T = TypeVar("T")

_SPECIAL = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
        # The accents of this character depend on the font's encoding and on babel's language.
        '"': r"\char34{}",
        # A row that begins with a bracket would be read as the option of the line break before.
        "[": "{[}",
        "]": "{]}",
        **{sign: f"\\{sign}" for sign in "{}$&#%_"},
    }
)

_PREAMBLE = r"""% \usepackage{booktabs,graphicx}
\providecommand{\kvbenchfit}[1]{\sbox0{#1}\ifdim\wd0>\linewidth
  \resizebox{\linewidth}{!}{\usebox0}\else\usebox0\fi}
"""
# Widths in tenths of an em of Computer Modern; a sign that is not here has 5.4, as most letters.
_WIDTHS = {
    **dict.fromkeys(" .,:;'|!ijl()[]-/", 3.2), **dict.fromkeys("0123456789rtfsce", 5.0),
    **dict.fromkeys("ABCDEFGHKNOPQRTUVXYZ<>=", 7.8), **dict.fromkeys("mwMW%+@", 8.6),
}  # fmt: skip
_TEXT_WIDTH = 372.0  # 345 pt of a 10 pt article, in tenths of the em of \small, 9.25 pt
_SMALLEST = 0.85
_GAP = 8.7  # between two columns: 4 pt on either side of each
_BOLD = 1.16
_PAGE = 35  # lines of \small on a page, less the space about a caption
_RULES = 3  # lines that the heading and the rules of a tabular take
_MOST_TEXT = 150.0
_MINUS = re.compile(r"(?<![\w.])-(?=[\d.])")
_BREAK = "\0"
_LONG_WORD = re.compile(r"\S{25,}")


def escape(text: str) -> str:
    # `--` would be one dash.
    return visible(text).translate(_SPECIAL).replace("--", "-{}-")


def render(tables: Sequence[Table]) -> str:
    """Return the tables, each in as many `table` environments as it takes."""
    return _PREAMBLE + "\n".join(map(_render, tables))


@dataclass(frozen=True)
class _Block:  # what stands in one piece in a float: a tabular or a note, and its height in lines
    text: str
    height: float


def _render(table: Table) -> str:
    # Without the text of the column for reasons: here they are notes.
    rows = [replace(line, texts=line.texts[: len(table.columns)]) for line in model.lines(table)]
    reasons = {row.below: "" for row in table.unranked}
    numbers = {reason: str(number) for number, reason in enumerate(reasons, start=1)}
    marks = [numbers[row.below] if row.below else "" for row in (*table.ranked, *table.unranked)]
    because = [f"{model.REASON} {reason}" for reason in reasons]
    notes = [_note(note, number) for note, number in zip(because, numbers.values(), strict=True)]
    notes += [_note(note) for note in dict.fromkeys(table.notes)]
    capacity = _PAGE - _lines_of(table.title)
    tabulars = _tabulars(table, list(zip(rows, marks, strict=True)), capacity)
    floats = _packed([*tabulars, *notes], lambda block: block.height, capacity)
    return "\n".join(
        _float(table, blocks, continued=number > 0) for number, blocks in enumerate(floats)
    )


def _packed(items: Iterable[T], height: Callable[[T], float], most: float) -> list[list[T]]:
    pages: list[list[T]] = [[]]
    for item in items:
        if pages[-1] and sum(map(height, (*pages[-1], item))) > most:
            pages.append([])
        pages[-1].append(item)
    return pages


def _float(table: Table, blocks: Sequence[_Block], continued: bool) -> str:
    parts = [
        r"\begin{table}[htbp]",
        r"\centering\small\setlength{\tabcolsep}{4pt}",
        rf"\caption{{{_prose(table.title)}{', continued' * continued}}}",
        *[rf"\label{{tab:{table.key}}}"] * (not continued),
        "\n\\par\\smallskip\n".join(block.text for block in blocks),
        r"\end{table}",
    ]
    return "\n".join(parts) + "\n"


def _tabulars(table: Table, rows: Sequence[tuple[Line, str]], capacity: float) -> Iterator[_Block]:
    """Yield the table in pieces that are neither wider than the text nor longer than a page."""
    # The first columns, those of text, name a row.
    units = [column.unit is Unit.TEXT for column in table.columns]
    stub = max(1, [*units, False].index(False))
    groups = _column_groups(table, [line for line, _ in rows], stub)
    # Of two groups, those of the same rows fit on one page.
    most = capacity / min(len(groups), 2) - _RULES
    for part in _packed(rows, lambda row: _height(row[0]), most):
        yield _tabular(table, part, groups[0])
        for group in groups[1:]:
            filled = [row for row in part if any(row[0].texts[i] for i in group[stub:])]
            if filled:
                yield _tabular(table, filled, group)


def _column_groups(table: Table, rows: Sequence[Line], stub: int) -> list[list[int]]:
    """Return the columns of each piece, in the order they stand in."""
    widths = [_column_width(table, rows, index) for index in range(len(table.columns))]
    most = _TEXT_WIDTH / _SMALLEST
    pieces = _grouped(widths, stub, most)
    # As even as they can be in that number.
    evener = (_grouped(widths, stub, most * share / 20) for share in range(8, 20))
    return next((found for found in evener if len(found) == len(pieces)), pieces)


def _grouped(widths: Sequence[float], stub: int, most: float) -> list[list[int]]:
    """Return the columns from `stub` on in as few groups as `most` allows, the stub before each."""
    first = list(range(stub))
    groups = [first]
    for index in range(stub, len(widths)):
        wanted = [*groups[-1], index]
        width = sum(widths[i] for i in wanted) + _GAP * (len(wanted) - 1)
        if width > most and groups[-1] != first:
            groups.append(first)
        groups[-1] = [*groups[-1], index]
    return groups


def _column_width(table: Table, rows: Sequence[Line], index: int) -> float:
    number = table.columns[index].unit is not Unit.TEXT
    texts = [(table.columns[index].title, False)]
    texts += [(line.texts[index], line.strong[index]) for line in rows]
    # A minus is as wide as a plus.
    sizes = [_width(text.replace("-", "+") if number else text, bold) for text, bold in texts]
    return min(max(sizes), _MOST_TEXT) if not number else max(sizes)


def _tabular(table: Table, rows: Sequence[tuple[Line, str]], group: Sequence[int]) -> _Block:
    kinds = "".join("l" if table.columns[i].unit is Unit.TEXT else "r" for i in group)
    body = [_join(_cell(table, i, table.columns[i].title, False) for i in group), r"\midrule"]
    height = float(_RULES)
    for number, (line, mark) in enumerate(rows):
        if line.below and number and not rows[number - 1][0].below:
            body.append(r"\midrule")
        cells = [_cell(table, i, line.texts[i], line.strong[i]) for i in group]
        cells[0] += rf"\textsuperscript{{{mark}}}" * bool(mark)
        body.append(_join(cells))
        height += _height(line)
    start = rf"\kvbenchfit{{\begin{{tabular}}{{@{{}}{kinds}@{{}}}}"
    end = r"\bottomrule" + "\n" + r"\end{tabular}}"
    return _Block("\n".join((start, r"\toprule", *body, end)), height)


def _cell(table: Table, index: int, text: str, strong: bool) -> str:
    if table.columns[index].unit is not Unit.TEXT:
        written = _MINUS.sub("$-$", escape(text))
    elif _width(text, strong) > _MOST_TEXT:
        written = (
            rf"\parbox[t]{{{_MOST_TEXT * 0.0925:.0f}em}}{{\raggedright\strut {_prose(text)}\strut}}"
        )
    else:
        written = escape(text)
    return rf"\textbf{{{written}}}" if strong else written


def _note(note: str, number: str = "") -> _Block:
    mark = rf"\textsuperscript{{{number}}}\," * bool(number)
    text = rf"{{\footnotesize\raggedright {mark}{_prose(note)}\par}}"
    return _Block(text, 0.9 * _lines_of(note) + 0.3)


def _prose(text: str) -> str:
    """Escape text that may be broken into lines, also within words that no line could hold."""
    words = _LONG_WORD.sub(lambda word: _BREAK.join(re.findall(".{1,12}", word[0])), visible(text))
    return r"\allowbreak{}".join(map(escape, words.split(_BREAK)))


def _width(text: str, bold: bool = False) -> float:
    return sum(_WIDTHS.get(sign, 5.4) for sign in text) * (_BOLD if bold else 1)


def _lines_of(text: str) -> int:
    return 1 + int(1.1 * _width(text) / _TEXT_WIDTH)


def _height(line: Line) -> int:  # in lines, where the longest text is wrapped
    return 1 + int(1.2 * max(map(_width, line.texts)) / _MOST_TEXT)


def _join(cells: Iterable[str]) -> str:
    return " & ".join(cells) + r" \\"


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
    """Return one CSV with a line for every cell that has a value, whatever tables there are."""
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
    "latex": ("tex", lambda tables: render(said_once(tables))),
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
    if name == "terminal":
        _print(console(), tables)
    else:
        sys.stdout.write(FORMATS[name][1](tables))


def write(tables: Sequence[Table], name: str, out: Path) -> list[Path]:
    """Write a file, or one per table into a folder (also a path without suffix); return which."""
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
    for title, number in model.headings(table):
        justify: Literal["left", "right"] = "right" if number else "left"
        grid.add_column(Text(visible(title)), justify=justify, overflow="fold")
    above = True
    for line in model.lines(table):
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
    columns = model.headings(table)
    grid = [
        _markdown_row(markdown_text(title) for title, _ in columns),
        _markdown_row("--:" if number else ":--" for _, number in columns),
    ]
    for line in model.lines(table):
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


# A row's texts (method, seed, run) join to its name.
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
    """Write an apostrophe before text that a spreadsheet would take for a formula."""
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
        "rows": [
            {
                "cells": [{name: getattr(cell, name) for name in _CELL} for cell in row.cells],
                "published": row.published,
                "below_the_line": row.below,
            }
            for row in (*table.ranked, *table.unranked)
        ],
        "notes": [*table.notes, *table.legend],
    }
