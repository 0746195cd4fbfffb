"""A board's figures for a page: as text, and as charts of accuracy against budget or memory.

Text is clipped, with invisible characters made visible; Jinja escapes it. Charts measure across in
percent and down in pixels, so that one is as wide as its place and its text keeps its size.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, log2, log10
from types import MappingProxyType

from agentbench_kv.results.ranking import Board, Entry
from agentbench_kv.results.site.memory import Held
from agentbench_kv.results.stats import Interval
from agentbench_kv.results.terminal import megabytes, share

# Control, bidirectional, zero-width and surrogate characters: they change how others are read.
_INVISIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)
_UNSAFE = re.compile(r"[^A-Za-z0-9._@+-]+")
_LONGEST_STEM = 150
NOTHING = "–"  # noqa: RUF001  an en dash for a missing figure
_HEIGHT, _LINE, _DODGE, _MOST_DODGE, _MARGIN = 300, 15, 4, 26, 4.0
_GAPS = (6.0, 14.0)  # between labels of budgets: on a wide page, on a phone


def visible(value: object, limit: int = 500) -> str:
    """Spell hidden characters but newlines and tabs; of a longer text, say how many are cut off."""
    text = str(value)
    shown = _INVISIBLE.sub(lambda match: ascii(match[0])[1:-1], text[:limit])
    return shown if len(text) <= limit else f"{shown} … ({len(text) - limit:,} more characters)"


def file_stem(name: str, taken: set[str]) -> str:
    """Return a file name without ending for any name, and note it in `taken`."""
    # Names that are alike after cleaning, or on a file system that ignores case, stay apart.
    stem = _UNSAFE.sub("_", name).strip("._-")[:_LONGEST_STEM] or "page"
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
    """A method or a level: its dots from left to right, and where its name stands at the right.

    A level's last dot is at the right end; one before it is where its own memory is.
    """

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
    return _by_budget(board, floor, styles, _Scale)


def nats_by_budget(
    board: Board, nats: Mapping[int, Interval], styles: Mapping[str, str]
) -> Chart | None:
    """Draw divergences, by `id` of the board's entries, against budgets; in powers of ten."""
    entries = [e for e in board.entries if e.group.compressed and id(e) in nats]
    own = tuple(replace(entry, level=nats[id(entry)]) for entry in entries)
    if not any(entry.level.point > 0 for entry in own):
        return None
    return _by_budget(replace(board, entries=own), None, styles, _NatScale)


def _by_budget(
    board: Board, floor: Interval | None, styles: Mapping[str, str], scale_of: type[_Scale]
) -> Chart | None:
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
    return _chart(board.full, floor, styles, places, _clear(ticks), _DODGE, scale_of)


def by_memory(
    board: Board,
    floor: Interval | None,
    styles: Mapping[str, str],
    memory: Mapping[int, Held],
    ends: tuple[float, float],
) -> Chart | None:
    """Draw scores against the bytes of a session, by `id` of the entries; None without any.

    `ends` are the least and most bytes of the axis, which doubles from left to right: boards of one
    task share it, so that models can be compared.
    """
    least, most = math.floor(log2(ends[0] / 1e6)), ceil(log2(ends[1] / 1e6))
    most = max(most, least + 1)

    def across(size: float) -> float:
        return _MARGIN + (100 - 2 * _MARGIN) * (log2(size / 1e6) - least) / (most - least)

    sizes = {key: each.bytes for key, each in memory.items() if each.bytes}
    places = [
        (entry, across(size))
        for entry in board.entries
        if entry.group.holds_less and (size := sizes.get(id(entry)))
    ]
    if not places:
        return None
    ticks = [(across(2.0**power * 1e6), f"{2.0**power:.3g}") for power in range(least, most + 1)]
    whole = sizes.get(id(board.full))
    at_full = across(whole) if whole else None
    said = {key: f"; {spelled(memory[key])}" for key in sizes}
    return _chart(board.full, floor, styles, places, _clear(ticks), 0, _Scale, said, at_full)


def in_nats(interval: Interval | None) -> str:
    if interval is None:
        return NOTHING
    return f"{interval.point:.4f} [{interval.low:.4f}, {interval.high:.4f}]"


def spelled(held: Held) -> str:
    """Write what a session holds: bytes, then tokens."""
    tokens = f"{number(held.tokens)} tokens per layer and KV head"
    return f"{megabytes(held.bytes)} MB a session, {tokens}" if held.bytes else tokens


def _chart(
    full: Entry | None,
    floor: Interval | None,
    styles: Mapping[str, str],
    places: Sequence[tuple[Entry, float]],
    x_ticks: Sequence[tuple[float, str, str]],
    dodge: float,
    scale_of: type[_Scale],
    said: Mapping[int, str] = MappingProxyType({}),
    at_full: float | None = None,
) -> Chart:
    methods: dict[str, list[tuple[Entry, float]]] = {}
    for entry, x in sorted(places, key=lambda place: place[1]):
        methods.setdefault(entry.group.label, []).append((entry, x))
    across = [("full", full.level)] if full else []
    across += [("null agent", floor)] if floor else []
    ends = [*(entry.level for entry, _ in places), *(level for _, level in across)]
    number = len(methods)
    scale = scale_of(max(_HEIGHT, _LINE * (number + 3)), ends)
    drawn = []
    for label, own in sorted(methods.items()):
        dots = tuple(scale.dot(x, e.group.name, e.level, said.get(id(e), "")) for e, x in own)
        drawn.append((visible(label, 60), styles[label], dots))
    for name, level in across:
        places_of_it = (at_full, 100.0) if name == "full" and at_full is not None else (100.0,)
        more = said.get(id(full), "") if name == "full" else ""
        dots = tuple(scale.dot(x, name, level, more) for x in places_of_it)
        drawn.append((name, name.split()[0], dots))
    labels = _apart([dots[-1].y for _, _, dots in drawn], scale.height)
    step = min(dodge, _MOST_DODGE / number)
    shifts = [round(step * (index - (number - 1) / 2), 1) for index in range(len(drawn))]
    places_of = zip(drawn, shifts, labels, strict=True)
    series = [Series(*each, shift, label) for each, shift, label in places_of]
    ours, lines = tuple(series[:number]), tuple(series[number:])
    return Chart(scale.height, ours, lines, tuple(x_ticks), scale.ticks())


class _Scale:  # scores from 0 at the bottom up to 100%, or to less if nobody comes near
    def __init__(self, height: float, ends: Sequence[Interval]) -> None:
        self.height = height
        highest = max(each.high for each in ends)
        self.step = 20 if highest > 0.5 else 10
        self.top = min(100, self.step * max(1, ceil(100 * highest / self.step)))

    def at(self, share: float) -> float:
        return round(self.height * (1 - 100 * share / self.top), 1)

    def dot(self, x: float, name: str, ends: Interval, more: str = "") -> Dot:
        text = f"{visible(name, 120)}: {self.spelled(ends)}{more}"
        return Dot(round(x, 2), self.at(ends.point), self.at(ends.low), self.at(ends.high), text)

    def spelled(self, ends: Interval) -> str:
        return percent(ends)

    def ticks(self) -> tuple[tuple[float, str], ...]:
        values = range(0, self.top + 1, self.step)
        return tuple((self.at(value / 100), f"{value}%") for value in values)


class _NatScale(_Scale):  # nats in powers of ten, from the one below the least point
    def __init__(self, height: float, ends: Sequence[Interval]) -> None:
        self.height = height
        known = [each.point for each in ends if each.point > 0]
        self.first, last = math.floor(log10(min(known))), ceil(log10(max(known)))
        self.last = max(last, self.first + 1)

    def at(self, nats: float) -> float:
        place = log10(max(nats, 10.0**self.first)) - self.first
        return round(self.height * (1 - min(1.0, place / (self.last - self.first))), 1)

    def spelled(self, ends: Interval) -> str:
        return f"{ends.point:.4f} [{ends.low:.4f}, {ends.high:.4f}] nats"

    def ticks(self) -> tuple[tuple[float, str], ...]:
        powers = range(self.first, self.last + 1)
        return tuple((self.at(10.0**power), f"{10.0**power:g}") for power in powers)


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
