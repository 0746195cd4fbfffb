"""Clearing old tool results, as agents in practice do."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from agentbench_kv.methods.dropping.policy import Drop, DropMethod, History, Role, What, saved
from agentbench_kv.params import param


@dataclass(frozen=True, kw_only=True)
class ClearTools(DropMethod):
    """Above the trigger, the oldest tool results leave; those of the last `keep` uses stay.

    `@anthropic` is the Claude API's `clear_tool_uses_20250919` with its defaults, `@inspect` is
    inspect_ai's `CompactionEdit` with its own. `@budget` clears no more than it takes to come
    below the budget.
    """

    name: ClassVar[str] = "clear-tools"
    summary: ClassVar[str] = "old tool results leave, the last uses stay"
    source: ClassVar[str] = "Claude API context editing; inspect_ai CompactionEdit"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "budget": {},
        "anthropic": {"trigger": "100000", "until": "all"},
        "inspect": {"trigger": "context", "until": "all", "keep_thoughts": 1},
    }
    default_preset: ClassVar[str] = "budget"

    keep: int = param(3, "last tool uses whose results stay", low=0)
    until: str = param(
        "enough",
        "what leaves at once: enough to come below the trigger, or all but the kept",
        choices=("enough", "all"),
    )
    clear_at_least: int = param(0, "fewer tokens than this are not worth a rewrite", low=0)
    exclude: str = param("", "tools whose results always stay, by name, separated by commas")
    clear_inputs: str = param(
        "off", "whether the arguments of the calls leave, too", choices=("off", "on")
    )
    keep_thoughts: int = param(0, "last answers whose thoughts stay; 0: those of all", low=0)

    def decide(self, history: History) -> frozenset[Drop]:
        if not self.due(history):
            return frozenset()
        chosen = set(self._old_thoughts(history))
        too_many = history.tokens - self.limit(history)
        for use in self._old_uses(history):
            if self.until == "enough" and saved(history, chosen) >= self._least(too_many):
                break
            chosen |= self._cleared(history, use)
        drops = {drop for drop in chosen if history.parts[drop.message].may_go(drop.what)}
        return frozenset(drops) if saved(history, drops) >= max(1, self.clear_at_least) else NONE

    def _least(self, too_many: int) -> int:
        return max(too_many, self.clear_at_least)

    def _old_uses(self, history: History) -> list[int]:
        """Return the messages with results of uses that are not among the last, oldest first."""
        excluded = {name.strip() for name in self.exclude.split(",")}
        uses = [
            number
            for number, part in enumerate(history.parts)
            if part.role is Role.TOOL and excluded.isdisjoint(part.tools)
        ]
        return uses[: max(0, len(uses) - self.keep)]

    def _old_thoughts(self, history: History) -> list[Drop]:
        answers = [n for n, part in enumerate(history.parts) if part.role is Role.ASSISTANT]
        old = answers[: -self.keep_thoughts] if self.keep_thoughts else []
        return [Drop(number, What.THOUGHTS) for number in old]

    def _cleared(self, history: History, use: int) -> set[Drop]:
        """Return the drops of one use; arguments leave with the last result of their message."""
        drops = {Drop(use, What.RESULT)}
        if self.clear_inputs == "on":
            caller = max((n for n in range(use) if _calls(history, n)), default=None)
            behind = use + 1
            last = behind == len(history.parts) or history.parts[behind].role is not Role.TOOL
            if caller is not None and last:
                drops.add(Drop(caller, What.INPUTS))
        return drops


NONE: frozenset[Drop] = frozenset()


def _calls(history: History, number: int) -> bool:
    part = history.parts[number]
    return part.role is Role.ASSISTANT and part.inputs > 0


@dataclass(frozen=True, kw_only=True)
class RandomTools(ClearTools):
    """The control of `clear-tools`: as many results leave, but any of the old ones.

    They may be shorter, so that the session stays above its trigger.
    """

    name: ClassVar[str] = "random-tools"
    summary: ClassVar[str] = "random old tool results leave (a control)"
    source: ClassVar[str] = "baseline"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"budget": {}}

    def decide(self, history: History) -> frozenset[Drop]:
        cleared = super().decide(history)
        results = sum(drop.what is What.RESULT for drop in cleared)
        old = [use for use in self._old_uses(history) if history.parts[use].may_go(What.RESULT)]

        def lot(use: int) -> bytes:
            return hashlib.sha256(f"{history.key}/{use}".encode()).digest()

        drawn = {drop for drop in cleared if drop.what is What.THOUGHTS}
        for use in sorted(old, key=lot)[:results]:
            drawn |= self._cleared(history, use)
        return frozenset(drop for drop in drawn if history.parts[drop.message].may_go(drop.what))
