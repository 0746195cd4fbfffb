"""Live tokens over the turns of a run, as a drawing for its page."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

from agentbench_kv.results.lines import parse_lines
from agentbench_kv.results.reader import turns_by_index, turns_by_trial
from agentbench_kv.results.records import TurnRecord

MOST_TURNS = 2000
LEFT, RIGHT, TOP, BOTTOM = 56, 704, 16, 210
_MOST_TICKS = 16


@dataclass(frozen=True)
class TurnFigures:
    """A turn index over the trials that got there: live tokens at its end, totals of evictions."""

    turn: int
    trials: int
    low: float
    median: float
    high: float
    events: int
    evicted: int


@dataclass(frozen=True)
class Timeline:
    """A drawing of 720 x 250, its points ready for an SVG attribute; `band` may be empty."""

    line: str
    band: str
    marks: list[tuple[float, float, str]]
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    budget: float | None


def read_turns(path: Path, most: int = MOST_TURNS) -> list[list[TurnRecord]]:
    """Return the turns of each trial's last attempt in the first lines of `turns.jsonl`.

    Damaged lines are left out, and so is the trial that the end cuts off, unless it is the only.
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
    return [_figures(group) for group in turns_by_index(chain.from_iterable(trials))]


def timeline(figures: Sequence[TurnFigures], budget: int | None) -> Timeline:
    """Draw median and range over trials; a mark on each turn in which something was evicted."""
    axes = _Axes([f.turn for f in figures], max(budget or 0, *(f.high for f in figures)))
    upper = [axes.at(i, f.high) for i, f in enumerate(figures)]
    lower = [axes.at(i, f.low) for i, f in enumerate(figures)]
    middle = [axes.at(i, f.median) for i, f in enumerate(figures)]
    marks = [(*at, _told(f)) for at, f in zip(middle, figures, strict=True) if f.events]
    return axes.drawing(middle, [*upper, *reversed(lower)], marks, budget)


def session(turns: Sequence[TurnRecord], budget: int | None) -> Timeline:
    """Draw one trial: up while tokens are added, straight down by what a turn evicted.

    A turn records its ends only: of several evictions in it, their sum is drawn as one drop.
    """
    most = max(budget or 0, *(t.live_after + t.evicted for t in turns))
    axes = _Axes([turn.turn for turn in turns], most)
    path: list[tuple[float, float]] = []
    marks = []
    for i, turn in enumerate(turns):
        if turn.events:
            path.append(axes.at(i, turn.live_after + turn.evicted))
            marks.append((*path[-1], _told(turn)))
        path.append(axes.at(i, turn.live_after))
    return axes.drawing(path, [], marks, budget)


def _told(turn: TurnFigures | TurnRecord) -> str:
    return f"turn {turn.turn}: {turn.events} events, {turn.evicted:,} tokens evicted"


def _figures(group: Sequence[TurnRecord]) -> TurnFigures:
    live = [turn.live_after for turn in group]
    middle = statistics.median(live)
    events, evicted = sum(turn.events for turn in group), sum(turn.evicted for turn in group)
    return TurnFigures(group[0].turn, len(group), min(live), middle, max(live), events, evicted)


def _points(points: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{x:g},{y:g}" for x, y in points)


class _Axes:
    """Places of turns from left to right and of 0 to `top` tokens from bottom to top."""

    def __init__(self, turns: Sequence[int], top: float) -> None:
        self.turns = turns
        self.step = _round_step(max(top, 1.0) / 4)
        self.top = self.step * -(-max(top, 1.0) // self.step)

    def at(self, index: int, tokens: float) -> tuple[float, float]:
        return round(LEFT + (RIGHT - LEFT) * (index + 0.5) / len(self.turns), 1), self.y(tokens)

    def y(self, tokens: float) -> float:
        return round(BOTTOM - (BOTTOM - TOP) * tokens / self.top, 1)

    def drawing(
        self,
        line: Iterable[tuple[float, float]],
        band: Iterable[tuple[float, float]],
        marks: list[tuple[float, float, str]],
        budget: int | None,
    ) -> Timeline:
        every = -(-len(self.turns) // _MOST_TICKS)
        levels = [self.step * i for i in range(round(self.top / self.step) + 1)]
        return Timeline(
            line=_points(line),
            band=_points(band),
            marks=marks,
            x_ticks=[(self.at(i, 0)[0], str(t)) for i, t in enumerate(self.turns)][::every],
            y_ticks=[(self.y(level), f"{level:,.0f}") for level in levels],
            budget=None if budget is None else self.y(budget),
        )


def _round_step(least: float) -> float:
    """Return the smallest 1, 2 or 5 times a power of ten that is at least this, and at least 1."""
    scale = 1.0
    while scale * 10 <= least:
        scale *= 10
    return next(scale * factor for factor in (1, 2, 5, 10) if scale * factor >= least)
