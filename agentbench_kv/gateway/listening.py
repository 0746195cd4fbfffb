"""The ports of HTTP servers: who may call, how long a client may take, and how a server stops."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import math
import os
import resource
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from types import FrameType
from typing import Any, Protocol
from urllib.parse import urlsplit

import h11
import uvicorn
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from agentbench_kv.errors import PrerequisiteError, UsageError
from agentbench_kv.gateway.api_errors import ApiError

_log = logging.getLogger(__name__)

# What uvicorn has left to write the last answers, after `drain_s`.
_WRITE_LAST_S = 3.0
_ENGINE_STOP_S = 30.0
_KEEP_ALIVE_S = 75


def _most_connections() -> int:
    """Return how many files a process may have open, less a quarter that the engine may need."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 2**20 if limit == resource.RLIM_INFINITY else limit * 3 // 4


@dataclass(frozen=True)
class Patience:
    """How long a server waits for clients, in seconds, and for how many at once."""

    headers_s: float = 15.0  # for a request line with all headers, from the first wait on
    write_s: float = 60.0  # for a client that takes nothing of a long answer
    drain_s: float = 5.0  # for answers in flight when the server is told to stop
    connections: int = field(default_factory=_most_connections)


class Connection(H11Protocol):
    """An HTTP/1.1 connection whose client may take only so long.

    uvicorn itself waits for ever for the rest of a request's headers and for a client that does not
    read.
    """

    def __init__(self, patience: Patience, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._patience = patience
        self._late: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._patience.connections:
            self._refuse(ApiError(503, "too many connections; try again later", code="busy"))
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._late, self._unread):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(self._patience.write_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, msg, code="invalid_http"))

    def _watch(self) -> None:
        """Start the clock when the client's turn begins, stop it when it ends."""
        if self._waits() == (self._late is not None):
            return
        if self._late is None:
            self._late = self.loop.call_later(self._patience.headers_s, self._end_late)
        else:
            self._late.cancel()
            self._late = None

    def _waits(self) -> bool:
        """Whether headers are due, or the rest of a body that was answered already."""
        if self.conn.their_state is h11.IDLE:
            # Between two requests uvicorn's own clock runs; half of the second may be there.
            return self.timeout_keep_alive_task is None or bool(self.conn.trailing_data[0])
        answered = self.cycle is not None and self.cycle.response_complete
        return self.conn.their_state is h11.SEND_BODY and answered

    def _end_late(self) -> None:
        if self.transport.is_closing():
            return
        self._refuse(ApiError(408, "the request's headers took too long", code="timeout"))

    def _refuse(self, error: ApiError) -> None:
        """Answer outside of any request and hang up."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()
            return
        body = json.dumps(error.body).encode()
        headers = {"Content-Type": "application/json", "Content-Length": str(len(body))}
        headers |= {"Connection": "close"}
        head = h11.Response(
            status_code=error.status,
            headers=list(headers.items()),
            reason=HTTPStatus(error.status).phrase,
        )
        for event in (head, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


def _is_local(name: str) -> bool:
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:  # a name
        return False


def check_exposure(host: str, api_key: str | None) -> None:
    """Refuse to be reachable from other machines without a key."""
    if not api_key and not _is_local(host):
        raise UsageError(
            f"{host!r} can be reached from other machines and no API key is set; "
            "set KVBENCH_API_KEY, or bind 127.0.0.1"
        )


class HostGuard:
    """Lets requests through that call this machine by one of its names, from a page of its own.

    Any web page can make a browser on this machine send requests here, and a page whose name
    changes its address (DNS rebinding) can read the answers. Both show in Host or Origin. A key
    keeps such pages out by itself, so with one all names are allowed unless some are given.
    """

    def __init__(
        self, app: ASGIApp, host: str, api_key: str | None, allowed: Sequence[str] = ()
    ) -> None:
        self._app = app
        self._names = {name.lower() for name in (host, *allowed)}
        self._open = "*" in self._names or (bool(api_key) and not allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = None
        if scope["type"] == "http" and not self._open:
            error = self._wrong(Headers(scope=scope))
        if error is None:
            await self._app(scope, receive, send)
        else:
            await JSONResponse(error.body, error.status)(scope, receive, send)

    def _wrong(self, headers: Headers) -> ApiError | None:
        host, origin = headers.get("host", ""), headers.get("origin")
        for title, url in (("Host", f"//{host}"), ("Origin", origin)):
            if url is not None and not self._allows(url):
                shown = url.removeprefix("//")[:100]
                message = f"{title} {shown!r} is not allowed here; see kvbench serve --allow-host"
                return ApiError(403, message, code=f"{title.lower()}_not_allowed")
        return None

    def _allows(self, url: str) -> bool:
        try:
            name = (urlsplit(url).hostname or "").removesuffix(".")
        except ValueError:
            return False
        return name in self._names or _is_local(name)


class Answers(Protocol):
    """The requests in flight of an application."""

    @property
    def busy(self) -> bool:
        """Whether any request is being answered."""

    def refuse_new(self) -> None:
        """Answer no more requests."""

    def end_all(self) -> None:
        """End those in flight with an error."""


class StoppingServer(uvicorn.Server):
    """A uvicorn server that ends what is in flight in good order before it stops.

    A second signal ends it at once.
    """

    def __init__(self, config: uvicorn.Config, answers: Answers | None, patience: Patience) -> None:
        super().__init__(config)
        self._answers = answers
        self._patience = patience

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        drain = asyncio.create_task(self._drain())
        await super().shutdown(sockets)
        drain.cancel()
        if self.force_exit:  # uvicorn leaves it waiting, and what ends the loop prints a traceback
            await self.lifespan.shutdown()

    async def _drain(self) -> None:
        if self._answers is None:
            return
        self._answers.refuse_new()
        loop = asyncio.get_running_loop()
        end = loop.time() + self._patience.drain_s
        while self._answers.busy and not self.force_exit and loop.time() < end:
            await asyncio.sleep(0.05)
        self._answers.end_all()


def make_server(
    app: ASGIApp,
    host: str,
    port: int,
    *,
    answers: Answers | None = None,
    patience: Patience | None = None,
    log_level: str = "info",
) -> StoppingServer:
    """Return a server for an application; `run` it with a socket of `listen`."""
    patience = patience or Patience()
    plain: dict[str, Any] = {"access_log": False, "ws": "none", "server_header": False}
    plain |= {"lifespan": "on", "http": partial(Connection, patience)}
    # Longer than clients keep idle connections: whoever closes first must not be the server, or a
    # request that is on its way is lost.
    plain |= {"timeout_keep_alive": _KEEP_ALIVE_S}
    plain |= {"timeout_graceful_shutdown": math.ceil(patience.drain_s + _WRITE_LAST_S)}
    config = uvicorn.Config(app, host=host, port=port, log_level=log_level, **plain)
    return StoppingServer(config, answers, patience)


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; PrerequisiteError if the port is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise PrerequisiteError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; choose another --port"
        ) from error
    # Accepted sockets inherit it. asyncio sets it only on those whose `proto` says TCP, which is 0
    # here; without it a stream's second piece waits for the acknowledgement of the first (40 ms).
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def end_on_sigterm() -> None:
    """Take SIGTERM for Ctrl-C from now on, so that engines are shut down."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)


@contextmanager
def ends_soon(what: str, seconds: float = _ENGINE_STOP_S) -> Iterator[None]:
    """End the whole process if the block takes longer."""

    def end() -> None:
        _log.error("kvbench: %s has not stopped in %g s; ended as it is", what, seconds)
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
