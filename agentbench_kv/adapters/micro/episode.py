"""What an episode is: user turns, the calls and replies that answer them, the facts they need.

The simulated depot: executes calls, hands out requests, keeps what was right.

The world is lenient and the judge strict: a tool that is called with a wrong handle answers as if
it were right, so that one slip does not change what all later requests ask for, but the handle
counts as wrong. A call of another tool than expected gets an error and ends the user turn.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
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


@dataclass(frozen=True)
class Judged:
    """A handle that was asked for, and whether the agent wrote exactly that."""

    slot: Slot
    right: bool


@dataclass(frozen=True)
class Observation:
    """What the environment answers to an assistant message."""

    text: str  # the tool's JSON or, after a reply, the next request; empty when the session is over
    exact: bool  # whether the message was exactly right
    turn_over: bool  # after a reply, or after an error that cannot be mended


@dataclass
class Environment:
    """One session with an agent."""

    episode: Episode
    judged: list[Judged] = field(default_factory=list)
    exact: list[bool] = field(default_factory=list)  # per expected message
    _turn: int = 0
    _step: int = 0
    _cursor: int = 0

    @property
    def request(self) -> str | None:
        """The user's current message, None when the session is over."""
        return None if self.done else self._current.text

    @property
    def done(self) -> bool:
        return self._turn >= len(self.episode.turns)

    @property
    def _current(self) -> UserTurn:
        return self.episode.turns[self._turn]

    def call(self, name: str, arguments: Mapping[str, Any]) -> Observation:
        """Execute a tool call."""
        expected = self._expected()
        cursor, self._cursor = self._cursor, self._cursor + 1
        if not isinstance(expected, Call) or expected.name != name:
            self._fail_turn()
            error = json.dumps({"cursor": cursor, "error": f"{name} cannot be called now"})
            return Observation(error, exact=False, turn_over=True)
        for slot in _spoken(expected):
            self.judged.append(Judged(slot, arguments.get(slot.where) == slot.handle))
        exact = dict(arguments) == expected.arguments
        self.exact.append(exact)
        self._step += 1
        return Observation(expected.result_json(cursor), exact, turn_over=False)

    def reply(self, text: str) -> Observation:
        """Take the last message of a user turn, thoughts removed, and hand out the next request."""
        expected = self._expected()
        if not isinstance(expected, Reply):
            return self.abandon()
        exact = text.strip() == expected.text
        self.judged.extend(Judged(slot, slot.handle in text) for slot in _spoken(expected))
        self.exact.append(exact)
        self._next_turn()
        return Observation(self.request or "", exact, turn_over=True)

    def abandon(self) -> Observation:
        """End the user turn without a usable message, such as one cut off or unreadable."""
        self._fail_turn()
        return Observation(self.request or "", exact=False, turn_over=True)

    def _expected(self) -> Call | Reply:
        if self.done:
            raise RuntimeError("the session is over")
        calls = self._current.calls
        return calls[self._step] if self._step < len(calls) else self._current.reply

    def _fail_turn(self) -> None:
        """Count everything that the turn still asked for as wrong."""
        messages: list[Call | Reply] = [*self._current.calls, self._current.reply]
        for message in messages[self._step :]:
            self.judged.extend(Judged(slot, right=False) for slot in _spoken(message))
            self.exact.append(False)
        self._next_turn()

    def _next_turn(self) -> None:
        self._turn, self._step = self._turn + 1, 0


def _spoken(message: Call | Reply) -> list[Slot]:
    """Return the slots outside of the think block, whose text no environment sees."""
    return [slot for slot in message.slots if slot.where != "think"]
