"""What all terminal output shares; light, so that a listing need not wait for scipy.

Every cell is data: markup and control characters stay visible text.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

_PIPE_WIDTH = 200
_NONE = "-"


def console() -> Console:
    """Return a console on stdout; wide where stdout is no terminal, so that no row is broken."""
    width = None if sys.stdout.isatty() else _PIPE_WIDTH
    return Console(width=width, highlight=False)


def visible(text: str, keep: str = "") -> str:
    """Write out every character that a terminal might obey or hide, but for those in `keep`."""
    return "".join(c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in text)


def plain(value: object) -> Text:
    """Return a cell that shows `value` literally: no markup, no terminal escapes."""
    return Text(visible(_NONE if value is None else str(value)))


def new_table(*columns: str, rows: Iterable[Iterable[object]] = ()) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*map(plain, row))
    return table


def share(point: float, low: float, high: float) -> str:
    """Write a share with its interval, in percent."""
    return f"{100 * point:.1f}% [{100 * low:.1f}, {100 * high:.1f}]"


def number(value: float | None) -> str | None:
    """Write a figure: one decimal where it is small and has one."""
    if value is None:
        return None
    return f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"


def megabytes(value: float | None) -> str | None:
    """Write bytes as MB with three digits; None of 0, which is unknown."""
    if not value:
        return None
    found = value / 1e6
    return f"{found:,.0f}" if found >= 100 else f"{found:.3g}"


def failures(kinds: dict[str, int]) -> str | None:
    """Write the trials by failure kind; None if there is none."""
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or None


def print_json(document: Any) -> None:
    """Print one JSON document; ASCII survives any terminal, and rich would wrap long lines."""
    sys.stdout.write(json.dumps(document, indent=2) + "\n")
