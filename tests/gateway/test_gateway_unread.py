"""Calls in another syntax than the one that is read: found, counted, said."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from gateway_calls import CALLS, TOOLS, read

from agentbench_kv.engines.scripted import ScriptedEngine
from agentbench_kv.gateway import Gateway
from agentbench_kv.gateway.http import BackgroundServer
from agentbench_kv.gateway.readers import unread_syntax
from agentbench_kv.methods.agentkv import AgentKV
from agentbench_kv.methods.base import Method
from agentbench_kv.methods.snapkv import SnapKV
from agentbench_kv.phases.machine import PLAIN
from agentbench_kv.phases.syntax import SYNTAXES
from agentbench_kv.run.runner import warn_without_phases

USER = {"role": "user", "content": "q"}
JSON = CALLS["json"]


def unread(text: str, syntax: str, *, thinking: bool = False) -> str:
    return unread_syntax(text, SYNTAXES[syntax], thinking=thinking, tools=TOOLS)


@pytest.mark.parametrize("syntax", SYNTAXES)
def test_a_call_is_read_or_found_in_its_own_syntax(syntax: str) -> None:
    for written, text in CALLS.items():
        called = read(syntax, text).tool_calls if syntax != "none" else []
        found = written if called else unread(text, syntax)
        assert found == written, text
        assert bool(called) == (written == syntax), text


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('Let me see.\n{"name": "f", "arguments": {"x": 1}}\nDone.', "json"),
        ('```\n{"name": "f", "parameters": {}}\n```', "json"),
        ("I would call f with x=1.", ""),
        ('{"name": "g", "arguments": {}}', ""),  # nobody offered g
        ('<think>{"name": "f", "arguments": {}}</think>I had better not.', ""),
    ],
)
def test_what_is_a_call_and_what_only_names_a_tool(text: str, found: str) -> None:
    assert unread(text, "hermes") == found


def test_a_thought_that_the_prompt_began_calls_nothing() -> None:
    assert unread(f"{JSON}</think>No.", "hermes", thinking=True) == ""
    assert unread(f"Hm.</think>{JSON}", "hermes", thinking=True) == "json"


def test_a_session_reports_it_and_the_log_says_it_once(
    gateway_of: Callable[..., Gateway], caplog: pytest.LogCaptureFixture
) -> None:
    gateway = gateway_of(JSON, "Fine.", CALLS["hermes"], JSON)
    gateway.on_turn = lambda *_: None  # as a server has it
    history = [USER]
    with caplog.at_level(logging.WARNING):
        for _ in range(4):
            said = gateway.chat("s", history, TOOLS)
            results = [
                {"role": "tool", "tool_call_id": c["id"], "content": "7"} for c in said.tool_calls
            ]
            history += [said.message, *(results or [USER])]
    turns = gateway.close_report("s").turns
    assert [turn.unread_syntax for turn in turns] == ["json", "", "", "json"]
    (line,) = caplog.messages
    assert "as json and is read as hermes" in line
    assert "unread_syntax" not in turns[0].record()


def test_a_completion_with_tools_is_read_as_the_model_writes(
    engine_of: Callable[..., ScriptedEngine],
) -> None:
    text = "<think>\nhm\n</think>\n\n" + CALLS["hermes"]
    body = {"model": "gold", "prompt": "Q", "tools": TOOLS}
    with (
        BackgroundServer(Gateway(engine_of(text, "<tool_call>{oops</tool_call>", JSON))) as server,
        httpx.Client(base_url=server.url, headers={"X-KVBench-Session": "s"}) as client,
    ):

        def ask(**more: Any) -> dict[str, Any]:
            answer: dict[str, Any] = client.post("/completions", json={**body, **more}).json()
            return answer

        answer = ask()
        (choice,) = answer["choices"]
        assert choice["text"] == text
        assert choice["message"]["reasoning_content"] == "hm"
        assert choice["message"]["tool_calls"][0]["function"]["name"] == "f"
        prompt = f"Q{text}<|im_end|>"
        broken = ask(prompt=prompt)
        assert broken["usage"]["kvbench"]["unparsable"] is True
        assert not broken["usage"]["kvbench"]["session_resets"]
        unread = ask(prompt=prompt + broken["choices"][0]["text"] + "<|im_end|>")
        assert unread["usage"]["kvbench"]["unread_syntax"] == "json"
        assert unread["choices"][0]["message"] == {"role": "assistant", "content": JSON}
        assert ask(stream=True)["error"]["param"] == "stream"
        plain = client.post("/completions", json={"model": "gold", "prompt": "Q"}).json()
        assert "message" not in plain["choices"][0]


class _Gateway:
    def __init__(self, family: str) -> None:
        self.family = family

    def provenance(self) -> dict[str, Any]:
        return {"phase_family": self.family}


@pytest.mark.parametrize(
    ("method", "family", "said"),
    [
        (AgentKV.create("", 64), PLAIN.name, True),
        (AgentKV.create("", 64), "chatml", False),
        (SnapKV.create("", 64), PLAIN.name, False),
    ],
)
def test_a_method_that_goes_by_phases_is_told_that_there_are_none(
    method: Method, family: str, said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    gateway: Any = _Gateway(family)
    warn_without_phases(method, gateway)
    assert ["phase_family: plain" in line for line in caplog.messages] == [True] * said
