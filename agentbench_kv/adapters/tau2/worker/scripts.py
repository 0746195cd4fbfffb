"""Agents whose score is known in advance, written out as raw assistant texts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

NULL_SENTENCE = "I am sorry, I cannot help with this."


def script(agent: str, actions: Sequence[Any], communicate: Sequence[str]) -> list[str]:
    """Write the texts that `agent` says, one per answer.

    `gold` plays the golden actions and says what the user has to be told (`communicate`),
    `corrupt` leaves out the last action, `null` says one sentence and calls nothing.
    """
    if agent == "null":
        return [NULL_SENTENCE]
    kept = actions[:-1] if agent == "corrupt" else actions
    return [*map(_say, kept), " ".join(["All done.", *communicate])]


def _say(action: Any) -> str:
    thought = f"<think>\nThe next step is {action.name}.\n</think>\n\n"
    if action.requestor == "user":
        return f"{thought}Please perform {action.name}."
    fields = {"name": action.name, "arguments": action.arguments}
    # Unescaped, as a model writes it.
    payload = json.dumps(fields, ensure_ascii=False)
    return f"{thought}<tool_call>\n{payload}\n</tool_call>"
