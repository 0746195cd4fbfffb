"""Fifty sessions of a real model over HTTP, alone and beside clients that send poison."""

from __future__ import annotations

import itertools
import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from agentbench_kv.engines.base import EngineOptions
from agentbench_kv.engines.embedded.engine import EmbeddedEngine
from agentbench_kv.errors import EngineGoneError
from agentbench_kv.gateway import Gateway
from agentbench_kv.gateway.http import BackgroundServer, ServerSettings
from agentbench_kv.registry import make_method

SESSIONS, TURNS, MAX_TOKENS = 50, 3, 24
POOL = 40_000  # live tokens of all sessions together
CHAT = "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}


@contextmanager
def served() -> Iterator[tuple[str, Gateway]]:
    method = make_method("agentkv", 64, {"interval": "16"})
    engine = EmbeddedEngine.create(EngineOptions("micro", method, max_live_tokens=POOL))
    gateway, settings = Gateway(engine), ServerSettings(threads=32)
    try:
        with BackgroundServer(gateway, concurrency=settings.threads, settings=settings) as server:
            yield server.url.removesuffix("/v1"), gateway
    finally:
        engine.shutdown()


def talk(client: httpx.Client, number: int) -> list[list[int]]:
    """Hold one conversation; return the ids of every answer."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": f"Client {number}."}]
    said = []
    for turn in range(TURNS):
        messages.append({"role": "user", "content": f"Turn {turn}: what is item {number * turn}?"})
        body = {
            "model": "micro", "messages": messages, "max_tokens": MAX_TOKENS,
            "session_id": f"s-{number}", "return_token_ids": True,
        }  # fmt: skip
        answer = client.post(CHAT, json=body)
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        said.append(choice["token_ids"])
        messages.append({"role": "assistant", "content": choice["message"]["content"] or ""})
    return said


def all_talk(url: str) -> list[list[list[int]]]:
    with httpx.Client(base_url=url, timeout=600) as client, ThreadPoolExecutor(12) as threads:
        return list(threads.map(lambda number: talk(client, number), range(SESSIONS)))


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


USER = {"role": "user", "content": "x"}
DEEP = {"name": "f", "arguments": nested(500)}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "nothing"}}}
FIELDS: list[dict[str, Any]] = [
    {"messages": []},
    {"messages": [{"role": "robot", "content": "x"}]},
    {"messages": [USER, {"role": "assistant", "tool_calls": [{"id": "1", "function": DEEP}]}]},
    {"messages": [{"role": "tool", "content": "no call before", "tool_call_id": "?"}]},
    {"messages": [{"role": "user", "content": "\ud83d \x00 <|im_end|>"}]},
    {"messages": [{"role": "user", "content": "long " * 20_000}]},
    {"max_tokens": 10**6},  # never fits
    {"max_tokens": POOL},
    {"temperature": 1e30},
    {"temperature": 2, "seed": 2**63 - 1, "top_p": 1e-300, "top_k": 1},
    {"seed": -1, "temperature": 1.0},
    {"stop": ["", "x"]},
    {"stop": ["\ufffd", " "]},
    {"logprobs": True, "top_logprobs": 20},
    {"tools": [TOOL], "tool_choice": "required"},
    {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
    {"response_format": SCHEMA},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/nowhere"}}}},
    {"session_id": "poison"},
    {"stream": True, "stream_options": {"include_usage": True}},
    {"unknown": 1},
]
BODIES = [
    b"", b"\xff", b"null", b"[" * 100_000, b'{"messages": 1e999}', b'{"model": "micro"',
    *(json.dumps({"model": "micro", "max_tokens": 8, "messages": [USER], **f}).encode()
      for f in FIELDS),
]  # fmt: skip


def post_all(url: str, ended: threading.Event, answers: list[int]) -> None:
    """Send every body in turn until told to end; nothing may be a server's own error."""
    with httpx.Client(base_url=url, timeout=600) as client:
        for body in itertools.cycle(BODIES):
            if ended.is_set():
                return
            answers.append(client.post(CHAT, content=body, headers=JSON).status_code)


def hang_up(url: str, ended: threading.Event, answers: list[int]) -> None:
    """Begin streams of a shared session and leave in the middle, or send half a request."""
    port = int(url.rpartition(":")[2])
    asked = {"model": "micro", "messages": [USER], "stream": True, "max_tokens": 200,
             "session_id": "left"}  # fmt: skip
    body = json.dumps(asked)
    whole = f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n{body}"
    for size in itertools.cycle((len(whole), len(whole) - 5, 20)):
        if ended.is_set():
            return
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(whole[:size].encode())
            if size == len(whole):
                answers.append(int(connection.recv(64).split()[1]))


def close_poisoned(url: str, ended: threading.Event, answers: list[int]) -> None:
    """Close the others' sessions while they answer, and one that is not there."""
    with httpx.Client(base_url=url, timeout=600) as client:
        for name in itertools.cycle(("poison", "left", "nobody")):
            if ended.wait(0.05):
                return
            answers.append(client.delete(f"/v1/sessions/{name}").status_code)


def test_fifty_sessions_say_what_they_say_alone() -> None:
    with served() as (url, _):
        alone = all_talk(url)
    answers: dict[Callable[..., None], list[int]] = {each: [] for each in POISONS}
    ended = threading.Event()
    with served() as (url, gateway), ThreadPoolExecutor(len(POISONS)) as threads:
        running = [threads.submit(each, url, ended, found) for each, found in answers.items()]
        try:
            beside = all_talk(url)
        finally:
            ended.set()
        for each in running:
            each.result()
        assert httpx.get(f"{url}/health").json()["status"] == "ok"
        gateway.check()
    assert beside == alone
    assert all(len(said) == TURNS and all(said) for said in alone)
    assert len(answers[post_all]) > len(BODIES)
    assert {200, 400} <= set(answers[post_all])
    assert not [code for codes in answers.values() for code in codes if code == 500]


POISONS = (post_all, hang_up, close_poisoned)


def test_an_engine_that_is_gone_is_not_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    with served() as (url, gateway):
        gone = EngineGoneError("the embedded engine ended: a test")
        monkeypatch.setattr(gateway, "_fatal", gone)
        answer = httpx.get(f"{url}/health")
        assert answer.status_code == 503
        assert answer.json() == {"status": "gone", "engine": "embedded", "error": str(gone)}
