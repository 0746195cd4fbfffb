"""Accuracy against budget or achieved KV, as geometry: across in percent, down in pixels.

So a chart is as wide as its place, and its text keeps its size.

Data as text for a page: clipped, with invisible characters made visible; Jinja escapes it.

Who competes on a board, and what may be said of it: by budget, and by achieved KV.
"""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, log2

from agentbench_kv.results.ranking import Board, Entry, Rank, rank
from agentbench_kv.results.runs import budget_order
from agentbench_kv.results.stats import Interval
from agentbench_kv.results.terminal import share

# Control, bidirectional, zero-width and surrogate characters: they change how others are read.
_INVISIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)


_UNSAFE = re.compile(r"[^A-Za-z0-9._@+-]+")


_STEM = 150


NOTHING = "–"  # noqa: RUF001  an en dash for a missing figure


def visible(value: object, limit: int = 500) -> str:
    """Return text that shows what is there: newlines and tabs stay, hidden characters are spelt.

    Of a longer text, how many characters are left out is said.
    """
    text = str(value)
    shown = _INVISIBLE.sub(lambda match: ascii(match[0])[1:-1], text[:limit])
    return shown if len(text) <= limit else f"{shown} … ({len(text) - limit:,} more characters)"


def file_stem(name: str, taken: set[str]) -> str:
    """Return a file name without ending for any name, and note it in `taken`.

    Names that are alike after cleaning, or on a file system that ignores case, stay apart.
    """
    stem = _UNSAFE.sub("_", name).strip("._-")[:_STEM] or "page"
    if stem != name or stem.lower() in taken:
        digest = hashlib.sha256(f"{name} {len(taken)}".encode("utf-8", "replace")).hexdigest()
        stem = f"{stem}-{digest[:8]}"
    taken.add(stem.lower())
    return stem


def percent(ends: Interval | None) -> str:
    """Write a share with its interval in percent; a dash for None."""
    return NOTHING if ends is None else share(ends.point, ends.low, ends.high)


def number(value: float | None) -> str:
    """Write a figure with three digits or as a whole number; a dash for None."""
    if value is None:
        return NOTHING
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


TIERS = (0.10, 0.25, 0.50, 0.75, 0.95)


@dataclass(frozen=True)
class Contest:
    """The entries that compete at a budget or in a tier, the best first.

    `others` are entries of the same methods that do not compete: a method is in a tier once.
    """

    name: str
    ranks: tuple[Rank, ...]
    others: tuple[Entry, ...] = ()

    @property
    def best(self) -> Entry:
        """Who has the highest score, by whatever margin."""
        return self.ranks[0].entry

    @property
    def alone(self) -> bool:
        """Whether there is one method only, in whatever settings."""
        return len({each.entry.group.method for each in self.ranks}) < 2

    @property
    def decides(self) -> bool:
        """Whether a place means anything: two methods, enough samples, and not all at 0."""
        return self.ranks[0].rank is not None and not self.alone and self.best.level.point > 0

    @property
    def leaders(self) -> list[Entry]:
        """Who leads, alone or tied; nobody where all are tied or no place means anything."""
        first = [each.entry for each in self.ranks if each.rank == 1]
        return first if self.decides and len(first) < len(self.ranks) else []

    def place(self, entry: Entry) -> str:
        """Return `1`, or `1=` if shared; a dash where places mean nothing."""
        rank = next((each.rank for each in self.ranks if each.entry is entry), None)
        if rank is None or not self.decides:
            return NOTHING
        return f"{rank}{'=' * (sum(each.rank == rank for each in self.ranks) > 1)}"

    def mark(self, entry: Entry) -> str:
        """Return `best`, `tied` or nothing."""
        leaders = self.leaders
        return ("tied" if len(leaders) > 1 else "best") if entry in leaders else ""


def by_budget_contests(board: Board) -> list[Contest]:
    """Return a contest for each budget, ranked together."""
    budgets: dict[int | str | None, list[Entry]] = {}
    for entry in board.entries:
        if entry.group.compressed:
            budgets.setdefault(entry.group.budget, []).append(entry)
    ordered = sorted(budgets, key=budget_order)
    ranked = rank([budgets[name] for name in ordered], board.too_small is not None)
    return [Contest(str(name), tuple(row)) for name, row in zip(ordered, ranked, strict=True)]


def by_tier(board: Board) -> list[Contest]:
    """Return a contest for each tier of achieved KV, ranked together.

    A method stands in a tier with its largest budget there, which says nothing of the score.
    """
    tiers: dict[int, dict[str, list[Entry]]] = {}
    for entry in board.entries:
        share = kept(entry)
        if entry.group.compressed and share is not None:
            methods = tiers.setdefault(bisect_left(TIERS, share), {})
            methods.setdefault(entry.group.label, []).append(entry)
    chosen = {i: [max(own, key=_size) for own in tiers[i].values()] for i in sorted(tiers)}
    ranked = rank(list(chosen.values()), board.too_small is not None)
    return [
        Contest(tier_name(index), tuple(row), _rest(tiers[index], chosen[index]))
        for index, row in zip(chosen, ranked, strict=True)
    ]


def tier_name(index: int) -> str:
    """Return a tier as shown, e.g. `25-50%`."""
    ends = [0, *(round(100 * edge) for edge in TIERS), 100]
    return f"{ends[index]}–{ends[index + 1]}%"  # noqa: RUF001  an en dash between numbers


def kept(entry: Entry) -> float | None:
    """Return the achieved KV, the mean of peak live / logical over the trials that have it."""
    known = [(run.summary.kv, run.summary.trials) for run in entry.group.runs]
    shares = [(kv.live_over_logical, trials) for kv, trials in known if kv]
    trials = sum(count for _, count in shares)
    return sum(share * count for share, count in shares) / trials if trials else None


def _size(entry: Entry) -> tuple[int, float]:
    return entry.group.first.tokens or 0, kept(entry) or 0.0


def _rest(methods: Mapping[str, Sequence[Entry]], chosen: Sequence[Entry]) -> tuple[Entry, ...]:
    return tuple(entry for own in methods.values() for entry in own if entry not in chosen)


_HEIGHT, _LINE, _DODGE, _MOST_DODGE, _MARGIN = 300, 15, 4, 26, 4.0


_GAPS = (6.0, 14.0)  # between labels of budgets: on a wide page, on a phone


@dataclass(frozen=True)
class Dot:
    """A score: place, ends of its interval, and what it says when pointed at."""

    x: float
    y: float
    low: float
    high: float
    text: str


@dataclass(frozen=True)
class Series:
    """A method or a level: its dots from left to right, and where its name stands at the right."""

    name: str
    style: str
    dots: tuple[Dot, ...]
    shift: float
    label: float


@dataclass(frozen=True)
class Chart:
    """What the template draws; `levels` are lines across: full, and the floor."""

    height: float
    series: tuple[Series, ...]
    levels: tuple[Series, ...]
    x_ticks: tuple[tuple[float, str, str], ...]
    y_ticks: tuple[tuple[float, str], ...]


def by_budget(board: Board, floor: Interval | None, styles: Mapping[str, str]) -> Chart | None:
    """Draw scores against budgets, doubling from left to right; None without a compressed run."""
    sizes = [
        (entry, log2(tokens))
        for entry in board.entries
        if entry.group.compressed and (tokens := entry.group.first.tokens)
    ]
    if not sizes:
        return None
    least, most = min(size for _, size in sizes), max(size for _, size in sizes)
    scale = (100 - 2 * _MARGIN) / (most - least) if most > least else 0.0
    left = _MARGIN if scale else 50.0
    places = [(entry, left + scale * (size - least)) for entry, size in sizes]
    ticks = [(x, str(entry.group.budget)) for entry, x in places]
    return _chart(board.full, floor, styles, places, _clear(ticks), _DODGE)


def by_kept(board: Board, floor: Interval | None, styles: Mapping[str, str]) -> Chart | None:
    """Draw scores against achieved KV, from 0 to 100%; None without a compressed run."""
    places = [
        (entry, 100 * share)
        for entry in board.entries
        if entry.group.compressed and (share := kept(entry)) is not None
    ]
    ticks = [(float(at), f"{at}%", "") for at in range(0, 101, 25)]
    return _chart(board.full, floor, styles, places, ticks, 0) if places else None


def _chart(
    full: Entry | None,
    floor: Interval | None,
    styles: Mapping[str, str],
    places: Sequence[tuple[Entry, float]],
    x_ticks: Sequence[tuple[float, str, str]],
    dodge: float,
) -> Chart:
    methods: dict[str, list[tuple[Entry, float]]] = {}
    for entry, x in sorted(places, key=lambda place: place[1]):
        methods.setdefault(entry.group.label, []).append((entry, x))
    across = [("full", full.level)] if full else []
    across += [("null agent", floor)] if floor else []
    scale = _Scale(
        max(_HEIGHT, _LINE * (len(methods) + 3)),
        max(ends.high for ends in [*(e.level for e, _ in places), *(ends for _, ends in across)]),
    )
    drawn = []
    for label, own in sorted(methods.items()):
        dots = tuple(scale.dot(x, entry.group.name, entry.level) for entry, x in own)
        drawn.append((visible(label, 60), styles[label], dots))
    drawn += [(name, name.split()[0], (scale.dot(100.0, name, ends),)) for name, ends in across]
    labels = _apart([dots[-1].y for _, _, dots in drawn], scale.height)
    step = min(dodge, _MOST_DODGE / len(methods))
    series = [
        Series(*each, shift=round(step * (number - (len(methods) - 1) / 2), 1), label=label)
        for number, (each, label) in enumerate(zip(drawn, labels, strict=True))
    ]
    number = len(methods)
    return Chart(
        scale.height, tuple(series[:number]), tuple(series[number:]), tuple(x_ticks), scale.ticks()
    )


class _Scale:
    """Scores from 0 at the bottom up to 100%, or to less if nobody comes near."""

    def __init__(self, height: float, highest: float) -> None:
        self.height = height
        self.step = 20 if highest > 0.5 else 10
        self.top = min(100, self.step * max(1, ceil(100 * highest / self.step)))

    def at(self, share: float) -> float:
        return round(self.height * (1 - 100 * share / self.top), 1)

    def dot(self, x: float, name: str, ends: Interval) -> Dot:
        text = f"{visible(name, 120)}: {percent(ends)}"
        return Dot(round(x, 2), self.at(ends.point), self.at(ends.low), self.at(ends.high), text)

    def ticks(self) -> tuple[tuple[float, str], ...]:
        values = range(0, self.top + 1, self.step)
        return tuple((self.at(value / 100), f"{value}%") for value in values)


def _apart(wanted: Sequence[float], height: float) -> list[float]:
    """Move labels down, then up, until each has a line of its own."""
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    placed, least, most = list(wanted), 0.0, height
    for index in order:
        placed[index] = max(placed[index], least)
        least = placed[index] + _LINE
    for index in reversed(order):
        placed[index] = min(placed[index], most)
        most = placed[index] - _LINE
    return placed


def _clear(ticks: Sequence[tuple[float, str]]) -> list[tuple[float, str, str]]:
    """Leave out ticks that would write over the one before; `minor` ones would on a phone."""
    shown: list[tuple[float, str, str]] = []
    last = [-100.0, -100.0]
    for at, text in sorted(set(ticks)):
        wide, narrow = (at - before >= gap for before, gap in zip(last, _GAPS, strict=True))
        last = [at if wide else last[0], at if narrow else last[1]]
        if wide:
            shown.append((round(at, 2), text, "" if narrow else "minor"))
    return shown
