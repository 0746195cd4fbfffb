"""Running the application: in the foreground, or in a thread for benchmarks that need a URL."""

from __future__ import annotations

import ipaddress
import signal
import socket
import threading
import time
from contextlib import suppress
from dataclasses import replace
from typing import Self

import uvicorn
from starlette.applications import Starlette

from agentbench_kv.errors import PrerequisiteError, UsageError
from agentbench_kv.gateway.app import HttpApi, ServerSettings
from agentbench_kv.gateway.base import AnyGateway

__all__ = ["BackgroundServer", "ServerSettings", "check_exposure", "run_server"]

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
    # uvicorn has shut down in good order when it passes a signal on; backends must end too.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    with _listen(host, port) as listener, suppress(KeyboardInterrupt):
        config = _config(HttpApi(gateway, settings).app(), host, port, log_level="info")
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
    return uvicorn.Config(
        app,
        host=host,
        port=port,
        log_level=log_level,
        access_log=False,
        ws="none",
        lifespan="on",
        server_header=False,
        timeout_graceful_shutdown=_STOP_TIMEOUT_S,
    )
