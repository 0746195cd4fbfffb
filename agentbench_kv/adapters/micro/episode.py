"""What an episode is: user turns, the calls and replies that answer them, the facts they need."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

Source = Literal["think", "act", "tool", "others"]
"""Phase of the text in which a fact was first stated."""

Kind = Literal["recurring", "one_shot", "derived", "invented", "local"]
"""Whether a fact is needed again and again, once long after, made here from what was said before,
made here from nothing (in training only), or stood just above."""


@dataclass(frozen=True)
class Slot:
    """One place in an assistant message where a handle has to be right."""

    where: str  # name of the argument, or "think" or "reply"
    handle: str  # as it must be written
    source: Source
    kind: Kind
    copied: bool = False  # the same message already said it: writing it again recalls nothing


@dataclass(frozen=True)
class Call:
    """A tool call that the agent is expected to make, and what the tool answers."""

    think: str  # content of the think block before the call
    name: str
    arguments: dict[str, str]
    result: dict[str, str]  # without the cursor, which whoever executes the call adds
    slots: tuple[Slot, ...]  # every handle of the message, in the order of its text

    @property
    def raw(self) -> str:
        """Text of the assistant message, as the model should emit it."""
        call = {"name": self.name, "arguments": self.arguments}
        return f"{_think_block(self.think)}<tool_call>\n{json.dumps(call)}\n</tool_call>"

    def result_json(self, cursor: int) -> str:
        return json.dumps({"cursor": cursor, **self.result})


@dataclass(frozen=True)
class Reply:
    """The message that ends a user turn."""

    think: str | None
    text: str
    slots: tuple[Slot, ...]  # every handle of the message, in the order of its text

    @property
    def raw(self) -> str:
        """Text of the assistant message, as the model should emit it."""
        return (_think_block(self.think) if self.think is not None else "") + self.text


@dataclass(frozen=True)
class UserTurn:
    """One request, the expected calls in order and the expected last message."""

    text: str
    calls: tuple[Call, ...]
    reply: Reply
    subject: str = ""  # the item it is about


@dataclass(frozen=True)
class Episode:
    """One session: the system prompt without the tools, their schemas, and the requests."""

    seed: int
    profile: str
    system: str
    tools: list[dict[str, Any]]  # OpenAI function schemas
    turns: tuple[UserTurn, ...]

    @property
    def calls(self) -> tuple[Call, ...]:
        """All expected calls; the index of a call is the cursor of its result."""
        return tuple(call for turn in self.turns for call in turn.calls)


def _think_block(text: str) -> str:
    return f"<think>\n{text}\n</think>\n\n"
