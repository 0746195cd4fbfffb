"""The OpenAI-compatible HTTP surface over a gateway."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from agentbench_kv.gateway.api_errors import ApiError, as_api_error
from agentbench_kv.gateway.base import AnyGateway
from agentbench_kv.gateway.cancellation import Cancellation
from agentbench_kv.gateway.jobs import Job, JobPool, Work
from agentbench_kv.gateway.metrics import Metrics
from agentbench_kv.gateway.responses import DONE, ChatFormat, CompletionFormat, Format, sse
from agentbench_kv.gateway.schemas import (
    ChatRequest,
    CommonRequest,
    CompletionRequest,
    parse_request,
)
from agentbench_kv.gateway.types import Answer, ChatResult, Item

SESSION_HEADER = "X-KVBench-Session"
_SESSION_ID = re.compile(r"[!-~]{1,256}")

Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True)
class ServerSettings:
    """Limits and access of a server."""

    api_key: str | None = None  # the bearer token that clients must send
    threads: int = 16  # requests answered at once
    queue: int = 512  # requests that may wait
    max_body: int = 32 * 2**20  # largest request body in bytes
    body_timeout_s: float = 60.0  # longest time a client may take to send its body


class HttpApi:
    """The routes of the server; `app` is the ASGI application."""

    def __init__(self, gateway: AnyGateway, settings: ServerSettings) -> None:
        self._gateway = gateway
        self._settings = settings
        self._model = gateway.engine.info.model
        self._pool = JobPool(settings.threads, settings.queue)
        self._metrics = Metrics()

    def app(self) -> Starlette:
        routes = [
            self._route("/v1/chat/completions", self._chat, "POST"),
            self._route("/v1/completions", self._complete, "POST"),
            self._route("/v1/models", self._models, "GET"),
            self._route("/v1/sessions/{session:path}", self._close_session, "DELETE"),
            self._route("/metrics", self._show_metrics, "GET"),
            self._route("/health", self._health, "GET", public=True),
        ]
        handlers = {404: _not_found, 405: _not_allowed}
        return Starlette(routes=routes, exception_handlers=handlers, lifespan=self._lifespan)

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            self._pool.shutdown()

    def _route(self, path: str, handler: Handler, method: str, *, public: bool = False) -> Route:
        async def endpoint(request: Request) -> Response:
            try:
                if not public:
                    self._check_key(request)
                response = await handler(request)
            except Exception as error:  # noqa: BLE001 - every failure is a JSON body
                response = _error_response(as_api_error(error))
            self._metrics.request(path, response.status_code)
            return response

        return Route(path, endpoint, methods=[method])

    async def _chat(self, request: Request) -> Response:
        body = parse_request(ChatRequest, await self._json(request))
        session, options = self._admit(request, body), body.options()

        def work(cancel: Cancellation) -> Answer:
            return self._gateway.stream(session, body.messages, body.tools, options, cancel)

        return await self._respond(request, body, work, ChatFormat)

    async def _complete(self, request: Request) -> Response:
        body = parse_request(CompletionRequest, await self._json(request))
        session, prompt, options = self._admit(request, body), body.one_prompt(), body.options()

        def work(cancel: Cancellation) -> Answer:
            return self._gateway.stream_complete(session, prompt, options, cancel)

        return await self._respond(request, body, work, CompletionFormat)

    async def _models(self, _: Request) -> Response:
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "kvbench"}
        limit = {"max_model_len": self._gateway.engine.info.context_limit}
        return JSONResponse({"object": "list", "data": [{**model, **limit}]})

    async def _health(self, _: Request) -> Response:
        return JSONResponse({"status": "ok", "engine": self._gateway.engine.info.name})

    async def _show_metrics(self, _: Request) -> Response:
        gauges = {
            "kvbench_sessions": len(self._gateway.sessions()),
            "kvbench_requests_in_flight": self._pool.admitted,
        }
        # An engine in another process has to be asked.
        pool = await asyncio.to_thread(self._gateway.engine.pool)
        gauges |= {f"kvbench_pool_{name}": value for name, value in pool.items()}
        return PlainTextResponse(self._metrics.text(gauges), media_type="text/plain; version=0.0.4")

    async def _close_session(self, request: Request) -> Response:
        session = str(request.path_params["session"])
        report = await asyncio.to_thread(self._gateway.close_report, session)
        return JSONResponse({"id": session, "deleted": True, "kvbench": report.as_dict()})

    async def _respond(
        self, request: Request, body: CommonRequest, work: Work, kind: type[Format]
    ) -> Response:
        form = kind(self._model, include_usage=body.include_usage, token_ids=body.return_token_ids)
        job = self._pool.submit(work)
        items = job.items()
        watch = asyncio.create_task(_cancel_on_disconnect(request, job))
        try:
            # The status line depends on the first item: a failure, or a prompt too long.
            first = await anext(items, None)
            items = _chain(first, items)
            if body.stream and not _over_limit(first):
                return _JobStream(job, self._events(items, form))
            result = await _last_result(items)
        except BaseException:
            job.cancel()
            raise
        finally:
            watch.cancel()
        self._metrics.turn(result.turn)
        if _over_limit(result):
            message = f"{result.turn.prompt_tokens} prompt tokens are more than the context holds"
            raise ApiError(400, message, code="context_length_exceeded", param="messages")
        return JSONResponse(form.body(result))

    async def _events(self, items: AsyncIterator[Item], form: Format) -> AsyncIterator[bytes]:
        for chunk in form.first():
            yield sse(chunk)
        try:
            async for item in items:
                chunks = form.last(item) if isinstance(item, ChatResult) else form.pieces(item)
                for chunk in chunks:
                    yield sse(chunk)
                if isinstance(item, ChatResult):
                    self._metrics.turn(item.turn)
        except Exception as error:  # noqa: BLE001 - the status line is sent already
            yield sse(as_api_error(error).body)
        yield DONE

    def _admit(self, request: Request, body: CommonRequest) -> str | None:
        """Return the session a request names; refuse another model and unusable ids."""
        if body.model != self._model:
            message = f"no model {body.model!r} here; this server runs {self._model!r}"
            raise ApiError(404, message, code="model_not_found", param="model")
        session = request.headers.get(SESSION_HEADER) or body.session
        if session is not None and not _SESSION_ID.fullmatch(session):
            message = "a session id is 1 to 256 printable ASCII characters without spaces"
            raise ApiError(400, message, param="session_id")
        return session

    def _check_key(self, request: Request) -> None:
        key = self._settings.api_key
        if not key:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        same = hmac.compare_digest(given.strip().encode(), key.encode())
        if scheme.lower() != "bearer" or not same:
            raise ApiError(401, "missing or wrong API key", code="invalid_api_key")

    async def _json(self, request: Request) -> Any:
        # A web page can post anything but JSON to a local server without asking it first.
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            raise ApiError(415, "the body must be application/json")
        try:
            async with asyncio.timeout(self._settings.body_timeout_s):
                body = await self._body(request)
        except TimeoutError:
            raise ApiError(408, "the body took too long to arrive") from None
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from error

    async def _body(self, request: Request) -> bytes:
        parts: list[bytes] = []
        size = 0
        async for part in request.stream():
            size += len(part)
            if size > self._settings.max_body:
                message = f"the body is larger than {self._settings.max_body} bytes"
                raise ApiError(413, message, code="body_too_large", headers={"Connection": "close"})
            parts.append(part)
        return b"".join(parts)


class _JobStream(StreamingResponse):
    """A stream whose job ends when the response does, however that comes about."""

    def __init__(self, job: Job, events: AsyncIterator[bytes]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._job = job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._job.cancel()


async def _cancel_on_disconnect(request: Request, job: Job) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        continue
    job.cancel()


async def _chain(first: Item | None, items: AsyncIterator[Item]) -> AsyncIterator[Item]:
    if first is not None:
        yield first
        async for item in items:
            yield item


async def _last_result(items: AsyncIterator[Item]) -> ChatResult:
    results = [item async for item in items if isinstance(item, ChatResult)]
    if not results:
        raise ApiError(499, "the client went away", code="cancelled")
    return results[-1]


def _over_limit(item: Item | None) -> bool:
    if not isinstance(item, ChatResult):
        return False
    return item.finish_reason == "context_limit" and not item.token_ids


def _error_response(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body, status_code=error.status, headers=error.headers)


async def _not_found(request: Request, _: Exception) -> Response:
    return _error_response(ApiError(404, f"no such path: {request.url.path}", code="not_found"))


async def _not_allowed(request: Request, _: Exception) -> Response:
    message = f"{request.method} is not allowed on {request.url.path}"
    return _error_response(ApiError(405, message, code="method_not_allowed"))
