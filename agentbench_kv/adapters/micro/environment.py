"""The simulated depot: executes calls, hands out requests, keeps what was right.

The world is lenient and the judge strict: a tool that is called with a wrong handle answers as if
it were right, so that one slip does not change what all later requests ask for, but the handle
counts as wrong. A call of another tool than expected gets an error and ends the user turn.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agentbench_kv.adapters.micro.episode import Call, Episode, Reply, Slot, UserTurn

__all__ = ["Environment", "Judged", "Observation"]


@dataclass(frozen=True)
class Judged:
    """One handle that was asked for.

    Parameters
    ----------
    slot : Slot
        What was asked.
    right : bool
        Whether the agent wrote exactly that.
    """

    slot: Slot
    right: bool


@dataclass(frozen=True)
class Observation:
    """What the environment answers.

    Parameters
    ----------
    text : str
        The tool's JSON or, after a reply, the next request; empty when the session is over.
    exact : bool
        Whether the message was exactly right.
    turn_over : bool
        Whether the user turn ended: after a reply, or after an error that cannot be mended.
    """

    text: str
    exact: bool
    turn_over: bool


@dataclass
class Environment:
    """One session with an agent.

    Parameters
    ----------
    episode : Episode
        What is asked, expected and answered.
    """

    episode: Episode
    judged: list[Judged] = field(default_factory=list)
    exact: list[bool] = field(default_factory=list)
    _turn: int = 0
    _step: int = 0
    _cursor: int = 0

    @property
    def request(self) -> str | None:
        """The user's current message, None when the session is over."""
        return None if self.done else self._current.text

    @property
    def done(self) -> bool:
        """Whether all user turns are over."""
        return self._turn >= len(self.episode.turns)

    @property
    def _current(self) -> UserTurn:
        return self.episode.turns[self._turn]

    def call(self, name: str, arguments: Mapping[str, Any]) -> Observation:
        """Execute a tool call.

        Parameters
        ----------
        name : str
            The tool the agent named.
        arguments : mapping
            The arguments it gave.
        """
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
        """Take the agent's last message of a user turn and hand out the next request.

        Parameters
        ----------
        text : str
            The message without its thoughts.
        """
        expected = self._expected()
        exact = isinstance(expected, Reply) and text.strip() == expected.text
        if isinstance(expected, Reply):
            said = [Judged(slot, slot.handle in text) for slot in _spoken(expected)]
            self.judged.extend(said)
            self.exact.append(exact)
            self._next_turn()
        else:
            self._fail_turn()
        return Observation(self.request or "", exact, turn_over=True)

    def abandon(self) -> Observation:
        """End the user turn without a usable message, such as one cut off or unreadable."""
        self._fail_turn()
        return Observation(self.request or "", exact=False, turn_over=True)

    def _expected(self) -> Call | Reply:
        """Return the message that should come now."""
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
