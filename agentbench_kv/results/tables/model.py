"""A table before it has a format: columns, rows of cells with intervals and marks, notes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from agentbench_kv.results.runs import SCORE, Setting

_UNSAFE = re.compile(r"[^A-Za-z0-9.]+")


class Unit(StrEnum):
    """What a column's values are; `results.tables.text` writes each its own way."""

    TEXT = "text"
    SHARE = "share"
    POINTS = "difference of shares"
    TOKENS = "tokens"
    MEGABYTES = "MB"
    MILLISECONDS = "ms"
    RATE = "tokens/s"
    RATIO = "ratio"
    NUMBER = "number"


class Kind(StrEnum):
    """The families of tables; what `kvbench report --table` chooses from."""

    ACCURACY = "accuracy"
    EFFICIENCY = "efficiency"
    THROUGHPUT = "throughput"
    CURVES = "curves"


class Mark(StrEnum):
    """What is special about a cell."""

    BEST = "best"
    TIED = "tied"


@dataclass(frozen=True)
class Cell:
    """One value.

    Attributes
    ----------
    value : float, str or None
        In the unit of its column; None where there is nothing. NaN and infinity become None.
    low, high : float or None
        The ends of its 95% interval.
    p_value : float or None
        Of the comparison the value stands for, adjusted for the family.
    mark : Mark or None
        Best of its column, or not distinguishable from the best.
    text : str or None
        What people read instead of the numbers, where these do not say it all.
    """

    value: float | str | None = None
    low: float | None = None
    high: float | None = None
    p_value: float | None = None
    mark: Mark | None = None
    text: str | None = None

    def __post_init__(self) -> None:
        """Replace what no format can carry."""
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
    """Cells in the order of the columns.

    Attributes
    ----------
    cells : tuple of Cell
        One for each column.
    below : str or None
        Why the row stands below the line, unranked; None for a row above it.
    published : bool
        Whether the figures are a paper's, not measured here.
    """

    cells: tuple[Cell, ...]
    below: str | None = None
    published: bool = False


@dataclass(frozen=True)
class Table:
    """A table in no format.

    Attributes
    ----------
    kind : Kind
        Family.
    key : str
        Name that is safe in a file's name.
    title : str
        What it shows, and for what.
    columns, rows : tuple
        Every row has one cell for each column.
    notes : tuple of str
        Lines printed under the table.
    legend : tuple of str
        How such tables are read: printed under the first of a document only.
    where : dict
        What all rows share: task, model, engine, metric, samples.

    Raises
    ------
    ValueError
        If a row has another number of cells than there are columns.
    """

    kind: Kind
    key: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    where: dict[str, str | int] = field(default_factory=dict)
    legend: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check the shape."""
        for row in self.rows:
            if len(row.cells) != len(self.columns):
                raise ValueError(f"{len(row.cells)} cells for {len(self.columns)} columns")

    @property
    def ranked(self) -> tuple[Row, ...]:
        """Rows above the line."""
        return tuple(row for row in self.rows if row.below is None)

    @property
    def unranked(self) -> tuple[Row, ...]:
        """Rows below the line."""
        return tuple(row for row in self.rows if row.below is not None)

    def cells(self) -> Iterator[tuple[Row, Column, Cell]]:
        """Go through all cells, rows above the line first."""
        for row in (*self.ranked, *self.unranked):
            for column, cell in zip(self.columns, row.cells, strict=True):
                yield row, column, cell


def heading(what: str, setting: Setting, conditions: str = "") -> str:
    """Return a title: what is shown, then task, model, engine, and what sets its runs apart."""
    apart = f" [{conditions}]" if conditions else ""
    return f"{what}: {setting.task}, {setting.model}, {setting.engine}{apart}"


def spoken(metric: str) -> str:
    """Return a metric as people say it."""
    return "score" if metric == SCORE else f"sub-score {metric}"


def slug(*parts: str) -> str:
    """Join parts to a name that is safe in a file's name, a LaTeX label and a link."""
    return "-".join(_UNSAFE.sub("-", part).strip("-.") for part in parts if part)


def place(setting: Setting) -> dict[str, str | int]:
    """Return a setting as what the rows of a table share."""
    return {"task": setting.task, "model": setting.model, "engine": setting.engine}
