"""Live tokens over the turns of a run, as a drawing for its page."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path

from agentbench_kv.results.lines import parse_lines
from agentbench_kv.results.reader import turns_by_trial
from agentbench_kv.results.records import TurnRecord

MOST_TURNS = 2000
WIDTH, HEIGHT = 720, 250
LEFT, RIGHT, TOP, BOTTOM = 56, 704, 16, 210
_MOST_TICKS = 16


@dataclass(frozen=True)
class TurnFigures:
    """One turn index: live tokens at its end over the trials, and what was evicted in it.

    Attributes
    ----------
    turn, trials : int
        Index, and how many trials got there.
    low, median, high : float
        Live tokens per (layer, KV head) when the turn ended.
    events, evicted : int
        Totals over the trials.
    """

    turn: int
    trials: int
    low: float
    median: float
    high: float
    events: int
    evicted: int


@dataclass(frozen=True)
class Timeline:
    """Geometry of a drawing `WIDTH` x `HEIGHT`; every point list is ready for an SVG attribute.

    Attributes
    ----------
    line, band : str
        Points of the line and of the area around it (empty: none).
    marks : list of (float, float, str)
        x, y and text of each event mark.
    x_ticks, y_ticks : list of (float, str)
        Place and text.
    budget : float or None
        y of the budget's line.
    """

    line: str
    band: str
    marks: list[tuple[float, float, str]]
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    budget: float | None


def read_turns(path: Path, most: int = MOST_TURNS) -> list[list[TurnRecord]]:
    """Return the turns of each trial's last attempt, as far as `turns.jsonl` is read.

    Parameters
    ----------
    path : Path
        The file; damaged lines are left out, and a missing file has none.
    most : int
        Lines read; the trial that this cuts off is dropped unless it is the only one.
    """
    if not path.is_file():
        return []
    with path.open("rb") as file:
        turns = parse_lines(islice(file, most), TurnRecord).records
        cut_off = bool(file.readline())
    trials = turns_by_trial(turns)
    if cut_off and len(trials) > 1:
        del trials[turns[-1].key]
    return list(trials.values())


def overview(trials: Sequence[Sequence[TurnRecord]]) -> list[TurnFigures]:
    """Return one entry per turn index, sorted."""
    ordered = sorted((turn for trial in trials for turn in trial), key=lambda turn: turn.turn)
    return [_figures(index, list(group)) for index, group in groupby(ordered, lambda t: t.turn)]


def timeline(figures: Sequence[TurnFigures], budget: int | None) -> Timeline:
    """Draw median and range over trials; a mark on each turn in which something was evicted."""
    axes = _Axes(len(figures), max(budget or 0, *(f.high for f in figures)))
    upper = [axes.at(i, f.high) for i, f in enumerate(figures)]
    lower = [axes.at(i, f.low) for i, f in enumerate(figures)]
    marks = [
        (*axes.at(i, f.median), f"turn {f.turn}: {f.events} events, {f.evicted:,} tokens evicted")
        for i, f in enumerate(figures)
        if f.events
    ]
    return Timeline(
        line=_points(axes.at(i, f.median) for i, f in enumerate(figures)),
        band=_points([*upper, *reversed(lower)]),
        marks=marks,
        x_ticks=axes.x_ticks([f.turn for f in figures]),
        y_ticks=axes.y_ticks(),
        budget=None if budget is None else axes.y(budget),
    )


def session(turns: Sequence[TurnRecord], budget: int | None) -> Timeline:
    """Draw one trial: up while tokens are added, straight down by what a turn evicted.

    A turn records its ends only: of several evictions in it, their sum is drawn as one drop.
    """
    axes = _Axes(len(turns), max(budget or 0, *(t.live_after + t.evicted for t in turns)))
    path: list[tuple[float, float]] = []
    marks = []
    for i, turn in enumerate(turns):
        if turn.events:
            path.append(axes.at(i, turn.live_after + turn.evicted))
            text = f"turn {turn.turn}: {turn.events} events, {turn.evicted:,} tokens evicted"
            marks.append((*path[-1], text))
        path.append(axes.at(i, turn.live_after))
    return Timeline(
        line=_points(path),
        band="",
        marks=marks,
        x_ticks=axes.x_ticks([turn.turn for turn in turns]),
        y_ticks=axes.y_ticks(),
        budget=None if budget is None else axes.y(budget),
    )


def _figures(index: int, group: Sequence[TurnRecord]) -> TurnFigures:
    live = [turn.live_after for turn in group]
    return TurnFigures(
        turn=index,
        trials=len(group),
        low=min(live),
        median=statistics.median(live),
        high=max(live),
        events=sum(turn.events for turn in group),
        evicted=sum(turn.evicted for turn in group),
    )


def _points(points: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{x:g},{y:g}" for x, y in points)


class _Axes:
    """Places of `number` turns from left to right and of 0 to `top` tokens from bottom to top."""

    def __init__(self, number: int, top: float) -> None:
        self.number = number
        self.step = _round_step(max(top, 1.0) / 4)
        self.top = self.step * -(-max(top, 1.0) // self.step)

    def x(self, index: int) -> float:
        return round(LEFT + (RIGHT - LEFT) * (index + 0.5) / self.number, 1)

    def y(self, tokens: float) -> float:
        return round(BOTTOM - (BOTTOM - TOP) * tokens / self.top, 1)

    def at(self, index: int, tokens: float) -> tuple[float, float]:
        return self.x(index), self.y(tokens)

    def x_ticks(self, labels: Sequence[int]) -> list[tuple[float, str]]:
        every = -(-self.number // _MOST_TICKS)
        return [(self.x(i), str(labels[i])) for i in range(0, self.number, every)]

    def y_ticks(self) -> list[tuple[float, str]]:
        count = round(self.top / self.step)
        return [(self.y(self.step * i), f"{self.step * i:,.0f}") for i in range(count + 1)]


def _round_step(least: float) -> float:
    """Return the smallest 1, 2 or 5 times a power of ten that is at least this, and at least 1."""
    scale = 1.0
    while scale * 10 <= least:
        scale *= 10
    return next(scale * factor for factor in (1, 2, 5, 10) if scale * factor >= least)
