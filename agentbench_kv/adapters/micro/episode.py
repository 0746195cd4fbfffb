"""What an episode is: user turns, the calls and replies that answer them, the facts they need."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["Call", "Episode", "Kind", "Reply", "Slot", "Source", "UserTurn"]

Source = Literal["think", "act", "tool", "others"]
"""Phase of the text in which a fact was first stated."""

Kind = Literal["recurring", "one_shot", "derived", "invented", "local"]
"""Whether a fact is needed again and again, once long after, made here from what was said before,
made here from nothing (in training only), or stood just above."""


@dataclass(frozen=True)
class Slot:
    """One place in an assistant message where a handle has to be right.

    Parameters
    ----------
    where : str
        Name of the argument, or "think" or "reply".
    handle : str
        The handle as it must be written.
    source : Source
        Phase of the text that stated it first.
    kind : Kind
        What recalling it takes.
    copied : bool
        Whether the same message already said it, so that writing it again recalls nothing.
    """

    where: str
    handle: str
    source: Source
    kind: Kind
    copied: bool = False


@dataclass(frozen=True)
class Call:
    """A tool call that the agent is expected to make, and what the tool answers.

    Parameters
    ----------
    think : str
        Content of the think block before the call.
    name : str
        The tool.
    arguments : dict of str to str
        The exact arguments.
    result : dict of str to str
        Fields of the tool's answer; its cursor is added by whoever executes the call.
    slots : tuple of Slot
        Every handle of the message, in the order of its text.
    """

    think: str
    name: str
    arguments: dict[str, str]
    result: dict[str, str]
    slots: tuple[Slot, ...]

    @property
    def raw(self) -> str:
        """Text of the assistant message, as the model should emit it."""
        call = {"name": self.name, "arguments": self.arguments}
        return f"{_think_block(self.think)}<tool_call>\n{json.dumps(call)}\n</tool_call>"

    def result_json(self, cursor: int) -> str:
        """Render the tool's answer under a cursor number."""
        return json.dumps({"cursor": cursor, **self.result})


@dataclass(frozen=True)
class Reply:
    """The message that ends a user turn.

    Parameters
    ----------
    think : str or None
        Content of its think block, if it has one.
    text : str
        What the user reads.
    slots : tuple of Slot
        Every handle of the message, in the order of its text.
    """

    think: str | None
    text: str
    slots: tuple[Slot, ...]

    @property
    def raw(self) -> str:
        """Text of the assistant message, as the model should emit it."""
        return (_think_block(self.think) if self.think is not None else "") + self.text


@dataclass(frozen=True)
class UserTurn:
    """One request and everything the agent should do about it.

    Parameters
    ----------
    text : str
        The user's message.
    calls : tuple of Call
        Expected calls in order.
    reply : Reply
        Expected last message.
    subject : str
        The item it is about, empty if none.
    """

    text: str
    calls: tuple[Call, ...]
    reply: Reply
    subject: str = ""


@dataclass(frozen=True)
class Episode:
    """One session.

    Parameters
    ----------
    seed : int
        The seed it was generated from.
    profile : str
        Name of its profile.
    system : str
        The system prompt without the tools.
    tools : list of dict
        OpenAI function schemas.
    turns : tuple of UserTurn
        The requests.
    """

    seed: int
    profile: str
    system: str
    tools: list[dict[str, Any]]
    turns: tuple[UserTurn, ...]

    @property
    def calls(self) -> tuple[Call, ...]:
        """All expected calls; the index of a call is the cursor of its result."""
        return tuple(call for turn in self.turns for call in turn.calls)


def _think_block(text: str) -> str:
    return f"<think>\n{text}\n</think>\n\n"
