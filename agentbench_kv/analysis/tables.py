"""Tables of the analyses for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from rich.table import Table

from agentbench_kv.analysis.angles import Angles
from agentbench_kv.analysis.audit import TokenAudit, PhaseTimeline
from agentbench_kv.analysis.coverage import OVERALL, Coverage
from agentbench_kv.analysis.tsne import Embedding
from agentbench_kv.methods.base import PHASE_NAMES, Phase
from agentbench_kv.results.terminal import plain


def angles_tables(angles: Angles) -> list[Table]:
    """Return the phase matrix, and inter- against intra-phase means per layer."""
    matrix = _table("degrees", *PHASE_NAMES)
    for name, values in zip(PHASE_NAMES, angles.matrix().tolist(), strict=True):
        matrix.add_row(*map(plain, (name, *(_number(value) for value in values))))
    layers = _table("layer", "inter-phase", "intra-phase", "heads with inter > intra")
    inter, intra = torch.nanmean(angles.inter, 0), torch.nanmean(angles.intra, 0)
    for layer, (across, within) in enumerate(zip(inter, intra, strict=True)):
        larger = f"{int((across > within).sum())}/{len(across)}"
        means = (_number(float(torch.nanmean(row, 0))) for row in (across, within))
        layers.add_row(*map(plain, (layer, *means, larger)))
    return [matrix, layers]


def tsne_tables(embeddings: Sequence[Embedding]) -> list[Table]:
    """Return one row per head."""
    table = _table("layer", "query head", *PHASE_NAMES, "KL divergence", "silhouette of phases")
    for item in embeddings:
        counts = [int((item.phases == int(phase)).sum()) for phase in Phase]
        figures = (_number(item.divergence, 3), _number(item.silhouette, 3))
        table.add_row(*map(plain, (item.layer, item.head, *counts, *figures)))
    return [table]


def coverage_tables(coverage: Coverage) -> list[Table]:
    """Return one row per budget and strategy: coverage in percent, beside the oracle's."""
    table = _table("budget", "events", "strategy", "q", *PHASE_NAMES, OVERALL, "of oracle")
    width = len(PHASE_NAMES) + 1
    for start in range(0, len(coverage.rows), width):
        rows = coverage.rows[start : start + width]
        first, last = rows[0], rows[-1]
        head = (first.budget, coverage.events[first.budget], first.strategy, first.representatives)
        cells = (_percent(row.coverage) for row in rows)
        table.add_row(*map(plain, (*head, *cells, _percent(last.relative))))
    return [table]


def timeline_tables(timeline: PhaseTimeline) -> list[Table]:
    """Return one row per event: mean kept tokens of each phase, and how many were ever seen."""
    table = _table("event", "logical", "live", *(f"{name} kept/seen" for name in PHASE_NAMES))
    columns = (timeline.logical, timeline.live, timeline.mean_kept(), timeline.seen)
    for number, (logical, live, kept, seen) in enumerate(zip(*columns, strict=True)):
        pairs = zip(kept.tolist(), seen.tolist(), strict=True)
        cells = (f"{_number(mean)}/{ever}" for mean, ever in pairs)
        table.add_row(*map(plain, (number, logical, live, *cells)))
    return [table]


def audit_tables(found: Sequence[TokenAudit]) -> list[Table]:
    """Return one row per position and event that evicted it, or one if none did."""
    table = _table(
        "position", "still held", "event", "logical", "evicted in", "median rank", "places",
        "competed", "median margin",
    )  # fmt: skip
    for evidence in found:
        held = f"{evidence.held}/{evidence.heads}"
        if not evidence.evictions:
            table.add_row(*map(plain, (evidence.position, held)))
        for item in evidence.evictions:
            lost = f"{len(item.heads)}/{evidence.heads}"
            medians = (int(t.median()) for t in (item.ranks, item.places, item.competed))
            margin = f"{float(torch.nanmedian(item.margins)):.3g}"
            cells = (evidence.position, held, item.event, item.logical, lost, *medians, margin)
            table.add_row(*map(plain, cells))
    return [table]


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _number(value: float | None, digits: int = 1) -> str | None:
    return None if value is None or value != value else f"{value:.{digits}f}"


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{100 * share:.1f}"
