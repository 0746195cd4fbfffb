"""Request bodies: what is refused, what is passed over, and that nothing else happens."""

from __future__ import annotations

import asyncio
import copy
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentbench_kv.engines.scripted import ScriptedEngine
from agentbench_kv.gateway import Gateway
from agentbench_kv.gateway.http import HttpApi, ServerSettings
from agentbench_kv.gateway.requests import IGNORED

DOC = Path(__file__).parents[2] / "docs" / "server.md"
USER = {"role": "user", "content": "Weather?"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
JSON = {"Content-Type": "application/json"}


class Asked:
    """Sends bodies to the application itself, without sockets."""

    def __init__(self, tokenizer_path: Path) -> None:
        engine = ScriptedEngine(lambda _: ["answer"] * 100_000, tokenizer_path=tokenizer_path)
        self.gateway = Gateway(engine)
        self.api = HttpApi(self.gateway, ServerSettings(threads=1))
        self._transport = httpx.ASGITransport(self.api.app())
        self._runner = asyncio.Runner()

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()

        async def ask() -> httpx.Response:
            async with httpx.AsyncClient(transport=self._transport, base_url="http://x") as client:
                return await client.post(path, content=content, headers={**JSON, **headers})

        return self._runner.run(ask())

    def chat(self, **fields: Any) -> httpx.Response:
        return self.post("/v1/chat/completions", {"model": "gold", "messages": [USER], **fields})


@pytest.fixture(scope="module")
def asked(tokenizer_path: Path) -> Iterator[Asked]:
    made = Asked(tokenizer_path)
    yield made
    made.api._pool.shutdown()
    made.api._asides.shutdown()
    made._runner.close()


def said(*calls: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls), **fields}


def arguments(text: Any) -> dict[str, Any]:
    return said({**CALL, "function": {"name": "f", "arguments": text}})


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [said(5)]},
        {"messages": [said(None)]},
        {"messages": [{**said(), "tool_calls": {"a": 1}}]},
        {"messages": [{**said(), "tool_calls": "abc"}]},
        {"messages": [said({"function": "f"})]},
        {"messages": [arguments("[" * 50_000)]},
        {"messages": [arguments("[" * 200 + "]" * 200)]},
        {"messages": [arguments([1])]},
        {"messages": [5]},
        {"messages": ["x"]},
        {"messages": {"role": "user"}},
        {"messages": [{"role": 5, "content": "x"}]},
        {"messages": [{"role": "robot", "content": "x"}]},
        {"messages": [{"role": "function", "name": "f", "content": "x"}]},
        {"messages": [{"role": "user", "content": {"text": "x"}}]},
        {"messages": [{"role": "user", "content": [5]}]},
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        {"tools": [5]},
        {"tools": {}},
        {"tools": [{}]},
        {"tools": [{"type": "web_search"}]},
        {"tools": [{"type": "function", "function": {"name": 5}}]},
        {"max_tokens": 0},
        {"max_tokens": 10**30},
        {"max_tokens": 1.5},
        {"max_tokens": "5"},
        {"max_tokens": True},
        {"temperature": "0"},
        {"temperature": 1e30},
        {"top_p": 1.1},
        {"top_k": 10**12},
        {"top_k": -2},
        {"seed": 2**63},
        {"seed": 1.5},
        {"stop": 5},
        {"stop": [5]},
        {"stop": ["x"] * 65},
        {"stop": "x" * 1001},
        {"stream": "yes"},
        {"stream_options": {"include_usage": 1}},
        {"stream_options": {"continuous_usage_stats": True}},
        {"session_id": ""},
        {"session_id": "one shot 1"},
        {"session_id": 5},
        {"kvbench": {"session": "a b"}},
        {"kvbench": {"sesion": "a"}},
        {"evoke_priority": 0},
        {"model": 5},
        {"n": 2},
        {"parallel_tool_calls": "no"},
        {"store": True},
        {"reasoning_effort": "high"},
        {"min_p": 0.1},
        {"logit_bias": {str(n): 1 for n in range(10_000)}},
        {"foo": None},
    ],
    ids=lambda fields: json.dumps(fields)[:60],
)
def test_a_malformed_field_is_400_in_one_line(
    asked: Asked, fields: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    answer = asked.chat(**fields)
    assert_refused(answer)
    assert len(answer.json()["error"]["message"]) < 400
    assert not caplog.records
    assert asked.gateway.sessions() == []


def assert_refused(answer: httpx.Response) -> None:
    assert 400 <= answer.status_code < 500, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (b"NaN", "NaN is not a number"),
        (b"-Infinity", "-Infinity is not a number"),
        (b"1e999", "too large"),
        (b"9" * 5000, "limit"),
        (b"[" * 150 + b"]" * 150, "deeper than 100"),
        (b"[" * 50_000, "recursion"),
        (b'"\xff"', "utf-8"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_is_no_json_is_400(asked: Asked, number: bytes, words: str) -> None:
    body = b'{"model": "gold", "messages": [{"role": "user", "content": "x"}], "metadata": %s}'
    answer = asked.post("/v1/chat/completions", body % number)
    assert_refused(answer)
    assert words in answer.json()["error"]["message"]


def test_halves_of_characters_become_question_marks_everywhere(asked: Asked) -> None:
    half = {"role": "user", "content": "a \ud83d b", "name": "\ude00"}
    answer = asked.chat(messages=[half, said(CALL), {**half, "role": "tool"}], session_id="s")
    assert answer.status_code == 200
    text = asked.gateway.codec.decode(asked.gateway.token_log("s")[0])
    assert "a ? b" in text
    asked.gateway.close_report("s")
    whole = asked.chat(messages=[{"role": "user", "content": "\ud83d\ude00"}], session_id="s")
    assert whole.status_code == 200
    assert "😀" in asked.gateway.codec.decode(asked.gateway.token_log("s")[0])
    asked.gateway.close_report("s")


def test_unknown_fields_are_refused_with_a_guess(asked: Asked) -> None:
    error = asked.chat(max_token=5).json()["error"]
    assert (error["code"], error["param"]) == ("unknown_parameter", "max_token")
    assert "did you mean 'max_tokens'?" in error["message"]
    assert "docs/server.md" in asked.chat(zzz=1).json()["error"]["message"]


# What the openai SDK, litellm, LangChain and others send without being asked.
HARMLESS: dict[str, Any] = {
    "parallel_tool_calls": True,
    "user": "u",
    "store": False,
    "metadata": {"trace": "t"},
    "service_tier": "auto",
    "safety_identifier": "s",
    "prompt_cache_key": "k",
    "seed": 0,
    "n": 1,
    "logprobs": False,
    "top_logprobs": None,
    "presence_penalty": 0,
    "frequency_penalty": 0.0,
    "logit_bias": None,
    "response_format": {"type": "text"},
    "tool_choice": "auto",
    "modalities": ["text"],
    "stream_options": {"include_usage": True, "include_obfuscation": False},
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "skip_special_tokens": True,
    "chat_template_kwargs": {},
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_clients_send_by_themselves_is_taken(asked: Asked, name: str) -> None:
    assert asked.chat(tools=[TOOL], **{name: HARMLESS[name]}).status_code == 200


def test_messages_may_carry_what_clients_add(asked: Asked) -> None:
    extras = {"refusal": None, "annotations": [], "audio": None, "function_call": None, "name": "n"}
    history = [USER, said(CALL, **extras), {"role": "tool", "tool_call_id": "c", "content": "5"}]
    assert asked.chat(messages=history, tools=[TOOL]).status_code == 200


def test_the_manual_lists_what_is_passed_over() -> None:
    text = DOC.read_text()
    assert [name for name in IGNORED if f"`{name}`" not in text] == []


def junk() -> st.SearchStrategy[Any]:
    numbers = st.integers() | st.floats() | st.sampled_from([10**400, -1, 2**31, 1e-320, 1e308])
    text = st.text(max_size=8) | st.text(st.characters(categories=["Cs", "Cc"]), max_size=3)
    leaf = st.none() | st.booleans() | numbers | text
    keys = text | st.sampled_from(["role", "content", "type", "text", "function", "name", "id"])
    return st.recursive(
        leaf,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
        max_leaves=6,
    )


CHAT: dict[str, Any] = {
    "model": "gold",
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": "x", "reasoning_content": "y", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "5"},
    ],
    "tools": [TOOL],
    "max_tokens": 3,
    "max_completion_tokens": 3,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "seed": 1,
    "stop": ["a", "b"],
    "stream": False,
    "stream_options": {"include_usage": True},
    "session_id": "s",
    "kvbench": {"session": "s"},
    "tool_choice": "auto",
    "return_token_ids": True,
    **{name: HARMLESS[name] for name in ("n", "store", "metadata", "response_format", "logprobs")},
}
RAW: dict[str, Any] = {
    **{name: CHAT[name] for name in CHAT if name not in ("messages", "tools", "kvbench")},
    "prompt": [1, 2, 3],
    "ignore_eos": True,
    "echo": False,
}
del RAW["max_completion_tokens"]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the way to every part of a body."""
    yield path
    if isinstance(value, (dict, list)):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*path, key))


def with_change(body: Any, path: tuple[Any, ...], value: Any, how: str) -> Any:
    if not path:
        return value
    body = copy.deepcopy(body)
    parent = body
    for key in path[:-1]:
        if not isinstance(parent, (dict, list)):
            return body
        try:
            parent = parent[key]
        except (LookupError, TypeError):
            return body
    if isinstance(parent, dict) and how == "add":
        parent[f"{path[-1]}x"] = value
    elif isinstance(parent, dict) and how == "drop":
        parent.pop(path[-1], None)
    elif isinstance(parent, dict) or (isinstance(parent, list) and path[-1] in range(len(parent))):
        parent[path[-1]] = value
    return body


def changes(body: dict[str, Any]) -> st.SearchStrategy[Any]:
    change = st.tuples(
        st.sampled_from(list(places(body))), junk(), st.sampled_from(["set", "add", "drop"])
    )

    def apply(made: list[tuple[Any, Any, Any]]) -> Any:
        changed: Any = body
        for each in made:
            changed = with_change(changed, *each)
        return changed

    return st.lists(change, max_size=3).map(apply)


SIZES = [400, pytest.param(20_000, marks=pytest.mark.nightly)]


@pytest.mark.parametrize("examples", SIZES)
@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/chat/completions", CHAT), ("/v1/completions", RAW)],
    ids=["chat", "raw"],
)
def test_every_body_is_answered_or_refused(
    asked: Asked,
    path: str,
    body: dict[str, Any],
    examples: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    answered = []

    @settings(
        max_examples=examples,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(changed=changes(body) | junk())
    def check(changed: Any) -> None:
        answer = asked.post(path, changed)
        if answer.status_code != 200:
            assert_refused(answer)
        elif "event-stream" in answer.headers["content-type"]:
            assert answer.text.endswith("data: [DONE]\n\n")
            assert '"server_error"' not in answer.text
        else:
            assert answer.json()["choices"]
        answered.append(answer.status_code)

    check()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert 400 in answered
    assert isinstance(asked.gateway.engine, ScriptedEngine)
    assert asked.gateway.engine.sessions() == asked.gateway.sessions()
    for name in asked.gateway.sessions():
        asked.gateway.close_report(name)
