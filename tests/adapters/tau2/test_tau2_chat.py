"""The worker's line to a chat server."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from agentbench_kv.adapters.tau2.worker.chat import (
    CancelledError,
    ChatLine,
    ContextLimitError,
    EndpointError,
    UnreachableError,
)

MESSAGES = [{"role": "user", "content": "Hello?"}]


@pytest.fixture
def line() -> Iterator[Callable[..., ChatLine]]:
    made: list[ChatLine] = []

    def connect(url: str, cancelled: threading.Event | None = None, **body: Any) -> ChatLine:
        event = cancelled or threading.Event()
        made.append(ChatLine(url, "run|0|1|x", body, "secret", 5.0, event))
        return made[-1]

    yield connect
    for each in made:
        each.close()


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
def test_a_request_names_session_model_and_key(chats: Any, line: Any, end: str) -> None:
    answer = line(chats.url + end, seed=3).ask(MESSAGES, [])
    assert answer["message"]["content"] == "Hello."
    assert answer["usage"]["prompt_tokens"] == 7
    (body,), (headers,) = chats.bodies, chats.headers
    assert (body["session_id"], body["seed"], body["model"]) == ("run|0|1|x", 3, "made-model")
    assert headers["X-KVBench-Session"] == "run|0|1|x"
    assert headers["Authorization"] == "Bearer secret"


def test_a_busy_server_is_asked_again(chats: Any, line: Any) -> None:
    chats.answer = lambda _: (429, {}) if len(chats.bodies) < 3 else (200, chats.say("At last."))
    assert line(chats.url).ask(MESSAGES, [])["message"]["content"] == "At last."
    assert len(chats.bodies) == 3


def test_a_server_that_stays_busy_is_an_error(chats: Any, line: Any) -> None:
    chats.answer, chats.retry_after = lambda _: (503, {}), "6"
    with pytest.raises(EndpointError, match="HTTP 503"):
        line(chats.url).ask(MESSAGES, [])


@pytest.mark.parametrize(
    "content", [b"<html>", [], {"choices": []}, {"choices": [{"message": "no"}]}], ids=repr
)
def test_rubbish_is_an_endpoint_error(chats: Any, line: Any, content: Any) -> None:
    chats.answer = lambda _: (200, content)
    with pytest.raises(EndpointError, match="not a chat completion"):
        line(chats.url).ask(MESSAGES, [])


def test_a_refusal_for_length_is_the_context_limit(chats: Any, line: Any) -> None:
    chats.answer = lambda _: (400, {"error": {"code": "context_length_exceeded"}})
    with pytest.raises(ContextLimitError):
        line(chats.url).ask(MESSAGES, [])


def test_the_servers_exact_reason_counts(chats: Any, line: Any) -> None:
    body = chats.say("Cut")
    body["usage"]["kvbench"] = {"finish_reason": "context_limit"}
    chats.answer = lambda _: (200, body)
    assert line(chats.url).ask(MESSAGES, [])["finish_reason"] == "context_limit"


def test_a_dead_server_is_unreachable(line: Any) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(UnreachableError, match=url):
        line(url).ask(MESSAGES, [])


def test_a_cancelled_trial_asks_no_more(chats: Any, line: Any) -> None:
    cancelled = threading.Event()
    asked = line(chats.url, cancelled)

    def busy(_: Any) -> tuple[int, Any]:
        cancelled.set()
        return 429, {}

    chats.answer, chats.retry_after = busy, "4"
    for _ in range(2):
        with pytest.raises(CancelledError):
            asked.ask(MESSAGES, [])
    assert len(chats.bodies) == 1
