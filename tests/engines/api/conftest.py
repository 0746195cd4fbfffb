"""A server that speaks OpenAI's chat protocol and misbehaves as told."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from agentbench_kv.engines.api.asking import RetryPolicy
from agentbench_kv.engines.api.endpoints import parse_model
from agentbench_kv.engines.api.engine import ApiEngine
from agentbench_kv.engines.api.spending import Prices, Spending

Messages = list[dict[str, Any]]
Answers = Callable[[Messages], dict[str, Any]]
QUICK = RetryPolicy(retries=2, timeout_s=20.0, first_pause_s=0.01)
KEY = "sk-local-secret-0123456789"


def hello(_: Messages) -> dict[str, Any]:
    return {"role": "assistant", "content": "hello"}


class FakeServer:
    """Answers with `answers`; `faults` come first, one a request: a status, `rubbish`, `hang`…"""

    def __init__(self) -> None:
        self.answers: Answers = hello
        self.faults: list[Any] = []
        self.always: Any = None
        self.headers: dict[str, str] = {}
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.usage: dict[str, Any] | None = {"prompt_tokens": 100, "completion_tokens": 10}
        self._lock = threading.Lock()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._port = self._socket.getsockname()[1]
        app = Starlette(
            routes=[Route("/v1/chat/completions", self._chat, methods=["POST"])],
        )
        config = uvicorn.Config(app, log_level="error", access_log=False, ws="none", lifespan="off")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=lambda: self._server.run(sockets=[self._socket]), daemon=True
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}/v1"

    def start(self) -> FakeServer:
        self._thread.start()
        return self

    def stop(self) -> None:
        self._server.should_exit = True
        self._server.force_exit = True
        self._thread.join(20)
        self._socket.close()

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        with self._lock:
            self.bodies.append(body)
            self.keys.append(request.headers.get("authorization", ""))
            fault = self.faults.pop(0) if self.faults else self.always
        if fault == "hang":
            while not await request.is_disconnected():
                await asyncio.sleep(0.01)
            return Response()
        if fault == "rubbish":
            return PlainTextResponse("<html>It works!</html>")
        if isinstance(fault, dict):
            return JSONResponse(fault)
        if isinstance(fault, tuple):
            return PlainTextResponse(fault[1], fault[0])
        if fault:
            return PlainTextResponse("not now", int(fault), headers=self.headers)
        return JSONResponse(self._answer(body))

    def _answer(self, body: dict[str, Any]) -> dict[str, Any]:
        message = self.answers(body["messages"])
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        choice = {"index": 0, "message": message, "finish_reason": reason}
        return {"object": "chat.completion", "choices": [choice], "usage": self.usage}


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer().start()
    yield fake
    fake.stop()


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("KVBENCH_", "OPENAI_"))]:
        monkeypatch.delenv(name)


@pytest.fixture
def engine_for(server: FakeServer) -> Iterator[Callable[..., ApiEngine]]:
    """Return a function that makes an engine which asks the server, impatiently."""
    made: list[ApiEngine] = []

    def build(
        policy: RetryPolicy = QUICK, prices: Prices | None = None, limit: float | None = None
    ) -> ApiEngine:
        model = f"{server.url}#fake"
        endpoint = parse_model(model)
        spending = Spending(limit)
        made.append(
            ApiEngine(endpoint, model=model, policy=policy, prices=prices, spending=spending)
        )
        return made[-1]

    yield build
    for engine in made:
        engine.shutdown()


@pytest.fixture
def chat() -> Callable[..., Messages]:
    """Return a function that makes a history of user and assistant texts, in turns."""

    def history(*texts: str) -> Messages:
        roles: Sequence[str] = ("user", "assistant")
        return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]

    return history
