"""SideQuest's auxiliary turn: which tool results will never be needed again, and saying so.

At the end of a user turn a message is appended, and the agent answers by going over the results
that are still open and naming those that can go. Only the login's result and the scans of items
that have not been shipped are worth keeping.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from agentbench_kv.adapters.micro.episode import Call, Episode, UserTurn

__all__ = ["TRIGGER", "Cursor", "auxiliary_reply", "cursors"]

TRIGGER = "** Memory management mode **"
"""The user message that asks for it."""


@dataclass(frozen=True)
class Cursor:
    """One tool result of a session.

    Parameters
    ----------
    number : int
        The cursor of the result.
    subject : str
        Name in its first field, such as the item scanned.
    stale : bool
        Whether nothing that follows can need it.
    """

    number: int
    subject: str
    stale: bool


def cursors(episode: Episode, turns: int) -> list[Cursor]:
    """List the results of an episode's first user turns.

    Parameters
    ----------
    episode : Episode
        The session.
    turns : int
        How many user turns are over.
    """
    over = episode.turns[:turns]
    shipped = {turn.subject for turn in over if _ships(turn)}
    calls = [call for turn in over for call in turn.calls]
    return [_cursor(number, call, shipped) for number, call in enumerate(calls)]


def auxiliary_reply(listed: Collection[Cursor]) -> str:
    """Write the answer to the trigger, as the model should emit it.

    Parameters
    ----------
    listed : collection of Cursor
        The results that are still in the cache.
    """
    lines = (
        f"{cursor.number},{cursor.subject},{'done' if cursor.stale else 'keep'}\n"
        for cursor in listed
    )
    stale = [cursor.number for cursor in listed if cursor.stale]
    return f'<think>\n{"".join(lines)}</think>\n\n{{"del_cursors": {stale}}}'


def _ships(turn: UserTurn) -> bool:
    return any(call.name == "ship" for call in turn.calls)


def _cursor(number: int, call: Call, shipped: set[str]) -> Cursor:
    handle = next(iter(call.result.values()))
    subject = handle.split("/")[0].split("+")[0]
    needed = call.name == "login" or (call.name == "scan" and subject not in shipped)
    return Cursor(number, subject, not needed)
