"""Clearing the tool results that a session really needs no more: what a perfect policy could do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from agentbench_kv.methods.dropping.policy import Drop, DropMethod, History, What, saved
from agentbench_kv.params import param


@dataclass(frozen=True, kw_only=True)
class OracleTools(DropMethod):
    """Above the trigger, results leave that no later golden call or answer refers to, oldest first.

    Somebody must know them beforehand: the task, of what its golden agent does. A result that is
    still needed never leaves, so a session may stay above the trigger.
    """

    name: ClassVar[str] = "oracle-tools"
    summary: ClassVar[str] = "tool results leave that nothing needs any more (a control)"
    source: ClassVar[str] = "baseline"
    foresees: ClassVar[bool] = True

    until: str = param(
        "enough",
        "what leaves at once: enough to come below the trigger, or all that is not needed",
        choices=("enough", "all"),
    )

    def decide(self, history: History) -> frozenset[Drop]:
        drops: set[Drop] = set()
        if not self.due(history):
            return frozenset()
        for number, part in enumerate(history.parts):
            enough = saved(history, drops) >= history.tokens - self.limit(history)
            if self.until == "enough" and enough:
                break
            if part.expired and part.left(What.RESULT):
                drops.add(Drop(number, What.RESULT))
        return frozenset(drops)
