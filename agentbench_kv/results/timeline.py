"""The timeline of a run: how much each turn held and evicted, as bars or as a picture."""

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
from agentbench_kv.results.records import TurnRecord
from agentbench_kv.results.run_reader import turns_by_index
from agentbench_kv.results.terminal import megabytes, new_table, number, plain, visible

_WIDTH = 48
_MOST_BARS = 60
_HELD, _EVICTED = "█", "░"
_HELD_COLOUR, _EVICTED_COLOUR = "#3b6fb6", "#c8483c"


@dataclass(frozen=True)
class TimelineStep:
    """One turn index over the trials that reached it; tokens per (layer, KV head)."""

    turn: int
    trials: int
    held: float  # median of what was live when the turn ended
    low: float  # its 10th and 90th percentile; both `held` where there is one trial
    high: float
    evicted: float  # median of what was evicted during the turn
    events: int  # in all trials together


def steps(turns: Sequence[TurnRecord]) -> list[TimelineStep]:
    found = []
    for group in turns_by_index(turns):
        held = [turn.live_after for turn in group]
        deciles = statistics.quantiles(held, n=10, method="inclusive") if len(held) > 1 else held
        ends = statistics.median(held), deciles[0], deciles[-1]
        evicted = statistics.median(turn.evicted for turn in group)
        events = sum(turn.events for turn in group)
        found.append(TimelineStep(group[0].turn, len(group), *ends, evicted, events))
    return found


def timeline_table(
    timeline: Sequence[TimelineStep], budget: int | None = None, token_bytes: float | None = None
) -> Table:
    """Return one bar per turn: held at its end, then evicted during it; the budget marked below.

    With the bytes of a token, what is held stands in MB, too.
    """
    sizes = ["held MB"] * (token_bytes is not None)
    bars = f"live KV: {_HELD} held, {_EVICTED} evicted"
    table = new_table("turn", bars, *sizes, "held", "evicted")
    most = max([step.held + step.evicted for step in timeline] + [budget or 0, 1])
    scale = _WIDTH / most
    for step in timeline[:_MOST_BARS]:
        held = round(step.held * scale)
        # Rounded together, so that equal sums end in the same column.
        evicted = round((step.held + step.evicted) * scale) - held
        bar = Text.assemble((_HELD * held, "blue"), (_EVICTED * evicted, "red"))
        size = [] if token_bytes is None else [megabytes(step.held * token_bytes)]
        cells = (*size, number(step.held), number(step.evicted))
        table.add_row(plain(step.turn), bar, *map(plain, cells))
    if len(timeline) > _MOST_BARS:
        table.add_row("", f"and {len(timeline) - _MOST_BARS} more turns; --png draws all")
    if budget is not None:
        table.add_row("", f"{' ' * max(0, round(budget * _WIDTH / most) - 1)}▲ budget {budget}")
    return table


def check_drawing() -> None:
    """Raise a PrerequisiteError if a picture cannot be drawn, with the command that helps."""
    if find_spec("matplotlib") is None:
        raise PrerequisiteError(
            "--png needs matplotlib, from the extra [analysis]: in the clone, pip install "
            '".[analysis]"; elsewhere, pip install matplotlib'
        )


def draw_timeline(
    timeline: Sequence[TimelineStep],
    path: Path,
    title: str,
    budget: int | None = None,
    token_bytes: float | None = None,
) -> None:
    """Draw the timeline as a PNG file; whiskers are the 10th and 90th percentile over trials.

    Up goes MB where the bytes of a token are known, with tokens at the other side; else tokens.
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
    tokens = "live tokens per layer and KV head"
    if token_bytes is None:
        axes.set_ylabel(tokens)
    else:
        unit = token_bytes / 1e6
        axes.secondary_yaxis("right").set_ylabel(tokens)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value * unit:.3g}")
        axes.set_ylabel("live MB of a session")
    # A title is data: a font may lack its letters, and `$` would be taken for a formula.
    axes.set_title(visible(title).encode("ascii", "backslashreplace").decode(), parse_math=False)
    axes.legend(fontsize="small")
    with writing(path):
        figure.savefig(path, dpi=150, format="png")
