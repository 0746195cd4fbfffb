"""SideQuest's auxiliary turn: which tool results will never be needed again, and saying so.

At the end of a user turn a message is appended, and the agent answers by going over the results
that are still open and naming those that can go. Only the login's result and the scans of items
that have not been shipped are worth keeping.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from agentbench_kv.adapters.micro.episode import Call, Episode

TRIGGER = "** Memory management mode **"
"""The user message that asks for it."""


@dataclass(frozen=True)
class Cursor:
    """One tool result of a session."""

    number: int
    subject: str  # name in its first field, such as the item scanned
    stale: bool  # nothing that follows can need it


def cursors(episode: Episode, turns: int) -> list[Cursor]:
    """List the results of an episode's first `turns` user turns."""
    calls = [call for turn in episode.turns[:turns] for call in turn.calls]
    shipped = {_subject(call) for call in calls if call.name == "ship"}

    def stale(call: Call) -> bool:
        return call.name != "login" and (call.name != "scan" or _subject(call) in shipped)

    return [Cursor(number, _subject(call), stale(call)) for number, call in enumerate(calls)]


def auxiliary_reply(listed: Collection[Cursor]) -> str:
    """Write the answer to the trigger over the results still in the cache, as the model should."""
    lines = (
        f"{cursor.number},{cursor.subject},{'done' if cursor.stale else 'keep'}\n"
        for cursor in listed
    )
    stale = [cursor.number for cursor in listed if cursor.stale]
    return f'<think>\n{"".join(lines)}</think>\n\n{{"del_cursors": {stale}}}'


def _subject(call: Call) -> str:
    handle = next(iter(call.result.values()))
    return handle.split("/")[0].split("+")[0]
