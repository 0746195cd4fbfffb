"""Live KV turn by turn: bars for the terminal, a picture for a paper."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from rich.table import Table
from rich.text import Text

from agentbench_kv.errors import PrerequisiteError
from agentbench_kv.results.files import writing
from agentbench_kv.results.reader import turns_by_index
from agentbench_kv.results.records import TurnRecord
from agentbench_kv.results.terminal import new_table, number, plain, visible

_WIDTH = 48
_MOST_ROWS = 60
_HELD, _EVICTED = "█", "░"
_HELD_COLOUR, _EVICTED_COLOUR = "#3b6fb6", "#c8483c"


@dataclass(frozen=True)
class Step:
    """One turn index over the trials that reached it; tokens per (layer, KV head)."""

    turn: int
    trials: int
    held: float  # median of what was live when the turn ended
    low: float  # its 10th and 90th percentile; both `held` where there is one trial
    high: float
    evicted: float  # median of what was evicted during the turn
    events: int  # in all trials together


def steps(turns: Sequence[TurnRecord]) -> list[Step]:
    """Return the timeline of some trials, by turn index."""
    return [_step(group) for group in turns_by_index(turns)]


def _step(group: Sequence[TurnRecord]) -> Step:
    held = [turn.live_after for turn in group]
    deciles = statistics.quantiles(held, n=10, method="inclusive") if len(held) > 1 else held
    return Step(
        turn=group[0].turn,
        trials=len(group),
        held=statistics.median(held),
        low=deciles[0],
        high=deciles[-1],
        evicted=statistics.median(turn.evicted for turn in group),
        events=sum(turn.events for turn in group),
    )


def timeline_table(timeline: Sequence[Step], budget: int | None = None) -> Table:
    """Return one bar per turn: held at its end, then evicted during it; the budget marked below."""
    table = new_table("turn", f"live KV: {_HELD} held, {_EVICTED} evicted", "held", "evicted")
    most = max([step.held + step.evicted for step in timeline] + [budget or 0, 1])
    for step in timeline[:_MOST_ROWS]:
        bar = _bar(step, _WIDTH / most)
        table.add_row(plain(step.turn), bar, plain(number(step.held)), plain(number(step.evicted)))
    if len(timeline) > _MOST_ROWS:
        table.add_row("", f"and {len(timeline) - _MOST_ROWS} more turns; --png draws all")
    if budget is not None:
        table.add_row("", f"{' ' * max(0, round(budget * _WIDTH / most) - 1)}▲ budget {budget}")
    return table


def _bar(step: Step, scale: float) -> Text:
    held = round(step.held * scale)
    # Rounded together, so that equal sums end in the same column.
    evicted = round((step.held + step.evicted) * scale) - held
    return Text.assemble((_HELD * held, "blue"), (_EVICTED * evicted, "red"))


def check_drawing() -> None:
    """Raise a PrerequisiteError if a picture cannot be drawn, with the command that helps."""
    if find_spec("matplotlib") is None:
        raise PrerequisiteError(
            "--png needs matplotlib, from the extra [analysis]: in the clone, pip install "
            '".[analysis]"; elsewhere, pip install matplotlib'
        )


def draw_timeline(
    timeline: Sequence[Step], path: Path, title: str, budget: int | None = None
) -> None:
    """Draw the timeline as a PNG file; a PrerequisiteError if that cannot be done.

    Bars as in the terminal; a whisker spans the 10th to the 90th percentile over trials.
    """
    check_drawing()
    # Not pyplot: it keeps global state and may want a display.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    index, held = [step.turn for step in timeline], [step.held for step in timeline]
    spread = [[s.held - s.low for s in timeline], [s.high - s.held for s in timeline]]
    axes.bar(index, held, color=_HELD_COLOUR, label="held at the turn's end")
    axes.errorbar(index, held, yerr=spread, fmt="none", ecolor="black", elinewidth=0.8)
    axes.bar(
        index, [step.evicted for step in timeline], bottom=held,
        color=_EVICTED_COLOUR, alpha=0.5, label="evicted in the turn",
    )  # fmt: skip
    if budget is not None:
        axes.axhline(budget, color="black", linestyle="--", linewidth=0.8, label=f"budget {budget}")
    axes.set_xlabel("turn")
    axes.set_ylabel("live tokens per layer and KV head")
    # A title is data: a font may lack its letters, and `$` would be taken for a formula.
    axes.set_title(visible(title).encode("ascii", "backslashreplace").decode(), parse_math=False)
    axes.legend(fontsize="small")
    with writing(path):
        figure.savefig(path, dpi=150, format="png")
