"""Pictures of the analyses, PNG or SVG, drawn with matplotlib if it is installed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from agentbench_kv.analysis.angles import Angles
from agentbench_kv.analysis.audit import PhaseTimeline
from agentbench_kv.analysis.coverage import ORACLE, Coverage, CoverageRow
from agentbench_kv.analysis.tsne import Embedding, need
from agentbench_kv.errors import UsageError
from agentbench_kv.methods.base import PHASE_NAMES, Phase
from agentbench_kv.results.files import writing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#3b6fb6", "#e0a526", "#4c9a55", "#c8483c")
"""Think blue, act yellow, tool green, others red, as in the paper."""

_BRIGHT = 60
"""Degrees from which a cell is so bright that white text cannot be read on it."""

_MOST_TICKS = 24
_BLANK = 1
"""Empty cells between the small matrices of the grid."""


def check_plot(path: Path | None) -> None:
    """Check before anything is computed that a picture can be drawn, if one is asked for.

    UsageError if the name does not end in `.png` or `.svg`, PrerequisiteError without matplotlib.
    """
    if path is None:
        return
    if path.suffix not in (".png", ".svg"):
        raise UsageError(f"--plot {path}: expected a file name that ends in .png or .svg")
    need("matplotlib")


def plot_angles(angles: Angles, path: Path) -> None:
    """Draw the phase matrix, the distributions, and the matrix of every (layer, query head)."""
    layers, heads = angles.degrees.shape[1:]
    figure = _figure(12, max(4.0, 0.35 * layers))
    matrix, spread, grid = figure.subplots(1, 3, width_ratios=(1, 1, max(1, heads / layers)))
    _draw_matrix(matrix, angles.matrix())
    _draw_spread(spread, angles)
    image = grid.imshow(_tiled(angles.cells()).numpy(), cmap="viridis", vmin=0, vmax=90)
    grid.set(xlabel="query head, 4x4 phases each", ylabel="layer", title="per layer and head")
    grid.set_xticks(*_ticks(heads))
    grid.set_yticks(*_ticks(layers))
    figure.colorbar(image, ax=grid, label="mean principal angle (degrees)")
    _save(figure, path)


def _draw_matrix(axes: Axes, matrix: Tensor) -> None:
    axes.imshow(matrix.numpy(), cmap="viridis", vmin=0, vmax=90)
    axes.set_xticks(range(len(Phase)), PHASE_NAMES)
    axes.set_yticks(range(len(Phase)), PHASE_NAMES)
    for row, values in enumerate(matrix.tolist()):
        for column, value in enumerate(values):
            text = "-" if value != value else f"{value:.0f}"
            colour = "white" if value < _BRIGHT else "black"
            axes.text(column, row, text, ha="center", va="center", color=colour)
    axes.set_title("mean principal angle (degrees)")


def _draw_spread(axes: Axes, angles: Angles) -> None:
    for values, label, colour in (
        (angles.intra, "within a phase", COLOURS[0]),
        (angles.inter, "across phases", COLOURS[3]),
    ):
        known = values[~values.isnan()]
        if len(known):
            axes.hist(known.numpy(), bins=40, density=True, alpha=0.6, label=label, color=colour)
    axes.legend()
    axes.set(xlabel="mean principal angle (degrees)", ylabel="density", title="pairs of spans")


def _tiled(cells: Tensor) -> Tensor:
    """Lay matrices [layers, heads, 4, 4] beside each other with a blank between."""
    padded = torch.nn.functional.pad(cells, (0, _BLANK, 0, _BLANK), value=torch.nan)
    layers, heads, rows, columns = padded.shape
    return padded.permute(0, 2, 1, 3).reshape(layers * rows, heads * columns)[:-_BLANK, :-_BLANK]


def _ticks(count: int) -> tuple[list[float], list[str]]:
    """Return centres of the grid's matrices and their numbers, few enough to be read."""
    shown = range(0, count, 1 + count // _MOST_TICKS)
    side = len(Phase)
    return [(side + _BLANK) * i + (side - 1) / 2 for i in shown], [str(i) for i in shown]


def plot_tsne(embeddings: Sequence[Embedding], path: Path) -> None:
    """Draw one panel per head, coloured by phase."""
    figure = _figure(4.5 * len(embeddings), 4.5)
    panels = figure.subplots(1, len(embeddings), squeeze=False)[0]
    for axes, embedding in zip(panels, embeddings, strict=True):
        for phase in Phase:
            points = embedding.points[embedding.phases == int(phase)]
            axes.scatter(*points.T, s=9, color=COLOURS[phase], label=PHASE_NAMES[phase])
        axes.set_title(f"layer {embedding.layer}, query head {embedding.head}")
        axes.set_xticks([])
        axes.set_yticks([])
    panels[0].legend()
    _save(figure, path)


def plot_coverage(coverage: Coverage, path: Path) -> None:
    """Draw one panel per phase: coverage against budget, one line per strategy."""
    phases = list(dict.fromkeys(row.phase for row in coverage.rows))
    figure = _figure(3.2 * len(phases), 4)
    panels = figure.subplots(1, len(phases), sharey=True, squeeze=False)[0]
    for axes, phase in zip(panels, phases, strict=True):
        lines: dict[str, list[CoverageRow]] = {}
        for row in coverage.rows:
            if row.phase == phase:
                count = "" if row.representatives is None else f" (q={row.representatives})"
                lines.setdefault(f"{row.strategy}{count}", []).append(row)
        for label, rows in lines.items():
            budgets = [row.budget for row in rows]
            values = [float("nan") if row.coverage is None else row.coverage for row in rows]
            style = "--" if label == ORACLE else "-"
            axes.plot(budgets, values, style, marker="o", markersize=3, label=label)
        axes.set(xlabel="budget (tokens)", ylabel="", title=phase)
    panels[0].set_ylabel("utility coverage")
    panels[-1].legend(fontsize="small")
    _save(figure, path)


def plot_timeline(timeline: PhaseTimeline, path: Path) -> None:
    """Draw the tokens each event kept, stacked by phase, mean over layers and heads."""
    figure = _figure(7, 4)
    axes = figure.subplots()
    kept = timeline.mean_kept()
    gaps = (after - before for before, after in pairwise(timeline.logical))
    width = 0.8 * min(gaps, default=1)
    for phase in Phase:
        below = kept[:, : int(phase)].sum(-1).numpy()
        counts = kept[:, int(phase)].numpy()
        label, colour = PHASE_NAMES[phase], COLOURS[phase]
        axes.bar(timeline.logical, counts, width, below, label=label, color=colour)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    axes.set(xlabel="tokens ever seen", ylabel="tokens kept per head", title="kept tokens by phase")
    _save(figure, path)


def _figure(width: float, height: float) -> Figure:
    # Not pyplot: it keeps global state and may want a display.
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _save(figure: Figure, path: Path) -> None:
    from matplotlib import rc_context

    # Without a date and with a fixed salt, equal figures are equal files.
    metadata = {"Date": None} if path.suffix == ".svg" else {}
    with writing(path), rc_context({"svg.hashsalt": "kvbench"}):
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150, metadata=metadata)
