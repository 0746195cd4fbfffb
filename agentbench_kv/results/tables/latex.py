r"""Tables as LaTeX, with `booktabs` and `graphicx`, no wider than the text. A marked cell is bold.

A table is set small. One that would have to be scaled to less than 0.85 of that for the text of a
one-column article is split between columns, the leading text columns repeated; one that is longer
than a page, between rows. Then each piece is scaled to the column it stands in, if it is too wide.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from agentbench_kv.results.tables.model import Table, Unit
from agentbench_kv.results.tables.text import REASON, Line, lines
from agentbench_kv.results.terminal import visible

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
    """Return text that LaTeX typesets as it is."""
    # `--` would be one dash.
    return visible(text).translate(_SPECIAL).replace("--", "-{}-")


def render(tables: Sequence[Table]) -> str:
    """Return the tables, each in as many `table` environments as it takes."""
    return _PREAMBLE + "\n".join(map(_render, tables))


@dataclass(frozen=True)
class _Block:
    """What stands in one piece in a float: a tabular or a note, and its height in lines."""

    text: str
    height: float


def _render(table: Table) -> str:
    # Without the text of the column for reasons: here they are notes.
    rows = [replace(line, texts=line.texts[: len(table.columns)]) for line in lines(table)]
    reasons = {row.below: "" for row in table.unranked}
    numbers = {reason: str(number) for number, reason in enumerate(reasons, start=1)}
    marks = [numbers[row.below] if row.below else "" for row in (*table.ranked, *table.unranked)]
    because = [f"{REASON} {reason}" for reason in reasons]
    notes = [_note(note, number) for note, number in zip(because, numbers.values(), strict=True)]
    notes += [_note(note) for note in dict.fromkeys(table.notes)]
    capacity = _PAGE - _lines_of(table.title)
    tabulars = _tabulars(table, list(zip(rows, marks, strict=True)), capacity)
    floats = _packed([*tabulars, *notes], lambda block: block.height, capacity)
    return "\n".join(
        _float(table, blocks, continued=number > 0) for number, blocks in enumerate(floats)
    )


def _packed(items: Iterable[T], height: Callable[[T], float], most: float) -> list[list[T]]:
    """Put items on pages, in order."""
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


def _height(line: Line) -> int:
    """Return how many lines a row takes where its longest text is wrapped."""
    return 1 + int(1.2 * max(map(_width, line.texts)) / _MOST_TEXT)


def _join(cells: Iterable[str]) -> str:
    return " & ".join(cells) + r" \\"
