"""A session as the harness keeps it, so that a backend may die without the session being lost."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from agentbench_kv.engines.accounting import merge_stats
from agentbench_kv.engines.base import KVEvent, KVStats, PhaseLabeller
from agentbench_kv.engines.serving.observed import ObservedLedger
from agentbench_kv.phases.labellers import recipe_of

_numbers = itertools.count(1)


@dataclass
class ServingSession:
    """One session."""

    name: str
    labeller: PhaseLabeller
    recipe: str = field(init=False)
    # What the backend calls it; new after every loss, so that nothing old is taken for it.
    backend_name: str = field(init=False)
    tokens: list[int] = field(default_factory=list)  # everything it was given or generated
    known: int = 0  # how many of them this backend has seen
    epoch: int = 0  # which start of the backend it lives in; 0: none yet
    carried: KVStats = field(default_factory=KVStats)  # accounting of backends that died
    last: KVStats = field(default_factory=KVStats)  # the living backend's, when it was last asked
    observed: ObservedLedger | None = None  # the accounting, where the backend keeps none

    def __post_init__(self) -> None:
        self.recipe = recipe_of(self.labeller)
        self._rename()

    def accept(self, token: int) -> None:
        """Add a generated token."""
        self.labeller.label(token)
        self.tokens.append(token)
        self.known += 1
        if self.observed is not None:
            self.observed.token()

    def enter(self, epoch: int) -> None:
        """Move to another start of the backend; what the old one held is computed again."""
        if self.epoch:
            self.carried = merge_stats(self.carried, self.last)
            self.carried.restarts.append((len(self.carried.events), len(self.tokens)))
            self.carried.recomputed += self.known
            self._rename()
        self.last = KVStats()
        self.observed = None
        self.known = 0
        self.epoch = epoch

    def total(self) -> KVStats:
        """Return the accounting over all backends."""
        merged = merge_stats(self.carried, self.last)
        merged.logical = len(self.tokens)
        return merged

    def _rename(self) -> None:
        self.backend_name = f"{self.name}~{next(_numbers)}"


def stats_from(document: dict[str, Any]) -> KVStats:
    """Return the accounting a backend sent."""
    events: Sequence[dict[str, int]] = document.pop("events")
    restarts: Sequence[Sequence[int]] = document.pop("restarts")
    return KVStats(
        **document,
        events=[KVEvent(**event) for event in events],
        restarts=[(before, tokens) for before, tokens in restarts],
    )
