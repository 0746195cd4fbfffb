"""How far a method's rings of queries, one a phase, reach behind the most recent tokens.

Where turns are short, the last queries of every phase are among the last tokens, and a method that
keeps a ring per phase sees what one with a recency window sees. Four rings of r queries cannot
have less than a quarter within the last 4r tokens: those tokens are of some phase.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch

from agentbench_kv.analysis.replay import held_queries
from agentbench_kv.errors import UsageError
from agentbench_kv.methods.base import PHASE_NAMES, Method, Phase, QueryKind, QueryPlan
from agentbench_kv.results.stats import Interval, Scores, level

Tally = tuple[int, int]  # queries within the window, queries held


@dataclass(frozen=True)
class RingEvent:
    """The rings at one event: for each phase, how many tokens ago its queries were."""

    now: int  # tokens ever seen
    ages: tuple[tuple[int, ...], ...]  # by phase, the newest query first; 1 is the last token

    def within(self, window: int, phase: int | None = None) -> Tally:
        """Count queries of one ring, or of all, among the last `window` tokens."""
        rings = self.ages if phase is None else (self.ages[phase],)
        ages = [age for ring in rings for age in ring]
        return sum(age <= window for age in ages), len(ages)


def ring_plan(method: Method) -> QueryPlan:
    """Return what the method keeps of queries; UsageError if that is not a ring per phase."""
    plan = method.query_plan()
    if plan.kind is not QueryKind.PER_PHASE:
        raise UsageError(f"{method.label} keeps no ring of queries per phase; agentkv does")
    return plan


def ring_events(method: Method, phases: Sequence[int], points: Sequence[int]) -> list[RingEvent]:
    """Return what `method` held at events after so many tokens of a session; UsageError if none.

    `phases` are those of all the session's tokens.
    """
    plan, labels = ring_plan(method), torch.tensor(phases)
    events = []
    for now in points:
        held = held_queries(plan, labels[:now])
        of = labels[held]
        ages = ((now - held[of == int(phase)]).flip(0).tolist() for phase in Phase)
        events.append(RingEvent(now, tuple(map(tuple, ages))))
    return events


@dataclass(frozen=True)
class RingReach:
    """One ring, or all (`phase` is "all"), over the events of some sessions."""

    phase: str
    inside: Interval | None  # share of the queries held that lie within the window
    newest: float | None  # median over events: tokens since the ring's newest query
    oldest: float | None


@dataclass(frozen=True)
class RingOverlap:
    """How much of the rings the recency window holds too."""

    window: int
    sessions: int
    events: int
    floored: float  # share of events at which no fewer than a quarter could lie within
    reach: list[RingReach]

    def document(self) -> dict[str, Any]:
        """Return it as JSON data."""
        return {"analysis": "rings", **asdict(self)}


def ring_overlap(sessions: Mapping[str, Sequence[RingEvent]], window: int) -> RingOverlap:
    """Pool the events of sessions, by sample; intervals are over sessions."""
    every = [event for events in sessions.values() for event in events]
    if not every:
        raise UsageError("no event in these sessions: lower the budget")
    tallies = [event.within(window) for event in every]
    floored = sum(inside * len(Phase) <= held for inside, held in tallies) / len(every)
    places = [(name, index) for index, name in enumerate(PHASE_NAMES)]
    reach = [_reach(sessions, window, name, phase) for name, phase in [*places, ("all", None)]]
    return RingOverlap(window, len(sessions), len(every), floored, reach)


def _reach(
    sessions: Mapping[str, Sequence[RingEvent]], window: int, name: str, phase: int | None
) -> RingReach:
    counts = {}
    for sample, events in sessions.items():
        parts = [event.within(window, phase) for event in events]
        counts[sample] = (float(sum(i for i, _ in parts)), float(sum(n for _, n in parts)))
    scores = Scores.of_counts(counts)
    inside = level(scores) if scores.parts else None
    if phase is None:
        return RingReach(name, inside, None, None)
    rings = [event.ages[phase] for events in sessions.values() for event in events]
    held = [ring for ring in rings if ring]
    newest, oldest = ([ring[end] for ring in held] for end in (0, -1))
    return RingReach(name, inside, median(newest or [0]), median(oldest or [0]))
