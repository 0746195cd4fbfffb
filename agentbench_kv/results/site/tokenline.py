"""A session's divergence token by token, as `kvbench fidelity --save-tokens` kept it, as a chart.

Up goes KL in powers of ten, across go the tokens of all answers; what is below the least power is
drawn on it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from math import ceil, isfinite, log10
from pathlib import Path
from typing import Any

from agentbench_kv.results.records import TrialRecord
from agentbench_kv.results.run_reader import RunReader
from agentbench_kv.results.site.charts import visible
from agentbench_kv.results.site.runpage import BOTTOM, LEFT, RIGHT, TOP, TimelineChart

KEY = "fidelity"  # in a transcript
_LEAST = -5  # power of ten in nats
_MOST_TOKENS = 5000
_GAP = 36.0  # between the names of turns


def token_line(path: Path, trials: Sequence[TrialRecord]) -> tuple[TimelineChart, str] | None:
    """Draw the session with most events of those that kept their tokens; None if none did."""
    having = [record for record in trials if record.transcript is not None]
    run = RunReader(path)
    for record in sorted(having, key=lambda record: -record.kv.events):
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            return _drawn(run.transcript(record)[KEY]), visible(record.sample_id, 80)
    return None


def _drawn(data: Mapping[str, Any]) -> TimelineChart:
    kl = [float(value) for value in data["kl"]][:_MOST_TOKENS]
    turns = [int(turn) for turn in data["turn"]][: len(kl)]
    if not kl or len(turns) < len(kl) or not all(map(isfinite, kl)):
        raise ValueError("no divergence of every token")
    highest = max(_LEAST + 1, ceil(log10(max(*kl, 10.0**_LEAST))))

    def across(index: float) -> float:
        return round(LEFT + (RIGHT - LEFT) * (index + 0.5) / len(kl), 1)

    def up(nats: float) -> float:
        share = (log10(max(nats, 10.0**_LEAST)) - _LEAST) / (highest - _LEAST)
        return round(BOTTOM - (BOTTOM - TOP) * share, 1)

    marks = [
        (across(at), up(kl[at]), f"{int(live):,} tokens held, {int(kept):,} kept")
        for at, live, kept in data["events"]
        if 0 <= at < len(kl)
    ]
    return TimelineChart(
        line=" ".join(f"{across(index):g},{up(value):g}" for index, value in enumerate(kl)),
        band="",
        marks=marks,
        x_ticks=_turn_ticks(turns, across),
        y_ticks=[(up(10.0**power), f"{10.0**power:g}") for power in range(_LEAST, highest + 1)],
        budget=None,
    )


def _turn_ticks(turns: Sequence[int], across: Callable[[float], float]) -> list[tuple[float, str]]:
    """Name every turn where it begins, unless it would write over the one before."""
    found: list[tuple[float, str]] = []
    for index, turn in enumerate(turns):
        begins = index == 0 or turns[index - 1] != turn
        if begins and (not found or across(index) - found[-1][0] >= _GAP):
            found.append((across(index), str(turn)))
    return found
