"""The harness's end of the control channel."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path
from typing import Any

from agentbench_kv.errors import KVBenchError


class ControlError(KVBenchError):
    """The backend refused a command; the message is its own."""


class ControlClient:
    """Sends commands, one at a time, and reconnects after a restart. Thread-safe."""

    def __init__(self, path: Path, timeout_s: float = 60.0) -> None:
        self._path = path
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None

    def call(self, command: str, **arguments: Any) -> Any:
        """Return the answer; OSError if the backend is not there, ControlError if it refused."""
        with self._lock:
            try:
                answer = self._exchange({"command": command, **arguments})
            except (OSError, ValueError):
                self._disconnect()
                raise
        if "error" in answer:
            raise ControlError(str(answer["error"]))
        return answer["ok"]

    def answers(self) -> bool:
        """Return whether the backend answers."""
        try:
            self.call("ping")
        except (OSError, ControlError):
            return False
        return True

    def close(self) -> None:
        with self._lock:
            self._disconnect()

    def _exchange(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._socket is None:
            self._socket = self._connect()
        self._socket.sendall(json.dumps(request).encode() + b"\n")
        line = self._lines.readline()
        if not line:
            raise ConnectionResetError("the backend hung up")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _connect(self) -> socket.socket:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            made.settimeout(self._timeout_s)
            made.connect(str(self._path))
        except OSError:
            made.close()
            raise
        self._lines = made.makefile("rb")
        return made

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._lines.close()
            self._socket.close()
            self._socket = None
