"""The worker's line to a chat server; what both routes share is in test_bfcl_completions.py."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest

from agentbench_kv.adapters.agent_client import (
    AgentConnection,
    ContextFullError,
    ServerError,
    UnreachableError,
)

MESSAGES = [{"role": "user", "content": "Hello?"}]


def line(url: str, **body: Any) -> AgentConnection:
    return AgentConnection(url, "run|0|1|x", body, "secret", 5.0)


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
def test_a_request_names_session_model_and_key(chats: Any, end: str) -> None:
    answer = line(chats.url + end, seed=3).chat(MESSAGES, [])
    assert answer.said["content"] == "Hello."
    assert answer.usage["prompt_tokens"] == 7
    (body,), (headers,) = chats.bodies, chats.headers
    assert (body["seed"], body["model"], body["messages"]) == (3, "made-model", MESSAGES)
    assert headers["X-KVBench-Session"] == "run|0|1|x"
    assert headers["Authorization"] == "Bearer secret"


def test_a_trials_line_names_the_session_in_its_body_too(chats: Any) -> None:
    allowed: list[tuple[str, int]] = []
    renewed: list[bool] = []
    sent = {"endpoint": chats.url, "session": "run|0|1|x", "key": None, "timeout_s": 5.0}
    request: Any = SimpleNamespace(
        args={**sent, "sampling": {"max_tokens": 7, "seed": 3}},
        guard=SimpleNamespace(allow=lambda *address: allowed.append(address)),
        renew=lambda: renewed.append(True),
    )
    AgentConnection.of_trial(request, session_id=request.args["session"]).chat(MESSAGES, [])
    (body,) = chats.bodies
    assert renewed == [True]
    assert (body["session_id"], body["max_tokens"], body["seed"]) == ("run|0|1|x", 7, 3)
    assert allowed == [("127.0.0.1", int(chats.url.rsplit(":", 1)[1].partition("/")[0]))]


def test_a_dead_server_is_unreachable() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(UnreachableError, match=rf"^{address}: ConnectionRefusedError: "):
        line(f"http://{address}").chat(MESSAGES, [])


def test_a_busy_server_is_asked_again(chats: Any) -> None:
    chats.answer = lambda _: (429, {}) if len(chats.bodies) < 3 else (200, chats.say("At last."))
    assert line(chats.url).chat(MESSAGES, []).said["content"] == "At last."
    assert len(chats.bodies) == 3


def test_a_pause_past_the_time_that_is_left_is_an_error(chats: Any) -> None:
    chats.answer, chats.retry_after = lambda _: (503, {}), "6"
    with pytest.raises(ServerError, match="HTTP 503"):
        line(chats.url).chat(MESSAGES, [])


@pytest.mark.parametrize(
    "content", [b"<html>", [], {"choices": []}, {"choices": [{"message": "no"}]}], ids=repr
)
def test_rubbish_is_a_servers_error(chats: Any, content: Any) -> None:
    chats.answer = lambda _: (200, content)
    with pytest.raises(ServerError, match="not a chat completion"):
        line(chats.url).chat(MESSAGES, [])


def test_a_refusal_for_length_is_the_context_limit(chats: Any) -> None:
    chats.answer = lambda _: (400, {"error": {"code": "context_length_exceeded"}})
    with pytest.raises(ContextFullError):
        line(chats.url).chat(MESSAGES, [])


@pytest.mark.parametrize(
    ("exact", "reason"), [({"finish_reason": "context_limit"}, "context_limit"), ({}, "stop")]
)
def test_the_servers_exact_reason_counts(chats: Any, exact: Any, reason: str) -> None:
    body = chats.say("Cut")
    body["usage"]["kvbench"] = exact
    chats.answer = lambda _: (200, body)
    assert line(chats.url).chat(MESSAGES, []).finish_reason == reason
