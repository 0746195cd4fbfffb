"""Cursors on tool results, and the question which of them are expired (SideQuest, section 3)."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from agentbench_kv.gateway.messages import Message, text_of
from agentbench_kv.methods.dropping.sidequest import TRIGGER

_EXPLAINED = (
    "Every result of a tool begins with its cursor. Say briefly which results will not be needed "
    "any more to finish the task, then end with one JSON object that names their cursors, such as "
    '{"del_cursors": [0, 1]}; an empty list keeps all. Do not go on with the task.'
)
_OWN = re.compile(r'\s*\{\s*"cursor"\s*:\s*(\d+)\s*[,}]')
_ANSWER = re.compile(r'\{\s*"del_cursors"\s*:\s*(\[[^\[\]]*\])\s*\}')


def question(trained: bool) -> Message:
    """Return what asks for expired cursors; a model not trained for it is told what that is."""
    return {"role": "user", "content": TRIGGER if trained else f"{TRIGGER}\n{_EXPLAINED}"}


def with_cursors(messages: Sequence[Message]) -> list[Message]:
    """Return messages whose tool results begin with their cursor, the first one's being 0.

    A result that is a JSON object and begins with its own right `cursor` is left as it is.
    """
    shown: list[Message] = []
    results = 0
    for message in messages:
        if message.get("role") == "tool":
            text = text_of(message.get("content"))
            own = _OWN.match(text)
            if own is None or int(own[1]) != results:
                message = {**message, "content": f"[cursor {results}] {text}"}
            results += 1
        shown.append(message)
    return shown


def places_of_cursors(messages: Sequence[Message]) -> dict[int, int]:
    """Return the message of every cursor."""
    results = [n for n, message in enumerate(messages) if message.get("role") == "tool"]
    return dict(enumerate(results))


def named_cursors(answer: str) -> list[int] | None:
    """Return the cursors that an answer names last; None if it names none as it was asked to."""
    found = _ANSWER.findall(answer)
    if not found:
        return None
    try:
        cursors = json.loads(found[-1])
    except ValueError:
        return None
    if not all(type(cursor) is int for cursor in cursors):
        return None
    return list(dict.fromkeys(cursors))
