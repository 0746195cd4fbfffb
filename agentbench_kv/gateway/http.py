"""The OpenAI-compatible HTTP server over a gateway: a bounded pool of jobs behind an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import re
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeVar

import numpy as np
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from agentbench_kv.errors import KVBenchError, PrerequisiteError
from agentbench_kv.gateway.api_errors import ApiError, as_api_error
from agentbench_kv.gateway.base import AnyGateway
from agentbench_kv.gateway.exchange import Answer, Cancellation, ChatResult, Item
from agentbench_kv.gateway.formats import (
    ChatFormat,
    ChoiceFormat,
    CompletionFormat,
    Format,
    embeddings_body,
)
from agentbench_kv.gateway.jobs import Job, JobPool, Work
from agentbench_kv.gateway.listening import (
    HostGuard,
    Patience,
    check_exposure,
    end_on_sigterm,
    listen,
    make_server,
)
from agentbench_kv.gateway.reports import TurnInfo
from agentbench_kv.gateway.requests import (
    ChatRequest,
    CommonRequest,
    CompletionRequest,
    EmbeddingRequest,
    parse_request,
    read_json,
)
from agentbench_kv.gateway.responses import (
    PREFIX,
    ResponsesFormat,
    ResponsesRequest,
    ResponseStore,
    new_id,
)

_REQUESTS = "kvbench_requests_total"
_EXPIRED = "kvbench_sessions_expired_total"

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
    _EXPIRED: "Sessions closed because nobody asked for too long.",
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

    def expired(self, sessions: int) -> None:
        with self._lock:
            self._counts[_EXPIRED, ""] += sessions

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
NOTE_HEADER = "X-KVBench-Note"
_SESSION_ID = re.compile(r"[!-~]{1,256}")
Choices = TypeVar("Choices", bound=ChoiceFormat)
Handler = Callable[[Request], Awaitable[Response]]
_ASIDES = 4  # threads for what is not an answer
_SWEEP_S = 15.0  # at most between two looks at idle sessions


@dataclass(frozen=True)
class Embedder:
    """What answers requests for embeddings: a name, and texts to float32 [texts, dimension]."""

    name: str
    encode: Callable[[Sequence[str]], Any]


@dataclass(frozen=True)
class ServerSettings:
    """Limits and access of a server."""

    api_key: str | None = None  # the bearer token that clients must send
    threads: int = 16  # requests answered at once
    queue: int = 512  # requests that may wait
    max_body: int = 32 * 2**20  # largest request body in bytes
    body_timeout_s: float = 60.0  # longest time a client may take to send its body
    allow_hosts: tuple[str, ...] = ()  # other names that this machine is called by; * for any
    patience: Patience = field(default_factory=Patience)
    embedder: Embedder | None = None


class HttpApi:
    """The routes of the server; `app` is the ASGI application."""

    def __init__(self, gateway: AnyGateway, settings: ServerSettings) -> None:
        self._gateway = gateway
        self._settings = settings
        self._model = gateway.engine.info.model
        # Clients that take a slash for a provider's name cannot say a path.
        self._names = list(dict.fromkeys((self._model, self._model.rstrip("/").rpartition("/")[2])))
        self._pool = JobPool(settings.threads, settings.queue)
        # What must not wait for an answer that takes long.
        self._asides = JobPool(_ASIDES, settings.queue)
        self._metrics = Metrics()
        self._responses = ResponseStore(gateway)
        self._stopping = False
        self._receiving: set[asyncio.Timeout] = set()
        gateway.on_turn = gateway.on_turn or (lambda _, turn: self._metrics.turn(turn))

    @property
    def busy(self) -> bool:
        """Whether any request is being answered."""
        return bool(self._pool.admitted or self._asides.admitted)

    def refuse_new(self) -> None:
        """Answer no more requests: the server is about to stop."""
        self._stopping = True
        for timeout in self._receiving:
            with suppress(RuntimeError):  # it has just run out
                timeout.reschedule(0.0)

    def end_all(self) -> None:
        """End the requests in flight with an error."""
        for pool in (self._pool, self._asides):
            pool.end_all(_stopped())

    def app(self) -> Starlette:
        routes = [
            self._route("/v1/chat/completions", self._chat, "POST"),
            self._route("/v1/completions", self._complete, "POST"),
            self._route("/v1/responses", self._answer_response, "POST"),
            self._route("/v1/embeddings", self._embed, "POST"),
            self._route("/v1/models", self._models, "GET"),
            self._route("/v1/sessions/{session:path}", self._close_session, "DELETE"),
            self._route("/metrics", self._show_metrics, "GET"),
            self._route("/health", self._health, "GET", public=True),
        ]
        handlers = {404: self._not_found, 405: self._not_allowed}
        app = Starlette(routes=routes, exception_handlers=handlers, lifespan=self._lifespan)
        # Its redirect would go to whatever Host says.
        app.router.redirect_slashes = False
        return app

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        sweep = asyncio.create_task(self._expire_sessions())
        try:
            yield
        finally:
            sweep.cancel()
            self._pool.shutdown()
            self._asides.shutdown()

    async def _expire_sessions(self) -> None:
        if not self._gateway.idle_s:
            return
        while True:
            await asyncio.sleep(min(self._gateway.idle_s / 4, _SWEEP_S))
            try:
                self._metrics.expired(len(await self._asides.ask(self._gateway.expire)))
            except ApiError:  # busy, or stopping: there is a next time, or none is needed
                continue

    def _route(self, path: str, handler: Handler, method: str, *, public: bool = False) -> Route:
        async def endpoint(request: Request) -> Response:
            try:
                if not public:
                    self._check_key(request)
                if self._stopping:
                    raise _stopped()
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
            more = (body.tools, body.new_tokens)
            return self._gateway.stream_complete(session, prompt, options, cancel, *more)

        form = self._choices(CompletionFormat, body)
        form.reads = bool(body.tools)
        return await self._respond(request, body, work, form)

    async def _answer_response(self, request: Request) -> Response:
        body = parse_request(ResponsesRequest, await self._json(request))
        session, response_id = self._admit(request, body), new_id(PREFIX)
        work = self._responses.answer(body, response_id, session)
        form = ResponsesFormat(self._model, body, response_id)
        return await self._respond(request, body, work, form)

    def _choices(self, kind: type[Choices], body: CommonRequest) -> Choices:
        usage, ids = body.include_usage, bool(body.return_token_ids)
        return kind(self._model, include_usage=usage, token_ids=ids)

    async def _embed(self, request: Request) -> Response:
        body = parse_request(EmbeddingRequest, await self._json(request))
        embedder = self._settings.embedder
        if embedder is None or body.model != embedder.name:
            known = "none" if embedder is None else repr(embedder.name)
            message = f"no encoder {body.model!r} here; there is {known} (--encoder)"
            raise ApiError(404, message, code="model_not_found", param="model")
        vectors = await self._asides.ask(lambda: np.asarray(embedder.encode(body.texts)))
        if body.dimensions not in (None, vectors.shape[1]):
            message = f"{body.model} has {vectors.shape[1]} dimensions"
            raise ApiError(400, message, param="dimensions")
        return JSONResponse(embeddings_body(body, vectors))

    async def _models(self, _: Request) -> Response:
        limit = {"max_model_len": self._gateway.engine.info.context_limit}
        common = {"object": "model", "created": 0, "owned_by": "kvbench", **limit}
        listed = [{"id": name, **common} for name in self._names]
        return JSONResponse({"object": "list", "data": listed})

    async def _health(self, _: Request) -> Response:
        about = {"engine": self._gateway.engine.info.name}
        try:
            self._gateway.check()
        except KVBenchError as error:  # no request will be answered any more
            return JSONResponse({"status": "gone", "error": str(error), **about}, 503)
        return JSONResponse({"status": "ok", **about})

    async def _show_metrics(self, _: Request) -> Response:
        gauges = {
            "kvbench_sessions": len(self._gateway.sessions()),
            "kvbench_requests_in_flight": self._pool.admitted,
        }
        # An engine in another process has to be asked.
        pool = await self._asides.ask(self._gateway.engine.pool)
        gauges |= {f"kvbench_pool_{name}": value for name, value in pool.items()}
        return PlainTextResponse(self._metrics.text(gauges), media_type="text/plain; version=0.0.4")

    async def _close_session(self, request: Request) -> Response:
        session = _checked(str(request.path_params["session"]))
        report = await self._asides.ask(lambda: self._gateway.close_report(session))
        expired = {"expired": True} if report.expired else {}
        account = report.as_dict()
        return JSONResponse({"id": session, "deleted": True, **expired, "kvbench": account})

    async def _respond(
        self, request: Request, body: CommonRequest, work: Work, form: Format
    ) -> Response:
        if self._stopping:
            raise _stopped()
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
        if _over_limit(result):
            message = f"{result.turn.prompt_tokens} prompt tokens are more than the context holds"
            raise ApiError(400, message, code="context_length_exceeded", param="messages")
        note = {NOTE_HEADER: result.report.note} if result.report.note else None
        return JSONResponse(form.body(result), headers=note)

    async def _events(self, items: AsyncIterator[Item], form: Format) -> AsyncIterator[bytes]:
        for chunk in form.first():
            yield form.frame(chunk)
        try:
            async for item in items:
                chunks = form.last(item) if isinstance(item, ChatResult) else form.pieces(item)
                for chunk in chunks:
                    yield form.frame(chunk)
        except Exception as error:  # noqa: BLE001 - the status line is sent already
            for chunk in form.failed(as_api_error(error)):
                yield form.frame(chunk)
        yield form.end

    def _admit(self, request: Request, body: CommonRequest) -> str | None:
        """Return the session a request names; refuse another model and unusable ids."""
        if body.model not in self._names:
            message = f"no model {body.model!r} here; this server runs {self._model!r}"
            raise ApiError(404, message, code="model_not_found", param="model")
        session = request.headers.get(SESSION_HEADER, body.session)
        if session is not None:
            self._gateway.touch(_checked(session))
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
        return read_json(await self._receive(request))

    async def _receive(self, request: Request) -> bytes:
        most, size, body = self._settings.max_body, 0, bytearray()
        try:
            async with asyncio.timeout(self._settings.body_timeout_s) as timeout:
                self._receiving.add(timeout)
                async for part in request.stream():
                    size += len(part)
                    # What is too much is taken all the same: a client that is hung up on while it
                    # sends sees a broken connection, not the answer.
                    body = body + part if size <= most else bytearray()
        except TimeoutError:
            if size <= most:
                late = ApiError(408, "the body took too long to arrive", code="timeout")
                raise _stopped() if self._stopping else late from None
        except ClientDisconnect:
            raise _left() from None
        finally:
            self._receiving.discard(timeout)
        if size > most:
            raise ApiError(413, f"the body is larger than {most} bytes", code="body_too_large")
        return bytes(body)

    async def _not_found(self, request: Request, _: Exception) -> Response:
        return self._no_route(ApiError(404, f"no such path: {request.url.path}", code="not_found"))

    async def _not_allowed(self, request: Request, _: Exception) -> Response:
        message = f"{request.method} is not allowed on {request.url.path}"
        return self._no_route(ApiError(405, message, code="method_not_allowed"))

    def _no_route(self, error: ApiError) -> Response:
        self._metrics.request("other", error.status)
        return _error_response(error)


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
        raise _left()
    return results[-1]


def _over_limit(item: Item | None) -> bool:
    if not isinstance(item, ChatResult):
        return False
    return item.finish_reason == "context_limit" and not item.token_ids


def _error_response(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body, status_code=error.status, headers=error.headers)


def _left() -> ApiError:
    return ApiError(499, "the client went away", code="cancelled")


def _stopped() -> ApiError:
    message = "the server is stopping; ask again when it is back"
    return ApiError(503, message, code="server_stopping", headers={"Retry-After": "5"})


def _checked(session: str) -> str:
    """Return a session id that a client gave, if it is one."""
    if not _SESSION_ID.fullmatch(session):
        message = "a session id is 1 to 256 printable ASCII characters without spaces"
        raise ApiError(400, message, param="session_id")
    return session


_START_TIMEOUT_S = 30.0


def run_server(
    gateway: AnyGateway, host: str, port: int, settings: ServerSettings | None = None
) -> None:
    """Serve a gateway until interrupted; PrerequisiteError if the port is taken."""
    settings = settings or ServerSettings()
    check_exposure(host, settings.api_key)
    api = HttpApi(gateway, settings)
    guarded = HostGuard(api.app(), host, settings.api_key, settings.allow_hosts)
    _run(guarded, host, port, answers=api, patience=settings.patience)


def run_app(app: ASGIApp, host: str, port: int, api_key: str | None = None) -> None:
    """Serve an application until interrupted; PrerequisiteError if the port is taken."""
    _run(HostGuard(app, host, api_key), host, port)


def _run(app: ASGIApp, host: str, port: int, **settings: Any) -> None:
    # uvicorn has shut down in good order when it passes a signal on; backends must end too.
    end_on_sigterm()
    with listen(host, port) as listener, suppress(KeyboardInterrupt):
        make_server(app, host, port, **settings).run(sockets=[listener])


class BackgroundServer:
    """Serves a gateway on a free loopback port from a thread; use it in a `with`.

    By default it needs no key, because only this machine can ask.
    """

    def __init__(
        self, gateway: AnyGateway, *, concurrency: int = 16, settings: ServerSettings | None = None
    ) -> None:
        settings = replace(settings or ServerSettings(), threads=concurrency)
        api, host = HttpApi(gateway, settings), "127.0.0.1"
        guarded = HostGuard(api.app(), host, settings.api_key, settings.allow_hosts)
        self._stop_s = settings.patience.drain_s + 5.0
        self._socket = listen(host, 0)
        self.port: int = self._socket.getsockname()[1]
        limits: dict[str, Any] = {"answers": api, "patience": settings.patience}
        self._server = make_server(guarded, host, self.port, log_level="warning", **limits)
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
            self._thread.join(self._stop_s)
        self._socket.close()
