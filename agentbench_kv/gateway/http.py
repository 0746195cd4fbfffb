"""The OpenAI-compatible HTTP server over a gateway: a bounded pool of jobs behind an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import json
import re
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Self

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from agentbench_kv.errors import PrerequisiteError, UsageError
from agentbench_kv.gateway.gateway import AnyGateway
from agentbench_kv.gateway.protocol import (
    ApiError,
    ChatFormat,
    ChatRequest,
    ChoiceFormat,
    CommonRequest,
    CompletionFormat,
    CompletionRequest,
    Format,
    as_api_error,
    parse_request,
)
from agentbench_kv.gateway.responses import (
    PREFIX,
    ResponsesFormat,
    ResponsesRequest,
    ResponseStore,
    new_id,
)
from agentbench_kv.gateway.session import Answer, Cancellation, ChatResult, Item, TurnInfo

Work = Callable[[Cancellation], Answer]


class Job:
    """One request being answered in a pool thread; iterate it in the event loop."""

    def __init__(self, work: Work, release: Callable[[], None]) -> None:
        self._work = work
        self._release = release
        self._loop = asyncio.get_running_loop()
        self._items: asyncio.Queue[Item | BaseException | None] = asyncio.Queue()
        self._cancellation = Cancellation()
        # Nobody reads on. The gateway may also end the generation alone: its result is still due.
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """Stop the generation; harmless when it has ended."""
        self._cancelled.set()
        self._cancellation.cancel()

    async def items(self) -> AsyncIterator[Item]:
        """Yield what the work yields; raise what it raises."""
        while (item := await self._items.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item

    def run(self) -> None:
        try:
            if not self._cancelled.is_set():
                self._pull()
        except BaseException as error:  # noqa: BLE001 - handed to the reader, who raises it
            self._put(error)
        finally:
            self._release()
            self._put(None)

    def _pull(self) -> None:
        iterator = self._work(self._cancellation)
        try:
            for item in iterator:
                self._put(item)
                if self._cancelled.is_set():
                    return
        finally:
            if isinstance(iterator, Generator):
                iterator.close()

    def _put(self, item: Item | BaseException | None) -> None:
        # The loop is gone when the server stopped while the engine was still at it.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._items.put_nowait, item)


class JobPool:
    """Runs `threads` jobs at once, lets `queue` wait and refuses more."""

    def __init__(self, threads: int, queue: int) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="kvbench-gateway")
        self._most = threads + queue
        self._lock = threading.Lock()
        self.admitted = 0  # requests running or waiting

    def submit(self, work: Work) -> Job:
        """Start or queue a job; 429 when the queue is full."""
        with self._lock:
            if self.admitted >= self._most:
                message = f"{self.admitted} requests are running or waiting; try again later"
                raise ApiError(429, message, code="queue_full", headers={"Retry-After": "1"})
            self.admitted += 1
        job = Job(work, self._release)
        self._executor.submit(job.run)
        return job

    def shutdown(self) -> None:
        """Take no more jobs; those that run end by themselves."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _release(self) -> None:
        with self._lock:
            self.admitted -= 1


_REQUESTS = "kvbench_requests_total"

# Each with its help text and the field of `TurnInfo` that it adds up.
_TURN_COUNTERS = {
    "kvbench_prompt_tokens_total": ("Logical prompt tokens of answered requests.", "prompt_tokens"),
    "kvbench_prefill_tokens_total": ("Tokens prefilled.", "prefill_tokens"),
    "kvbench_generated_tokens_total": ("Tokens generated.", "output_tokens"),
    "kvbench_evicted_tokens_total": ("Tokens evicted per (layer, KV head).", "evicted"),
    "kvbench_kv_bytes_read_total": ("Bytes of K and V read while decoding.", "kv_bytes_read"),
    "kvbench_session_resets_total": ("Requests that did not extend their session.", "reset"),
}

_HELP = {
    _REQUESTS: "HTTP requests by route and status.",
    **{name: text for name, (text, _) in _TURN_COUNTERS.items()},
}


class Metrics:
    """Counts; safe from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, str]] = Counter()  # by name and labels

    def request(self, route: str, status: int) -> None:
        with self._lock:
            self._counts[_REQUESTS, f'{{route="{route}",status="{status}"}}'] += 1

    def turn(self, turn: TurnInfo) -> None:
        with self._lock:
            for name, (_, field) in _TURN_COUNTERS.items():
                self._counts[name, ""] += int(getattr(turn, field))

    def text(self, gauges: dict[str, int]) -> str:
        lines: list[str] = []
        with self._lock:
            counts = sorted(self._counts.items())
        for name, help_text in _HELP.items():
            lines += [f"# HELP {name} {help_text}", f"# TYPE {name} counter"]
            lines += [f"{key}{labels} {value}" for (key, labels), value in counts if key == name]
        for name, value in gauges.items():
            lines += [f"# TYPE {name} gauge", f"{name} {value}"]
        return "\n".join(lines) + "\n"


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
        self._responses = ResponseStore(gateway)

    def app(self) -> Starlette:
        routes = [
            self._route("/v1/chat/completions", self._chat, "POST"),
            self._route("/v1/completions", self._complete, "POST"),
            self._route("/v1/responses", self._answer_response, "POST"),
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

        return await self._respond(request, body, work, self._choices(ChatFormat, body))

    async def _complete(self, request: Request) -> Response:
        body = parse_request(CompletionRequest, await self._json(request))
        session, prompt, options = self._admit(request, body), body.one_prompt(), body.options()

        def work(cancel: Cancellation) -> Answer:
            return self._gateway.stream_complete(session, prompt, options, cancel)

        return await self._respond(request, body, work, self._choices(CompletionFormat, body))

    async def _answer_response(self, request: Request) -> Response:
        body = parse_request(ResponsesRequest, await self._json(request))
        session, response_id = self._admit(request, body), new_id(PREFIX)
        work = self._responses.answer(body, response_id, session)
        form = ResponsesFormat(self._model, body, response_id)
        return await self._respond(request, body, work, form)

    def _choices(self, kind: type[ChoiceFormat], body: CommonRequest) -> ChoiceFormat:
        usage, ids = body.include_usage, body.return_token_ids
        return kind(self._model, include_usage=usage, token_ids=ids)

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
        self, request: Request, body: CommonRequest, work: Work, form: Format
    ) -> Response:
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
            yield form.frame(chunk)
        try:
            async for item in items:
                chunks = form.last(item) if isinstance(item, ChatResult) else form.pieces(item)
                for chunk in chunks:
                    yield form.frame(chunk)
                if isinstance(item, ChatResult):
                    self._metrics.turn(item.turn)
        except Exception as error:  # noqa: BLE001 - the status line is sent already
            for chunk in form.failed(as_api_error(error)):
                yield form.frame(chunk)
        yield form.end

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


_START_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 5


def check_exposure(host: str, api_key: str | None) -> None:
    """Refuse to be reachable from other machines without a key."""
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        loopback = False
    if not api_key and not loopback:
        raise UsageError(
            f"{host!r} can be reached from other machines and no API key is set; "
            "set KVBENCH_API_KEY, or bind 127.0.0.1"
        )


def run_server(
    gateway: AnyGateway, host: str, port: int, settings: ServerSettings | None = None
) -> None:
    """Serve a gateway until interrupted; PrerequisiteError if the port is taken."""
    settings = settings or ServerSettings()
    check_exposure(host, settings.api_key)
    run_app(HttpApi(gateway, settings).app(), host, port)


def run_app(app: Starlette, host: str, port: int) -> None:
    """Serve an application until interrupted; PrerequisiteError if the port is taken."""
    # uvicorn has shut down in good order when it passes a signal on; backends must end too.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    with _listen(host, port) as listener, suppress(KeyboardInterrupt):
        config = _config(app, host, port, log_level="info")
        uvicorn.Server(config).run(sockets=[listener])


class BackgroundServer:
    """Serves a gateway on a free loopback port from a thread; use it in a `with`.

    By default it needs no key, because only this machine can ask.
    """

    def __init__(
        self, gateway: AnyGateway, *, concurrency: int = 16, settings: ServerSettings | None = None
    ) -> None:
        settings = replace(settings or ServerSettings(), threads=concurrency)
        app = HttpApi(gateway, settings).app()
        self._socket = _listen("127.0.0.1", 0)
        self.port: int = self._socket.getsockname()[1]
        self._server = uvicorn.Server(_config(app, "127.0.0.1", self.port, log_level="warning"))
        self._thread = threading.Thread(
            target=self._server.run, args=([self._socket],), name="kvbench-server", daemon=True
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def __enter__(self) -> Self:
        """Start and wait until requests are answered."""
        self._thread.start()
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                raise PrerequisiteError("the HTTP server did not start; see the log above")
            time.sleep(0.005)
        return self

    def __exit__(self, *_: object) -> None:
        """Stop and wait for the thread; requests in flight get a few seconds."""
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(2 * _STOP_TIMEOUT_S)
        self._socket.close()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise PrerequisiteError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; choose another --port"
        ) from error


def _config(app: Starlette, host: str, port: int, log_level: str) -> uvicorn.Config:
    plain: dict[str, Any] = {"access_log": False, "ws": "none", "server_header": False}
    plain |= {"lifespan": "on", "timeout_graceful_shutdown": _STOP_TIMEOUT_S}
    return uvicorn.Config(app, host=host, port=port, log_level=log_level, **plain)
