"""Agents whose score is known in advance, as raw assistant texts for the browsing loop."""

from __future__ import annotations

import json
from collections.abc import Sequence

from agentbench_kv.adapters.base import ScriptedAgent

NULL_ANSWER = "I would rather not."
_MOST = 200


def script(
    agent: ScriptedAgent, question: str, answer: str, pages: Sequence[str], turns: int
) -> list[str]:
    """Write what an agent says, one text a turn, with only the calls that fit into `turns`.

    `gold` searches, opens each of `pages` (URLs), looks the answer up and gives it; `corrupt` does
    the same and gives another answer; `null` answers nothing.
    """
    if agent == "null":
        return [NULL_ANSWER]
    calls = [_call("search", {"query": question[:_MOST]})]
    for page in pages:
        calls += [_call("open", {"id": page}), _call("find", {"pattern": answer[:_MOST]})]
    said = " ".join(answer.split())
    given = said if agent == "gold" else f"certainly not {said}"
    last = f"<think>\nThat is enough.\n</think>\n\nFinal answer: {given}"
    return [*calls[: turns - 1], last]


def _call(name: str, arguments: dict[str, str]) -> str:
    payload = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<think>\nI use {name}.\n</think>\n\n<tool_call>\n{payload}\n</tool_call>"
