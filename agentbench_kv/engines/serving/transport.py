"""HTTP over a Unix socket, and the server-sent events of an answer."""

from __future__ import annotations

import json
import socket
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx

from agentbench_kv.errors import KVBenchError, SessionFailedError

# A queue of prefills may come before the first token.
_TIMEOUT = httpx.Timeout(30.0, read=3600.0)
LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=32)


class UnixTransport(httpx.HTTPTransport):
    """HTTP over a Unix socket; one that could not connect is closed, which httpcore does not do."""

    def __init__(self, path: Path) -> None:
        super().__init__(uds=str(path), limits=LIMITS)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        try:
            return super().handle_request(request)
        except httpx.ConnectError as error:
            _close_sockets(error)
            raise


def _close_sockets(error: BaseException) -> None:
    """Close the sockets in the frames of what failed first: nothing else knows them any more."""
    while error.__cause__ is not None:
        error = error.__cause__
    for frame, _ in traceback.walk_tb(error.__traceback__):
        for value in frame.f_locals.values():
            if isinstance(value, socket.socket):
                value.close()


class RequestError(KVBenchError):
    """The backend read a request and refused it; the message is its own."""


class RequestFailedError(RequestError, SessionFailedError):
    """The backend failed with a request, which was as good as any."""


def request_error(message: str, *, refused: bool) -> RequestError:
    return RequestError(message) if refused else RequestFailedError(message)


def post_events(client: httpx.Client, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Post a request and yield its events up to `[DONE]`; closing it hangs up.

    RequestError if the backend refuses or fails, httpx.TransportError if the stream breaks off.
    """
    with client.stream("POST", path, json=body, timeout=_TIMEOUT) as response:
        if response.status_code != httpx.codes.OK:
            said = f"{response.status_code}: {response.read().decode(errors='replace')[:500]}"
            refused = response.status_code < httpx.codes.INTERNAL_SERVER_ERROR
            raise request_error(f"the backend answered {said}", refused=refused)
        for line in _lines(response.iter_bytes()):
            if not line.startswith(b"data:"):
                continue
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            event = _event(data)
            if "error" in event:
                raise RequestFailedError(f"the backend failed: {event['error']}")
            yield event
    # Or a server that dies in good order would end answers early.
    raise httpx.RemoteProtocolError("the answer broke off")


def _event(data: bytes) -> dict[str, Any]:
    try:
        event: dict[str, Any] = json.loads(data)
    except ValueError:
        raise httpx.RemoteProtocolError("the answer broke off within an event") from None
    return event


def _lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Split at newlines only: generated text may hold what Unicode calls a line's end."""
    rest = b""
    for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        yield from whole
    if rest:
        yield rest
