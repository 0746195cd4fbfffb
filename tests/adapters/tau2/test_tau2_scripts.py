"""What the known agents say."""

from __future__ import annotations

import json
from types import SimpleNamespace

from agentbench_kv.adapters.agent_client import NULL_SENTENCE
from agentbench_kv.adapters.tau2.worker.main import script

CALL = SimpleNamespace(requestor="assistant", name="move", arguments={"to": "Zürich"})
ASK = SimpleNamespace(requestor="user", name="toggle_data", arguments={})


def test_gold_calls_asks_and_tells() -> None:
    call, ask, end = script("gold", [CALL, ASK], ["42", "blue"])
    payload = call.partition("<tool_call>")[2].partition("</tool_call>")[0]
    assert json.loads(payload) == {"name": "move", "arguments": {"to": "Zürich"}}
    assert "Zürich" in payload
    assert ask.endswith("</think>\n\nPlease perform toggle_data.")
    assert "42" in end
    assert "blue" in end


def test_corrupt_leaves_out_the_last_action() -> None:
    gold = script("gold", [CALL, ASK], ["42"])
    assert script("corrupt", [CALL, ASK], ["42"]) == [gold[0], gold[2]]
    assert script("corrupt", [], []) == script("gold", [], [])


def test_null_does_nothing() -> None:
    assert script("null", [CALL, ASK], ["42"]) == [NULL_SENTENCE]
