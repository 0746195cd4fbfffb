"""The harness's commands, queued to run on the scheduler's own thread between two steps."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

Command = Callable[[Mapping[str, Any]], Any]

_PATIENCE_S = 60.0


class CommandQueue:
    """Takes commands on any thread; `serve` runs them on the scheduler's."""

    def __init__(self, commands: Mapping[str, Command]) -> None:
        self._waiting: deque[tuple[Command, Mapping[str, Any], Future[Any]]] = deque()
        # Readable when a command waits, for whoever sleeps on file descriptors.
        self.bell, self._ring = os.pipe()
        os.set_blocking(self.bell, False)
        self.commands = {name: self._forwarding(command) for name, command in commands.items()}

    def serve(self) -> None:
        while self._waiting:
            command, request, done = self._waiting.popleft()
            with contextlib.suppress(BlockingIOError):
                os.read(self.bell, 1)
            try:
                done.set_result(command(request))
            except Exception as error:  # noqa: BLE001  the harness is told; the engine goes on
                done.set_exception(error)

    def _forwarding(self, command: Command) -> Command:
        def forward(request: Mapping[str, Any]) -> Any:
            done: Future[Any] = Future()
            self._waiting.append((command, request, done))
            os.write(self._ring, b"!")
            return done.result(_PATIENCE_S)

        return forward
