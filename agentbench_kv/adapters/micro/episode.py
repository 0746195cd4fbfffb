"""An episode: user turns, the calls and replies that answer them, the facts they need.

`Environment` is the simulated depot: it executes calls, hands out requests, keeps what was right.
Its world is lenient and the judge strict: a tool that is called with a wrong handle answers as if
it were right, so that one slip does not change what all later requests ask for, but the handle
counts as wrong. A call of another tool than expected gets an error and ends the user turn.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from agentbench_kv.adapters.agent_client import call_text, think_block

TRIGGER = "** Memory management mode **"  # the user message that asks for SideQuest's turn
Source = Literal["think", "act", "tool", "others"]
# Whether a fact is needed again and again, once long after, made here from what was said before,
# made here from nothing (in training only), or stood just above.
Kind = Literal["recurring", "one_shot", "derived", "invented", "local"]


@dataclass(frozen=True)
class Slot:
    """One place in an assistant message where a handle has to be right."""

    where: str  # name of the argument, or "think" or "reply"
    handle: str  # as it must be written
    source: Source  # phase of the text in which the fact was first stated
    kind: Kind
    copied: bool = False  # the same message already said it: writing it again recalls nothing


@dataclass(frozen=True)
class ExpectedCall:
    """A tool call that the agent is expected to make, and what the tool answers."""

    think: str  # content of the think block before the call
    name: str
    arguments: dict[str, str]
    result: dict[str, str]  # without the cursor, which whoever executes the call adds
    slots: tuple[Slot, ...]  # every handle of the message, in the order of its text

    @property
    def raw(self) -> str:
        """Text of the assistant message, as the model should emit it."""
        return think_block(self.think) + call_text(self.name, self.arguments)

    def result_json(self, cursor: int) -> str:
        return json.dumps({"cursor": cursor, **self.result})

    @property
    def subject(self) -> str:
        """Name in the first field of the result, such as the item scanned."""
        handle = next(iter(self.result.values()))
        return handle.split("/")[0].split("+")[0]


@dataclass(frozen=True)
class ExpectedReply:
    """The message that ends a user turn."""

    think: str | None
    text: str
    slots: tuple[Slot, ...]

    @property
    def raw(self) -> str:
        return (think_block(self.think) if self.think is not None else "") + self.text


@dataclass(frozen=True)
class UserTurn:
    """One request, the expected calls in order and the expected last message."""

    text: str
    calls: tuple[ExpectedCall, ...]
    reply: ExpectedReply
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
    def calls(self) -> tuple[ExpectedCall, ...]:
        """All expected calls; the index of a call is the cursor of its result."""
        return tuple(call for turn in self.turns for call in turn.calls)


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
        expected = self._expected()
        cursor, self._cursor = self._cursor, self._cursor + 1
        if not isinstance(expected, ExpectedCall) or expected.name != name:
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
        if not isinstance(expected, ExpectedReply):
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

    def _expected(self) -> ExpectedCall | ExpectedReply:
        if self.done:
            raise RuntimeError("the session is over")
        calls = self._current.calls
        return calls[self._step] if self._step < len(calls) else self._current.reply

    def _fail_turn(self) -> None:
        """Count everything that the turn still asked for as wrong."""
        messages: list[ExpectedCall | ExpectedReply] = [*self._current.calls, self._current.reply]
        for message in messages[self._step :]:
            self.judged.extend(Judged(slot, right=False) for slot in _spoken(message))
            self.exact.append(False)
        self._next_turn()

    def _next_turn(self) -> None:
        self._turn, self._step = self._turn + 1, 0


def _spoken(message: ExpectedCall | ExpectedReply) -> list[Slot]:
    """Return the slots outside of the think block, whose text no environment sees."""
    return [slot for slot in message.slots if slot.where != "think"]


def last_uses(episode: Episode) -> list[list[tuple[int, int]]]:
    """Return for each user turn, and each result in it, the last message that needs the result.

    Messages are (user turn, number in it); one that needs a result says a handle from it, or makes
    one of the reading in the last result so far.
    """
    results: list[set[str]] = []  # the handles in each, in order
    last: list[tuple[int, int]] = []
    for turn, asked in enumerate(episode.turns):
        messages: list[ExpectedCall | ExpectedReply] = [*asked.calls, asked.reply]
        for number, message in enumerate(messages):
            for slot in message.slots:
                for result in _needed(slot, results):
                    last[result] = (turn, number)
            if isinstance(message, ExpectedCall):
                results.append({h for value in message.result.values() for h in value.split(",")})
                last.append((turn, number))
    ordered = iter(last)
    return [[next(ordered) for _ in asked.calls] for asked in episode.turns]


def _needed(slot: Slot, results: Sequence[Collection[str]]) -> list[int]:
    if slot.kind == "derived":
        return [len(results) - 1] if results else []
    return [number for number, handles in enumerate(results) if slot.handle in handles]


@dataclass(frozen=True)
class Cursor:
    """One tool result of a session, for SideQuest's auxiliary turn.

    At the end of a user turn that turn asks the agent to go over the results that are still open
    and to name those that can go. Only the login's result and the scans of items that have not
    been shipped are worth keeping.
    """

    number: int
    subject: str
    stale: bool  # nothing that follows can need it


def cursors(episode: Episode, turns: int) -> list[Cursor]:
    """List the results of an episode's first `turns` user turns."""
    calls = [call for turn in episode.turns[:turns] for call in turn.calls]
    shipped = {call.subject for call in calls if call.name == "ship"}

    def stale(call: ExpectedCall) -> bool:
        return call.name != "login" and (call.name != "scan" or call.subject in shipped)

    return [Cursor(number, call.subject, stale(call)) for number, call in enumerate(calls)]


def auxiliary_reply(listed: Collection[Cursor]) -> str:
    """Write the answer to the trigger over the results still in the cache, as the model should."""
    lines = [f"{c.number},{c.subject},{'done' if c.stale else 'keep'}\n" for c in listed]
    stale = [cursor.number for cursor in listed if cursor.stale]
    return f'<think>\n{"".join(lines)}</think>\n\n{{"del_cursors": {stale}}}'
