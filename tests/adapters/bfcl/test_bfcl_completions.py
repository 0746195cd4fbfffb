"""The HTTP line to the server."""

import socket
import time
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path

import pytest

from agentbench_kv.adapters.agent_client import (
    AgentConnection,
    ContextFullError,
    ServerError,
    UnreachableError,
)
from agentbench_kv.engines.scripted import ScriptedEngine
from agentbench_kv.gateway import Gateway
from agentbench_kv.gateway.http import BackgroundServer

TOOLS = [{"type": "function", "function": {"name": "mv", "parameters": {}}}]


def line(url, key=None, timeout_s=5.0, answered=lambda: None):
    body = {"max_tokens": 5, "seed": 3}
    return AgentConnection(url, "s1", body, key, timeout_s, answered)


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_base_url_with_and_without_version(endpoint, suffix):
    endpoint.scripts["s1"] = ["Grüße"]
    answer = line(endpoint.url + suffix).complete("prompt", TOOLS)
    assert (answer.said, answer.finish_reason) == ("Grüße", "stop")
    assert answer.usage["prompt_tokens"] == 1


def test_what_is_sent(endpoint):
    line(endpoint.url, key="k").complete("p", TOOLS)
    wanted = {"model": "scripted", "max_tokens": 5, "seed": 3, "prompt": "p", "tools": TOOLS}
    assert endpoint.bodies["s1"] == [wanted]
    assert endpoint.headers["Authorization"] == "Bearer k"


def test_waits_for_a_busy_server(endpoint):
    endpoint.busy_answers = 3
    started = time.monotonic()
    line(endpoint.url).complete("p", TOOLS)
    assert time.monotonic() - started >= 0.3
    assert len(endpoint.prompts["s1"]) == 1


def test_every_answer_is_told_and_no_other(endpoint):
    endpoint.busy_answers, told = 1, []
    asked = line(endpoint.url, answered=lambda: told.append(1))
    asked.complete("p", TOOLS)
    asked.complete("p", TOOLS)
    assert told == [1, 1]
    endpoint.failure = (500, {"error": "boom"})
    with pytest.raises(ServerError):
        asked.complete("p", TOOLS)
    assert told == [1, 1]


def test_a_session_longer_than_any_context_is_not_sent(endpoint):
    with pytest.raises(ContextFullError, match="32 MiB"):
        line(endpoint.url).complete("x" * (32 << 20), TOOLS)
    assert not endpoint.prompts


def test_gives_up_on_a_server_that_stays_busy(endpoint):
    endpoint.busy_answers = 1000
    with pytest.raises(ServerError, match="HTTP 429"):
        line(endpoint.url, timeout_s=3).complete("p", TOOLS)


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        ((500, {"error": "boom"}), ServerError),
        ((400, {"error": {"code": "bad_request"}}), ServerError),
        ((400, {"error": {"code": "context_length_exceeded"}}), ContextFullError),
        ((413, {"error": "too large"}), ContextFullError),
        ((200, {"choices": []}), ServerError),
        ((200, {"choices": [{"text": None}]}), ServerError),
        ((200, []), ServerError),
    ],
)
def test_errors(endpoint, failure, kind):
    endpoint.failure = failure
    with pytest.raises(kind):
        line(endpoint.url).complete("p", TOOLS)


def test_nobody_listens():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(UnreachableError, match=f"127.0.0.1:{port}"):
        line(f"http://127.0.0.1:{port}").complete("p", TOOLS)


@pytest.mark.parametrize("url", ["ftp://x", "localhost:80", "", "http://"])
def test_not_a_url(url):
    with pytest.raises(ServerError, match="not an http"):
        line(url)


def test_server_that_does_not_answer_in_time(endpoint):
    endpoint.release.clear()
    with pytest.raises(UnreachableError, match="TimeoutError"):
        line(endpoint.url, timeout_s=0.3).complete("p", TOOLS)


@contextmanager
def our_server(context_limit):
    path = Path(str(files("agentbench_kv.models"))) / "micro"
    engine = ScriptedEngine(
        lambda _: ["word " * 50], tokenizer_path=path, context_limit=context_limit
    )
    with BackgroundServer(Gateway(engine)) as server:
        yield server.url


def test_our_own_server_refuses_a_prompt_past_the_context():
    with our_server(context_limit=40) as url, pytest.raises(ContextFullError):
        line(url).complete("hello " * 60, TOOLS)


def test_our_own_server_says_that_the_context_ended_an_answer():
    with our_server(context_limit=40) as url:
        answer = AgentConnection(url, "s1", {}, None, 30.0).complete("hello", TOOLS)
    assert answer.finish_reason == "context_limit"
    assert 0 < answer.usage["completion_tokens"] < 40
