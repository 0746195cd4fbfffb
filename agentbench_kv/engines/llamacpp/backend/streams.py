"""Streams of generated tokens over a Unix socket, one connection each.

The harness sends a request and gets a line for every token. Where only the caller knows when to
stop, the request is *stepwise*: the harness asks for each token with a line of its own, and the
backend never feeds a token that the caller did not want.
"""

from __future__ import annotations

import json
import socketserver
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Stream:
    """One connection, written by the scheduler's thread and read by its own."""

    def __init__(self, write: Callable[[bytes], Any], wake: Callable[[], None]) -> None:
        self._write = write
        self._wake = wake
        self._lock = threading.Lock()
        self.stepwise = False
        self.ready = True  # the harness waits for the next token
        self.closed = False  # the harness has hung up
        self.ended = threading.Event()

    def send(self, document: dict[str, Any]) -> None:
        """Write one line; a connection that is gone is noted, not raised."""
        with self._lock:
            self.ready = not self.stepwise
            try:
                self._write(json.dumps(document).encode() + b"\n")
            except OSError:
                self.closed = True

    def finish(self, document: dict[str, Any]) -> None:
        """Write the last line."""
        self.send(document)
        self.ended.set()

    def asked(self) -> None:
        """Say that the harness wants the next token."""
        with self._lock:
            self.ready = True
        self._wake()

    def hung_up(self) -> None:
        """Say that the harness is gone."""
        self.closed = True
        self._wake()


class StreamServer:
    """Takes generations on threads of its own.

    `start` takes a request and its stream, and what it raises ends the stream; `wake` tells the
    scheduler that a stream has changed.
    """

    def __init__(
        self, path: Path, start: Callable[[dict[str, Any], Stream], None], wake: Callable[[], None]
    ) -> None:
        path.unlink(missing_ok=True)
        self._server = _Server(str(path), _Connection)
        self._server.start_generation = start
        self._server.wake = wake
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    request_queue_size = 1024
    start_generation: Callable[[dict[str, Any], Stream], None]
    wake: Callable[[], None]


class _Connection(socketserver.StreamRequestHandler):
    server: _Server

    def handle(self) -> None:
        stream = Stream(self.wfile.write, self.server.wake)
        try:
            self.server.start_generation(json.loads(self.rfile.readline()), stream)
        except Exception as error:  # noqa: BLE001  the harness is told
            stream.finish(error_document(error))
        for _ in self.rfile:
            stream.asked()
        stream.hung_up()


def error_document(error: Exception) -> dict[str, Any]:
    """Return what the harness is told of an error."""
    return {"error": {"kind": type(error).__name__, "message": str(error)}}
