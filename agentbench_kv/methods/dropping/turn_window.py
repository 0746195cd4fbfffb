"""Cutting the oldest turns, as chat applications do."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from agentbench_kv.methods.dropping.policy import Drop, DropMethod, History, Role, What, saved


@dataclass(frozen=True, kw_only=True)
class TurnWindow(DropMethod):
    """Above the trigger, whole oldest turns leave until the session is at or below it.

    A turn is a user's message with all that follows it. System prompt, first turn and the turn
    under way stay.
    """

    name: ClassVar[str] = "turn-window"
    summary: ClassVar[str] = "the oldest turns leave, system prompt and first turn stay"
    source: ClassVar[str] = "practice"

    def decide(self, history: History) -> frozenset[Drop]:
        drops: set[Drop] = set()
        if not self.due(history):
            return frozenset()
        users = [n for n, part in enumerate(history.parts) if part.role is Role.USER]
        for begin, end in pairwise(users[1:]):
            if saved(history, drops) >= history.tokens - self.limit(history):
                break
            if not any(history.parts[n].fixed for n in range(begin, end)):
                drops |= {Drop(n, What.MESSAGE) for n in range(begin, end)}
        return frozenset(d for d in drops if history.parts[d.message].may_go(d.what))
