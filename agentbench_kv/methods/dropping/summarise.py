"""Summarising what was said, as coding agents do when their context fills up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from agentbench_kv.errors import UsageError
from agentbench_kv.methods.dropping.policy import Drop, DropMethod, History, Role, What
from agentbench_kv.params import param


@dataclass(frozen=True, kw_only=True)
class Summarise(DropMethod):
    """Above the trigger, the model summarises all but the last messages; that takes their place.

    A kept result of a tool keeps the message that called, too.
    """

    name: ClassVar[str] = "summarise"
    summary: ClassVar[str] = "the model's own summary takes the place of all but the last messages"
    source: ClassVar[str] = "practice"
    asks: ClassVar[bool] = True

    keep_messages: int = param(4, "last messages that stay as they are", low=1)
    summary_tokens: int = param(512, "most tokens of a summary", low=1)

    def validate(self) -> None:
        super().validate()
        if self.exec != "text":
            raise UsageError(f"exec={self.exec}: a summary is text, so summarise takes exec=text")

    def decide(self, history: History) -> frozenset[Drop]:
        if not self.due(history):
            return frozenset()
        parts = history.parts
        cut = max(0, len(parts) - self.keep_messages)
        while cut and parts[cut].role is Role.TOOL:
            cut -= 1
        old = [n for n in range(cut) if parts[n].role is not Role.SYSTEM]
        left = [n for n in old if parts[n].may_go(What.MESSAGE)]
        # One message alone is no shorter as a summary.
        return frozenset(Drop(n, What.MESSAGE) for n in left) if len(left) > 1 else frozenset()
