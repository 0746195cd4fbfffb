"""A table before it has a format: columns, rows of cells with intervals and marks, notes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from agentbench_kv.results.runs import Setting
from agentbench_kv.results.terminal import visible

_UNSAFE = re.compile(r"[^A-Za-z0-9.]+")


class Unit(StrEnum):
    """What a column's values are; `results.tables.text` writes each its own way."""

    TEXT = "text"
    SHARE = "share"
    POINTS = "difference of shares"
    TOKENS = "tokens"
    MEGABYTES = "MB"
    SECONDS = "s"
    MILLISECONDS = "ms"
    RATE = "tokens/s"
    PER_SECOND = "a second"
    RATIO = "ratio"
    NATS = "nats"
    NUMBER = "number"


class Kind(StrEnum):
    """The families of tables; what `kvbench report --table` chooses from."""

    ACCURACY = "accuracy"
    EFFICIENCY = "efficiency"
    THROUGHPUT = "throughput"
    CURVES = "curves"
    FIDELITY = "fidelity"


class Mark(StrEnum):
    """What is special about a cell."""

    BEST = "best"  # leads alone
    TIED = "tied"  # one of several that lead


@dataclass(frozen=True)
class Cell:
    """One value in the unit of its column; NaN and infinity become None, which is nothing."""

    value: float | str | None = None
    low: float | None = None  # ends of its 95% interval
    high: float | None = None
    p_value: float | None = None  # of the comparison it stands for, adjusted for the family
    mark: Mark | None = None
    text: str | None = None  # what people read instead, where the numbers do not say it all

    def __post_init__(self) -> None:
        for name in ("value", "low", "high", "p_value"):
            number = getattr(self, name)
            if isinstance(number, float) and not math.isfinite(number):
                object.__setattr__(self, name, None)


@dataclass(frozen=True)
class Column:
    """A heading and what stands under it."""

    title: str
    unit: Unit = Unit.TEXT


@dataclass(frozen=True)
class Row:
    """One cell for each column."""

    cells: tuple[Cell, ...]
    below: str | None = None  # why it stands below the line, unranked
    published: bool = False  # a paper's figures, not measured here


@dataclass(frozen=True)
class Table:
    """A table in no format; a ValueError if a row has not one cell for each column."""

    kind: Kind
    key: str  # safe in a file's name
    title: str
    columns: Sequence[Column]
    rows: Sequence[Row]
    notes: Sequence[str] = ()
    where: Mapping[str, str | int] = field(default_factory=dict)  # what all rows share
    legend: Sequence[str] = ()  # how such tables are read: said once in a document

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row.cells) != len(self.columns):
                raise ValueError(f"{len(row.cells)} cells for {len(self.columns)} columns")

    @property
    def ranked(self) -> list[Row]:
        return [row for row in self.rows if row.below is None]

    @property
    def unranked(self) -> list[Row]:
        return [row for row in self.rows if row.below is not None]

    def cells(self) -> Iterator[tuple[Row, Column, Cell]]:
        for row in (*self.ranked, *self.unranked):
            for column, cell in zip(self.columns, row.cells, strict=True):
                yield row, column, cell


def setting_table(
    kind: Kind,
    what: str,
    setting: Setting,
    columns: Iterable[Column],
    rows: Sequence[Row],
    notes: Sequence[str] = (),
    legend: Sequence[str] = (),
    conditions: str = "",
    apart: Sequence[str] = (),
    **shared: str | int,
) -> Table:
    """Return a table of one setting.

    Its key begins with the first of `apart`, or else the kind, and ends with the others; `shared`
    is what its rows have in common besides the setting.
    """
    place = {"task": setting.task, "model": setting.model, "engine": setting.engine}
    first, *others = apart or (kind.value,)
    title = f"{what}: {', '.join(place.values())}" + f" [{conditions}]" * bool(conditions)
    key = slug(first, *place.values(), conditions, *others)
    return Table(kind, key, title, tuple(columns), rows, notes, {**place, **shared}, legend)


def slug(*parts: str) -> str:
    """Join parts to a name that is safe in a file's name, a LaTeX label and a link."""
    return "-".join(_UNSAFE.sub("-", part).strip("-.") for part in parts if part)


REASON = "below the line because"
PUBLISHED = "published"


def _decimals(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.1f}"


_NUMBERS: dict[Unit, Callable[[float], str]] = {
    Unit.SHARE: lambda value: f"{100 * value:.1f}",
    Unit.POINTS: lambda value: f"{100 * value:+.1f}",
    Unit.TOKENS: lambda value: f"{value:,.0f}",
    Unit.MEGABYTES: lambda value: f"{value:,.0f}" if value >= 100 else f"{value:.3g}",
    Unit.SECONDS: lambda value: f"{value:,.0f}" if value >= 100 else f"{value:.3g}",
    Unit.MILLISECONDS: lambda value: f"{value:.2f}",
    Unit.RATE: _decimals,
    Unit.PER_SECOND: lambda value: f"{value:.3g}",
    Unit.RATIO: lambda value: f"{value:.2f}",
    Unit.NATS: lambda value: f"{value:.4f}",
    Unit.NUMBER: lambda value: f"{value:,.10g}",
}


def cell_text(cell: Cell, unit: Unit) -> str:
    """Write a cell: value in its unit (shares in percent), interval in brackets, adjusted p."""
    # Marks and escapes are the format's.
    if cell.text is not None:
        return cell.text
    if cell.value is None:
        return ""
    if isinstance(cell.value, str) or unit is Unit.TEXT:
        return str(cell.value)
    write = _NUMBERS[unit]
    text = write(cell.value)
    if cell.low is not None and cell.high is not None:
        text += f" [{write(cell.low)}, {write(cell.high)}]"
    if cell.p_value is not None:
        text += f" p {'<0.001' if cell.p_value < 0.001 else f'{cell.p_value:.3f}'}"
    return text


@dataclass(frozen=True)
class Line:
    """A row as text: which cells are strong, and whether it stands below the line."""

    texts: tuple[str, ...]
    strong: tuple[bool, ...]
    below: bool


def headings(table: Table) -> list[tuple[str, bool]]:
    """Return each column's title and whether numbers stand under it; the reasons' last, if any."""
    titles = [(column.title, column.unit is not Unit.TEXT) for column in table.columns]
    return titles + [(REASON, False)] * bool(table.unranked)


def lines(table: Table) -> list[Line]:
    """Return the rows as text, those above the line first; nothing is escaped but invisibles."""
    return [_line(table, row) for row in (*table.ranked, *table.unranked)]


def _line(table: Table, row: Row) -> Line:
    texts = [
        visible(cell_text(cell, column.unit))
        for cell, column in zip(row.cells, table.columns, strict=True)
    ]
    if row.published and not all(each.published for each in table.rows):
        texts[0] += f" ({PUBLISHED})"
    strong = [cell.mark is not None for cell in row.cells]
    if table.unranked:
        texts.append(visible(row.below or ""))
        strong.append(False)
    return Line(tuple(texts), tuple(strong), row.below is not None)
