"""Tables of the analyses for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from rich.table import Table

from agentbench_kv.analysis.angles import Angles
from agentbench_kv.analysis.audit import PhaseTimeline, TokenAudit
from agentbench_kv.analysis.coverage import OVERALL, Coverage
from agentbench_kv.analysis.rings import RingOverlap
from agentbench_kv.analysis.tsne import Embedding
from agentbench_kv.methods.base import PHASE_NAMES, Phase
from agentbench_kv.results.terminal import new_table


def angles_tables(angles: Angles) -> list[Table]:
    """Return the phase matrix, and inter- against intra-phase means per layer."""
    matrix = zip(PHASE_NAMES, angles.matrix().tolist(), strict=True)
    layers = []
    inter, intra = torch.nanmean(angles.inter, 0), torch.nanmean(angles.intra, 0)
    for layer, (across, within) in enumerate(zip(inter, intra, strict=True)):
        means = (_number(float(torch.nanmean(row, 0))) for row in (across, within))
        layers.append((layer, *means, f"{int((across > within).sum())}/{len(across)}"))
    return [
        new_table(
            "degrees", *PHASE_NAMES, rows=((name, *map(_number, row)) for name, row in matrix)
        ),
        new_table("layer", "inter-phase", "intra-phase", "heads with inter > intra", rows=layers),
    ]


def tsne_tables(embeddings: Sequence[Embedding]) -> list[Table]:
    """Return one row per head."""
    rows = []
    for item in embeddings:
        counts = [int((item.phases == int(phase)).sum()) for phase in Phase]
        figures = (_number(item.divergence, 3), _number(item.silhouette, 3))
        rows.append((item.layer, item.head, *counts, *figures))
    columns = ("layer", "query head", *PHASE_NAMES, "KL divergence", "silhouette of phases")
    return [new_table(*columns, rows=rows)]


def coverage_tables(coverage: Coverage) -> list[Table]:
    """Return one row per budget and strategy: coverage in percent, and overall of the oracle's."""
    rows, width = [], len(PHASE_NAMES) + 1
    for start in range(0, len(coverage.rows), width):
        group = coverage.rows[start : start + width]
        first, last = group[0], group[-1]
        head = (first.budget, coverage.events[first.budget], first.strategy, first.representatives)
        rows.append((*head, *(_percent(row.coverage) for row in group), _percent(last.relative)))
    columns = ("budget", "events", "strategy", "q", *PHASE_NAMES, OVERALL, "of oracle")
    return [new_table(*columns, rows=rows)]


def timeline_tables(timeline: PhaseTimeline) -> list[Table]:
    """Return one row per event: mean kept tokens of each phase, and how many were ever seen."""
    rows = []
    columns = (timeline.logical, timeline.live, timeline.mean_kept(), timeline.seen)
    for number, (logical, live, kept, seen) in enumerate(zip(*columns, strict=True)):
        pairs = zip(kept.tolist(), seen.tolist(), strict=True)
        cells = (f"{_number(mean)}/{ever}" for mean, ever in pairs)
        rows.append((number, logical, live, *cells))
    phases = (f"{name} kept/seen" for name in PHASE_NAMES)
    return [new_table("event", "logical", "live", *phases, rows=rows)]


def audit_tables(found: Sequence[TokenAudit]) -> list[Table]:
    """Return one row per position and event that evicted it, or one if none did."""
    rows: list[tuple[object, ...]] = []
    for token in found:
        held = f"{token.held}/{token.heads}"
        if not token.evictions:
            rows.append((token.position, held))
        for item in token.evictions:
            lost = f"{len(item.heads)}/{token.heads}"
            medians = (int(t.median()) for t in (item.ranks, item.places, item.competed))
            margin = f"{float(torch.nanmedian(item.margins)):.3g}"
            rows.append((token.position, held, item.event, item.logical, lost, *medians, margin))
    columns = (
        "position", "still held", "event", "logical", "evicted in", "median rank", "places",
        "competed", "median margin",
    )  # fmt: skip
    return [new_table(*columns, rows=rows)]


def rings_tables(found: RingOverlap) -> list[Table]:
    """Return one row per ring and one for all: share within the window, and how far they reach."""
    rows = []
    for ring in found.reach:
        ends = (ring.inside.low, ring.inside.high) if ring.inside else (None, None)
        share = ring.inside.point if ring.inside else None
        shares = [_percent(each) for each in (share, *ends)]
        rows.append((ring.phase, *shares, _number(ring.newest, 0), _number(ring.oldest, 0)))
    columns = (
        "ring", f"% in the last {found.window}", "low", "high", "newest, tokens ago", "oldest",
    )  # fmt: skip
    counts = (found.sessions, found.events, _percent(found.floored))
    summary = new_table("sessions", "events", "% of events at the least overlap", rows=[counts])
    return [new_table(*columns, rows=rows), summary]


def _number(value: float | None, digits: int = 1) -> str | None:
    return None if value is None or value != value else f"{value:.{digits}f}"


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{100 * share:.1f}"
