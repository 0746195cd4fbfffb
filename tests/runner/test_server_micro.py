"""A whole micro session over HTTP: the openai SDK, the embedded engine, a compressed cache."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from agentbench_kv.adapters.micro.episode import Environment
from agentbench_kv.adapters.micro.generate import PROFILES, generate, held_out_seed
from agentbench_kv.engines.base import EngineOptions
from agentbench_kv.gateway import Gateway
from agentbench_kv.gateway.http import BackgroundServer
from agentbench_kv.registry import make_method
from agentbench_kv.run.engines import start_engine

BUDGET = 256


@pytest.fixture
def client() -> Iterator[openai.OpenAI]:
    engine = start_engine(
        "embedded", EngineOptions("micro", make_method("agentkv", BUDGET, {"interval": 32}))
    )
    try:
        with BackgroundServer(Gateway(engine)) as server:
            yield openai.OpenAI(base_url=server.url, api_key="unused", max_retries=0)
    finally:
        engine.shutdown()


def ask(client: openai.OpenAI, stream: bool, **request: Any) -> tuple[dict[str, Any], Any]:
    """Return the assistant message and the usage of one request."""
    if not stream:
        answer = client.chat.completions.create(**request)
        return answer.choices[0].message.model_dump(exclude_none=True), answer.usage
    content, calls, usage = "", {}, None
    chunks = client.chat.completions.create(
        **request, stream=True, stream_options={"include_usage": True}
    )
    for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            content += choice.delta.content or ""
            for part in choice.delta.tool_calls or []:
                call = calls.setdefault(part.index, {"id": part.id, "name": "", "arguments": ""})
                call["name"] += part.function.name or ""
                call["arguments"] += part.function.arguments or ""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": call["name"], "arguments": call["arguments"]},
            }
            for call in calls.values()
        ]
    return message, usage


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_using_session_keeps_its_compressed_cache(
    client: openai.OpenAI, stream: bool
) -> None:
    environment = Environment(generate(held_out_seed(1), PROFILES["recall-1k"]))
    messages: list[dict[str, Any]] = [{"role": "system", "content": environment.episode.system}]
    last, requests = None, 0
    while not environment.done:
        messages.append({"role": "user", "content": environment.request})
        over = False
        while not over:
            message, usage = ask(
                client,
                stream,
                model="micro",
                messages=messages,
                tools=environment.episode.tools,
                max_tokens=128,
                extra_headers={"X-KVBench-Session": "s"},
            )
            last, requests = usage.model_extra["kvbench"], requests + 1
            messages.append(message)
            calls = message.get("tool_calls")
            if not calls:
                over = environment.reply(message.get("content", "")).turn_over
                continue
            function = calls[0]["function"]
            seen = environment.call(function["name"], json.loads(function["arguments"]))
            messages.append({"role": "tool", "tool_call_id": calls[0]["id"], "content": seen.text})
            over = seen.turn_over
    assert last is not None
    assert requests >= 10
    assert last["session_resets"] == 0
    assert last["events"] > 0
    assert last["evicted"] > 0
    assert last["live"] < last["logical"]
    assert last["peak_live"] <= BUDGET + 32 + last["longest_prefill"]
