"""Answers that are given, forks of sessions, and where texts stand in them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentbench_kv.adapters.base import SteeredClient
from agentbench_kv.engines.base import Capability, EngineOptions
from agentbench_kv.engines.embedded.engine import EmbeddedEngine
from agentbench_kv.errors import UsageError
from agentbench_kv.gateway import Gateway
from agentbench_kv.gateway.client import InProcessClient
from agentbench_kv.gateway.exchange import Options
from agentbench_kv.gateway.messages import ChatTemplate
from agentbench_kv.gateway.session import UnknownSessionError
from agentbench_kv.phases.syntax import SYNTAXES
from agentbench_kv.registry import make_method

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look something up.",
            "parameters": {"type": "object", "properties": {"key": {"type": "string"}}},
        },
    }
]
CALL = {"id": "x1", "type": "function", "function": {"name": "look", "arguments": '{"key": "#7"}'}}
ASKED: list[dict[str, Any]] = [
    {"role": "system", "content": "You help."},
    {"role": "user", "content": "What is #7?"},
]
SAID = {
    "role": "assistant",
    "content": "",
    "reasoning_content": "The next step needs look.",
    "tool_calls": [CALL],
}
RESULT = {"role": "tool", "tool_call_id": "x1", "content": json.dumps({"price": 561.05})}
OPTIONS = Options(max_tokens=12)


@pytest.fixture(scope="module")
def gateway() -> Any:
    method = make_method("agentkv", 64, {"interval": "16"})
    engine = EmbeddedEngine.create(EngineOptions("micro", method, device="cpu"))
    yield Gateway(engine)
    engine.shutdown()


def test_a_given_answer_is_as_one_that_was_written(gateway: Gateway) -> None:
    first = gateway.chat("free", ASKED, TOOLS, OPTIONS)
    later = {"role": "user", "content": "And then?"}
    wanted = gateway.chat("free", [*ASKED, first.message, later], TOOLS, OPTIONS)
    tokens, phases = gateway.token_log("free")
    # The same tokens again, though no message says them: `length` had cut the answer off.
    ids = first.token_ids
    gateway.written = lambda _: list(ids)  # type: ignore[method-assign]
    try:
        forced = gateway.force("forced", ASKED, first.message, TOOLS)
    finally:
        del gateway.written
    assert forced.token_ids == ids
    found = gateway.chat("forced", [*ASKED, first.message, later], TOOLS, OPTIONS)
    assert found.token_ids == wanted.token_ids
    assert gateway.token_log("forced") == (tokens, phases)
    assert gateway.stats("forced").events == gateway.stats("free").events
    assert (forced.turn.ttft_ms, forced.turn.tpot_ms) == (None, None)
    for name in ("free", "forced"):
        assert gateway.close_report(name).resets == 0


def test_a_given_call_is_written_as_the_model_writes_calls(gateway: Gateway) -> None:
    found = gateway.force("s", ASKED, SAID, TOOLS)
    assert found.reasoning == SAID["reasoning_content"]
    assert [call["function"]["name"] for call in found.tool_calls] == ["look"]
    assert json.loads(found.tool_calls[0]["function"]["arguments"]) == {"key": "#7"}
    assert found.finish_reason == "tool_calls"
    assert found.turn.phases["act"] > 0
    assert found.turn.phases["think"] > 0
    history = [*ASKED, SAID, RESULT]
    gateway.force("s", history, {"role": "assistant", "content": "561.05"}, TOOLS)
    (places,) = gateway.places("s", ["561.05"])
    tokens, _ = gateway.token_log("s")
    assert len(places) == 2
    for place in places:
        assert gateway.codec.decode(tokens[place : place + 10]).lstrip().startswith("561.05")
    assert gateway.places("s", ["nowhere", "561", "61.05"]) == [[], places, []]
    assert gateway.close_report("s").resets == 0


def test_forks_see_the_session_and_not_each_other(gateway: Gateway) -> None:
    history = [*ASKED, SAID, RESULT]
    done = {"role": "assistant", "content": "It is 561.05."}

    def read(name: str) -> None:
        gateway.force(name, ASKED, SAID, TOOLS)
        gateway.force(name, history, done, TOOLS)

    questions = [{"role": "user", "content": f"Question {n}: the price?"} for n in range(3)]
    wanted = []
    for number, question in enumerate(questions):
        read(f"alone{number}")
        asked = [*history, done, question]
        wanted.append(gateway.chat(f"alone{number}", asked, TOOLS, OPTIONS).token_ids)
        gateway.close_report(f"alone{number}")
    read("main")
    before, log = gateway.stats("main"), gateway.token_log("main")
    found = []
    for number, question in enumerate(questions):
        gateway.fork("main", f"fork{number}")
        asked = [*history, done, question]
        found.append(gateway.chat(f"fork{number}", asked, TOOLS, OPTIONS).token_ids)
        assert gateway.close_report(f"fork{number}").resets == 0
    assert found == wanted
    assert (gateway.stats("main"), gateway.token_log("main")) == (before, log)
    gateway.close_report("main")


def test_the_client_closes_what_it_forked(gateway: Gateway) -> None:
    client = InProcessClient(gateway, "trial", max_tokens=8)
    assert isinstance(client, SteeredClient)
    client.force(ASKED, SAID, TOOLS)
    side = client.fork()
    side.fork()
    client.another().chat(ASKED, TOOLS)
    assert client.tokens() == side.tokens() == len(gateway.token_log("trial")[0])
    assert len(gateway.sessions()) == 4
    client.cancel()
    assert side.chat([*ASKED, SAID, RESULT], TOOLS).finish_reason == "cancelled"
    client.close()
    assert gateway.sessions() == []


def test_what_cannot_be_forked_or_forced_is_refused(gateway: Gateway) -> None:
    with pytest.raises(UnknownSessionError):
        gateway.fork("nobody", "new")
    gateway.force("s", ASKED, SAID, TOOLS)
    gateway.fork("s", "taken")
    with pytest.raises(UsageError, match="open already"):
        gateway.fork("s", "taken")
    for name in ("s", "taken"):
        gateway.close_report(name)
    info = gateway.engine.info
    assert {Capability.FORK, Capability.FORCE} <= info.capabilities


class Template:
    """Stands for a tokenizer, with a template of some family."""

    def __init__(self, begin: str, end: str, *, thoughts: bool) -> None:
        self._begin, self._end, self._thoughts = begin, end, thoughts

    def apply_chat_template(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool, **_: Any
    ) -> str:
        text = ""
        for message in messages:
            if message["role"] != "assistant":
                text += f"<user>{message['content']}{self._end}"
                continue
            thoughts = message.get("reasoning_content") if self._thoughts else None
            shown = f"<think>\n{thoughts}\n</think>\n\n" if thoughts else ""
            begin = self._begin.removesuffix("<think>\n")
            text += f"{begin}{shown}{message['content']}{self._end}"
        return text + (self._begin if add_generation_prompt else "")


@pytest.mark.parametrize(
    ("begin", "thoughts", "expected"),
    [
        ("<assistant>", True, "<think>\nHm.\n</think>\n\nYes.<end>"),
        ("<assistant>", False, "<think>\nHm.\n</think>\n\nYes.<end>"),
        ("<assistant><think>\n", True, "\nHm.\n</think>\n\nYes.<end>"),
        ("<assistant><think>\n", False, "\nHm.\n</think>\n\nYes.<end>"),
    ],
)
def test_thoughts_are_where_the_model_writes_them(
    begin: str, thoughts: bool, expected: str
) -> None:
    tokenizer = Template(begin, "<end>\n", thoughts=thoughts)
    template = ChatTemplate(tokenizer, SYNTAXES["hermes"], ("<end>",))
    said = {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
    text = template.render_said(said)
    # Behind a prompt that ends in the opening marker and a line feed, the latter is the prompt's.
    assert text.lstrip("\n") == expected.lstrip("\n")
    assert template.render_said({"role": "assistant", "content": "Yes."}).endswith("Yes.<end>")
