"""The browser over HTTP, for agents in other processes and languages."""

from __future__ import annotations

import asyncio
import hmac
import json
import threading
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import cast

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from agentbench_kv.adapters.browser.browser import TOOLS, Browser, BrowserView, call_tool
from agentbench_kv.adapters.browser.corpus import Corpus

_MOST_BODY = 1 << 16
_MOST_SESSIONS = 4096
_Handler = Callable[[Request], Awaitable[Response]]


class BrowserServer:
    """Browsers by session id over one corpus; `app` is the ASGI application.

    Clients must send `api_key`, if there is one, as `Authorization: Bearer KEY`.
    """

    def __init__(self, corpus: Corpus, *, view_tokens: int, api_key: str | None = None) -> None:
        self._corpus = corpus
        self._view_tokens = view_tokens
        self._key = api_key
        self._sessions: dict[str, tuple[Browser, threading.Lock]] = {}
        self._lock = threading.Lock()
        routes = [
            Route("/health", self._guarded(self._health)),
            Route("/tools", self._guarded(self._tools)),
            Route("/sessions/{session}/{tool}", self._guarded(self._call), methods=["POST"]),
            Route("/sessions/{session}", self._guarded(self._end), methods=["DELETE"]),
        ]
        self.app = Starlette(routes=routes, exception_handlers={HTTPException: _refused})

    def _guarded(self, handler: _Handler) -> _Handler:
        async def answer(request: Request) -> Response:
            sent = request.headers.get("authorization", "").removeprefix("Bearer ")
            if self._key and not hmac.compare_digest(sent.encode(), self._key.encode()):
                raise HTTPException(401, "send the key as Authorization: Bearer KEY")
            return await handler(request)

        return answer

    async def _health(self, request: Request) -> Response:  # noqa: ARG002
        return JSONResponse({"corpus": self._corpus.provenance()})

    async def _tools(self, request: Request) -> Response:  # noqa: ARG002
        return JSONResponse(TOOLS)

    async def _call(self, request: Request) -> Response:
        arguments = await _arguments(request)
        browser, lock = self._session(request.path_params["session"])

        def call() -> BrowserView:
            with lock:  # one request at a time
                return call_tool(browser, request.path_params["tool"], arguments)

        seen = await asyncio.to_thread(call)
        return JSONResponse({**asdict(seen), "failed": seen.failed})

    async def _end(self, request: Request) -> Response:
        with self._lock:
            ended = self._sessions.pop(request.path_params["session"], None)
        if ended is None:
            raise HTTPException(404, "no such session")
        return JSONResponse({"ended": True})

    def _session(self, name: str) -> tuple[Browser, threading.Lock]:
        with self._lock:
            if name not in self._sessions:
                if len(self._sessions) >= _MOST_SESSIONS:
                    raise HTTPException(429, f"all {_MOST_SESSIONS} sessions are in use; end one")
                browser = Browser(self._corpus, view_tokens=self._view_tokens)
                self._sessions[name] = browser, threading.Lock()
            return self._sessions[name]


async def _refused(_: Request, error: Exception) -> Response:
    refused = cast("HTTPException", error)
    return JSONResponse({"error": refused.detail}, refused.status_code)


async def _arguments(request: Request) -> dict[str, object]:
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > _MOST_BODY:
            raise HTTPException(413, f"the arguments are larger than {_MOST_BODY} bytes")
    try:
        arguments = json.loads(body or b"{}")
    except (ValueError, RecursionError):
        raise HTTPException(400, "the body is not JSON") from None
    if not isinstance(arguments, dict):
        raise HTTPException(400, "the body is not a JSON object")
    return arguments
