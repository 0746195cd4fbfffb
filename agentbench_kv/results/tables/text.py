"""Values as text, the same for people in every format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from agentbench_kv.results.tables.model import Cell, Row, Table, Unit
from agentbench_kv.results.terminal import visible

REASON = "below the line because"
PUBLISHED = "published"


def _decimals(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.1f}"


_NUMBERS: dict[Unit, Callable[[float], str]] = {
    Unit.SHARE: lambda value: f"{100 * value:.1f}",
    Unit.POINTS: lambda value: f"{100 * value:+.1f}",
    Unit.TOKENS: lambda value: f"{value:,.0f}",
    Unit.MEGABYTES: _decimals,
    Unit.MILLISECONDS: lambda value: f"{value:.2f}",
    Unit.RATE: _decimals,
    Unit.RATIO: lambda value: f"{value:.2f}",
    Unit.NUMBER: lambda value: f"{value:,.10g}",
}


def cell_text(cell: Cell, unit: Unit) -> str:
    """Write a cell: value, interval in brackets, adjusted p; marks and escapes are the format's.

    Shares and their differences are written in percent and points.
    """
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
