"""What the micro task puts behind an assistant's calls."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from agentbench_kv.adapters.micro.episode import Environment
from agentbench_kv.adapters.micro.generate import PROFILES, generate
from agentbench_kv.adapters.micro.task import _act


def reply(*calls: tuple[str, Any], reason: str = "tool_calls", unparsable: bool = False) -> Any:
    made = [
        {"id": f"c{n}", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for n, (name, arguments) in enumerate(calls)
    ]
    return SimpleNamespace(tool_calls=made, finish_reason=reason, unparsable=unparsable, content="")


@pytest.mark.parametrize(
    ("reason", "unparsable"), [("tool_calls", False), ("length", False), ("tool_calls", True)]
)
def test_every_call_has_its_result_where_a_turn_ends_early(reason: str, unparsable: bool) -> None:
    """An endpoint refuses a history with calls that nobody answered."""
    environment, messages = Environment(generate(0, PROFILES["recall-1k"])), list[Any]()
    said = reply(("nosuch", {}), ("login", {}), reason=reason, unparsable=unparsable)
    before = environment.request
    assert _act(environment, said, messages)
    assert [message["tool_call_id"] for message in messages] == ["c0", "c1"]
    assert "not executed" in messages[1]["content"]
    assert ("not executed" in messages[0]["content"]) == (reason == "length" or unparsable)
    assert environment.request != before
