"""The control channel: JSON lines over a Unix socket, answered inside the engine's process."""

from __future__ import annotations

import json
import socketserver
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Handler = Callable[[Mapping[str, Any]], Any]


class ControlServer:
    """Answers commands on a thread of its own until the process ends.

    A request is one line `{"command": NAME, ...}`, its answer one line `{"ok": ...}` or
    `{"error": TEXT}`. Handlers run on the channel's threads. Whoever may open the socket may
    command the engine, so it lies in a private folder.
    """

    def __init__(self, path: Path, commands: Mapping[str, Handler]) -> None:
        path.unlink(missing_ok=True)
        self._server = _Server(str(path), _Connection)
        self._server.commands = commands
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    request_queue_size = 128
    commands: Mapping[str, Handler]


class _Connection(socketserver.StreamRequestHandler):
    server: _Server

    def handle(self) -> None:
        for line in self.rfile:
            self.wfile.write(json.dumps(self._answer(line)).encode() + b"\n")

    def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            request = json.loads(line)
            return {"ok": self.server.commands[request["command"]](request)}
        except Exception as error:  # noqa: BLE001  the harness shows it; the engine goes on
            return {"error": f"{type(error).__name__}: {error}"}
