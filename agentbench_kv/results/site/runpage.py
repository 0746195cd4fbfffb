"""A run's own page: every figure with where it comes from, timeline, failures, transcripts.

Whatever an adapter or a model put into records is clipped and shown as plain text.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from math import ceil, floor, log10
from pathlib import Path
from typing import Any

from agentbench_kv.results.files import file_sha
from agentbench_kv.results.lines import parse_lines
from agentbench_kv.results.records import TrialRecord, TurnRecord
from agentbench_kv.results.run_reader import RunReader, turns_by_index, turns_by_trial
from agentbench_kv.results.runs import Problem, Run
from agentbench_kv.results.site.charts import visible
from agentbench_kv.results.tables.ledger import ledger_tables
from agentbench_kv.results.transcripts import Segment, segments

MOST_FAILURES = 200
MOST_SAMPLES = 1000
MOST_TURNS = 2000  # lines of `turns.jsonl`
MOST_TRANSCRIPTS = 2
MOST_MESSAGES = 60  # of a transcript
MOST_CHARACTERS = 12_000
_PER_PART = 1500
_FILES = ("samples.jsonl", "turns.jsonl", "run.json")
_PHASES = {"think": "thinks", "act": "calls", "tool": "", "others": ""}
# Ends of the axes in the template's drawing of 720 x 250.
LEFT, RIGHT, TOP, BOTTOM = 56, 704, 16, 210
_MOST_TICKS = 16


def context(run: Run, problems: Sequence[Problem]) -> dict[str, Any]:
    trials = run.records()
    failed = [record for record in trials if record.score is None]
    return {
        "run": run,
        "summary": run.summary,
        "notes": [*run.summary.notes, *(p.reason for p in problems if p.path == run.path)],
        "failed": failed[:MOST_FAILURES],
        "failed_more": max(0, len(failed) - MOST_FAILURES),
        "samples": trials[:MOST_SAMPLES],
        "samples_more": max(0, len(trials) - MOST_SAMPLES),
        "ledgers": ledger_tables([run]),
        "transcripts": transcripts(run.path, trials),
        "spec": list(_flat(run.spec)),
        "provenance": list(_flat(run.info.provenance)),
        "files": list(_files(run.path)),
        **_timelines(run),
    }


def _timelines(run: Run) -> dict[str, Any]:
    trials = read_turns(run.path / "turns.jsonl")
    if not trials:
        return {"turn_figures": []}
    longest = max(trials, key=lambda turns: (sum(t.events for t in turns), len(turns)))
    figures = overview(trials)
    budget = run.tokens if isinstance(run.budget, int) else None
    size = run.summary.kv.token_bytes if run.summary.kv else None
    return {
        "turn_figures": figures,
        "turn_trials": len(trials),
        "turns_clipped": len(trials) < run.summary.trials,
        "token_bytes": size,
        "timeline": timeline(figures, budget, size),
        "session": session(longest, budget, size),
        "session_name": f"{visible(longest[0].sample_id, 80)}, trial {longest[0].trial}",
    }


def _flat(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in data.items():
        name = f"{prefix}{visible(key, 60)}"
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{name}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            yield name, visible(text)


def _files(folder: Path) -> Iterator[tuple[str, int, str]]:
    for name in _FILES:
        path = folder / name
        if path.is_file():
            yield name, path.stat().st_size, file_sha(path) or "unreadable"


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
class TimelineChart:
    """Points ready for an SVG attribute; `band` may be empty."""

    line: str
    band: str
    marks: list[tuple[float, float, str]]
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    budget: float | None


def read_turns(path: Path, most: int = MOST_TURNS) -> list[list[TurnRecord]]:
    """Return the turns of each trial's last attempt in the first lines of `turns.jsonl`."""
    # Damaged lines are left out, and so is the trial that the end cuts off, unless the only one.
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
    found = []
    for group in turns_by_index(chain.from_iterable(trials)):
        live = [turn.live_after for turn in group]
        ends = (min(live), statistics.median(live), max(live))
        totals = (sum(turn.events for turn in group), sum(turn.evicted for turn in group))
        found.append(TurnFigures(group[0].turn, len(group), *ends, *totals))
    return found


def timeline(
    figures: Sequence[TurnFigures], budget: int | None, token_bytes: float | None = None
) -> TimelineChart:
    """Draw median and range over trials; a mark on each turn in which something was evicted."""
    axes = _Axes(
        [f.turn for f in figures], max(budget or 0, *(f.high for f in figures)), token_bytes
    )
    upper = [axes.at(i, f.high) for i, f in enumerate(figures)]
    lower = [axes.at(i, f.low) for i, f in enumerate(figures)]
    middle = [axes.at(i, f.median) for i, f in enumerate(figures)]
    marks = [(*at, _told(f)) for at, f in zip(middle, figures, strict=True) if f.events]
    return axes.drawing(middle, [*upper, *reversed(lower)], marks, budget)


def session(
    turns: Sequence[TurnRecord], budget: int | None, token_bytes: float | None = None
) -> TimelineChart:
    """Draw one trial: up by what is added, straight down by the sum of what a turn evicted."""
    most = max(budget or 0, *(t.live_after + t.evicted for t in turns))
    axes = _Axes([turn.turn for turn in turns], most, token_bytes)
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


class _Axes:
    """Places of turns from left to right, of tokens from bottom to top; in MB if bytes are known.

    `step` and `top` are tokens, or MB.
    """

    def __init__(self, turns: Sequence[int], tokens: float, token_bytes: float | None) -> None:
        self.turns = turns
        self._in_bytes = token_bytes is not None
        self._unit = 1.0 if token_bytes is None else token_bytes / 1e6
        top = max(tokens, 1.0) * self._unit
        self.step = _round_step(top / 4, whole=not self._in_bytes)
        self.top = self.step * ceil(top / self.step)

    def at(self, index: int, tokens: float) -> tuple[float, float]:
        return round(LEFT + (RIGHT - LEFT) * (index + 0.5) / len(self.turns), 1), self.y(tokens)

    def y(self, tokens: float) -> float:
        return self._place(tokens * self._unit)

    def _place(self, value: float) -> float:
        return round(BOTTOM - (BOTTOM - TOP) * value / self.top, 1)

    def drawing(
        self,
        line: Iterable[tuple[float, float]],
        band: Iterable[tuple[float, float]],
        marks: list[tuple[float, float, str]],
        budget: int | None,
    ) -> TimelineChart:
        every = -(-len(self.turns) // _MOST_TICKS)
        levels = [self.step * i for i in range(round(self.top / self.step) + 1)]
        return TimelineChart(
            line=" ".join(f"{x:g},{y:g}" for x, y in line),
            band=" ".join(f"{x:g},{y:g}" for x, y in band),
            marks=marks,
            x_ticks=[(self.at(i, 0)[0], str(t)) for i, t in enumerate(self.turns)][::every],
            y_ticks=[(self._place(level), self._said(level)) for level in levels],
            budget=None if budget is None else self.y(budget),
        )

    def _said(self, level: float) -> str:
        return f"{level:.3g} MB" if self._in_bytes else f"{level:,.0f}"


def _round_step(least: float, *, whole: bool) -> float:
    """Return the smallest 1, 2 or 5 times a power of ten that is at least this; 1 if `whole`."""
    power = floor(log10(least))
    scale = 10.0 ** (max(0, power) if whole else power)
    return next(scale * factor for factor in (1, 2, 5, 10) if scale * factor >= least)


@dataclass(frozen=True)
class ShownMessage:
    """One message: who speaks, and (what it is, text) for each of its parts."""

    role: str
    parts: list[tuple[str, str]]


@dataclass(frozen=True)
class ShownTranscript:
    """A trial's messages as far as they are shown, or the problem why there are none."""

    record: TrialRecord
    messages: list[ShownMessage]
    left_out: int = 0
    problem: str | None = None


def transcripts(
    path: Path, trials: Sequence[TrialRecord], most: int = MOST_TRANSCRIPTS
) -> list[ShownTranscript]:
    """Read the transcripts of the trials worth looking at: failed ones first, then low scores."""
    having = [record for record in trials if record.transcript is not None]
    chosen = sorted(having, key=lambda r: (r.score is not None, r.score or 0.0))[:most]
    return [_read(RunReader(path), record) for record in chosen]


def _read(run: RunReader, record: TrialRecord) -> ShownTranscript:
    try:
        data = run.transcript(record)
    except (ValueError, OSError, RecursionError) as error:
        return ShownTranscript(record, [], problem=f"not readable: {visible(error)}")
    if data is None:
        return ShownTranscript(record, [], problem="the file is gone")
    listed = data.get("transcript") if isinstance(data, dict) else data
    messages = listed if isinstance(listed, list) else [data]
    shown = list(_within_limits(messages))
    return ShownTranscript(record, shown, left_out=len(messages) - len(shown))


def _within_limits(messages: Sequence[Any]) -> Iterator[ShownMessage]:
    left = MOST_CHARACTERS
    for data in messages[:MOST_MESSAGES]:
        role = data.get("role", "data") if isinstance(data, dict) else "data"
        found = segments(data) or [Segment("others", json.dumps(data, ensure_ascii=False))]
        parts = [(_PHASES[phase], visible(text, _PER_PART)) for phase, text in found]
        yield ShownMessage(visible(role, 40), parts)
        left -= sum(len(text) for _, text in parts)
        if left <= 0:
            return
