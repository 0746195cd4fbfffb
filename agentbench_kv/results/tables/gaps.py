"""Who leads at a budget, who cannot be told from the leader, and who differs from full."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentbench_kv.results.paired import Difference, holm
from agentbench_kv.results.tables.groups import Group
from agentbench_kv.results.tables.model import Mark
from agentbench_kv.results.tables.pairing import Scores, differences, spans

__all__ = ["Entry", "Gap", "against_full", "marks", "unshared"]


@dataclass(frozen=True)
class Entry:
    """A group with the scores a table shows of it."""

    group: Group
    scores: Scores


@dataclass(frozen=True)
class Gap:
    """A compressed group less full: the paired difference, and its p-value after Holm."""

    entry: Entry
    full: Entry
    difference: Difference
    adjusted: float


def marks(entries: Sequence[Entry]) -> list[Mark | None]:
    """Mark, at each budget, the best compressed entry and those tied with it.

    An entry is tied if the 95% interval of its paired difference to the best includes 0.
    """
    found: dict[int, Mark] = {}
    rivals: list[tuple[int, int]] = []
    for places in _contests(entries):
        best = max(places, key=lambda i: entries[i].scores.mean)
        found[best] = Mark.BEST
        rivals += [(best, i) for i in places if i != best]
    gaps = spans([(entries[a].scores, entries[b].scores) for a, b in rivals])
    for (_, i), gap in zip(rivals, gaps, strict=True):
        if gap is not None and gap.low <= 0 <= gap.high:
            found[i] = Mark.TIED
    return [found.get(i) for i in range(len(entries))]


def unshared(entries: Sequence[Entry]) -> str:
    """Say which entries were compared with the best on fewer samples than they have, if any."""
    partial = []
    for places in _contests(entries):
        best = entries[max(places, key=lambda i: entries[i].scores.mean)]
        for entry in (entries[i] for i in places):
            shared = len(entry.scores.parts.keys() & best.scores.parts.keys())
            if shared < max(len(entry.scores.parts), len(best.scores.parts)):
                partial.append(f"{entry.group.label} at {entry.group.budget} on {shared}")
    return f"paired with the best on the samples both have: {', '.join(partial)}" * bool(partial)


def against_full(entries: Sequence[Entry]) -> list[Gap]:
    """Compare every compressed entry with `full`; `full-constrained` stands in where there is none.

    Only a `full` that ran under the same conditions will do: `kvbench compare` refuses others.

    Returns
    -------
    list of Gap
        One family: the p-values are adjusted for their number (Holm).
    """
    rivals = [entry for entry in entries if entry.group.compressed]
    pairs = [(entry, full) for entry in rivals if (full := _full_of(entry, entries)) is not None]
    found = differences([(entry.scores, full.scores) for entry, full in pairs])
    known = [(*pair, gap) for pair, gap in zip(pairs, found, strict=True) if gap is not None]
    adjusted = holm([gap.p_value for *_, gap in known])
    return [Gap(*parts, p) for parts, p in zip(known, adjusted, strict=True)]


def _full_of(entry: Entry, entries: Sequence[Entry]) -> Entry | None:
    alike = [
        other
        for other in entries
        if not other.group.compressed and other.group.conditions == entry.group.conditions
    ]
    return min(alike, key=lambda other: other.group.method != "full", default=None)


def _contests(entries: Sequence[Entry]) -> list[list[int]]:
    """Return the places of the compressed entries of each budget, run under one set of conditions.

    Runs of another temperature are another contest.
    """
    contests: dict[tuple[int | str | None, tuple[str, ...]], list[int]] = {}
    for i, entry in enumerate(entries):
        if entry.group.compressed:
            contest = (entry.group.budget, entry.group.conditions)
            contests.setdefault(contest, []).append(i)
    return list(contests.values())
