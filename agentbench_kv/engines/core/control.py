"""What the harness may ask of an engine in another process, and the socket it asks on."""

from __future__ import annotations

import json
import socketserver
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Generic, SupportsInt, TypeVar

from agentbench_kv.engines.core.ledger import SessionLedger
from agentbench_kv.phases.machine import PromptPhases

Handler = Callable[[Mapping[str, Any]], Any]
# A command waits for the forward that runs: minutes, for a long piece of a prompt on a busy CPU.
COMMAND_S = 600.0


class ControlServer(socketserver.ThreadingUnixStreamServer):
    """Answers commands on a thread of its own until the process ends.

    A request is one line `{"command": NAME, ...}`, its answer one line `{"ok": ...}` or
    `{"error": TEXT}`. Handlers run on the channel's threads. Whoever may open the socket may
    command the engine, so it lies in a private folder.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, path: Path, commands: Mapping[str, Handler]) -> None:
        path.unlink(missing_ok=True)
        super().__init__(str(path), _CommandConnection)
        self.commands = commands
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()


class _CommandConnection(socketserver.StreamRequestHandler):
    server: ControlServer

    def handle(self) -> None:
        for line in self.rfile:
            self.wfile.write(json.dumps(self._answer(line)).encode() + b"\n")

    def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            request = json.loads(line)
            return {"ok": self.server.commands[request["command"]](request)}
        except Exception as error:  # noqa: BLE001  the harness shows it; the engine goes on
            return {"error": f"{type(error).__name__}: {error}"}


@dataclass
class GivenAnswer:
    """Tokens that a generation takes as if it had drawn them."""

    tokens: Sequence[int]
    # Place -> what a greedy draw gave there; perhaps still on a device.
    best: dict[int, SupportsInt] = field(default_factory=dict)

    def own(self) -> list[int]:
        """Return what was drawn in the places from the first on."""
        return [int(self.best[place]) for place in sorted(self.best)]


@dataclass
class SchedulerSession(ABC):
    """One session as a scheduler knows it, or one request without a session."""

    name: str
    ledger: SessionLedger
    lasting: bool  # it outlives its request; a request without a session does not
    prompt: PromptPhases = field(default_factory=PromptPhases, kw_only=True)
    # Tokens and phases of the rows that it may share, until it has begun; None: it shares none.
    prefix_key: bytes | None = field(default=None, kw_only=True)
    prefix_tokens: int = field(default=0, kw_only=True)
    given: GivenAnswer | None = field(default=None, kw_only=True)  # of the last generation

    @property
    @abstractmethod
    def running(self) -> bool:
        """Whether a request of it is queued or generates."""


_Session = TypeVar("_Session", bound=SchedulerSession)


class SessionCommands(ABC, Generic[_Session]):
    """What the harness may ask of a scheduler with our plug-in."""

    def __init__(self, sessions: Mapping[str, _Session]) -> None:
        self._sessions = sessions  # by name; the scheduler's own

    def handlers(self) -> dict[str, Handler]:
        return {
            "ping": lambda _: True,
            "stats": self._stats,
            "close": self._close,
            "best": self._best,
            "pool": self._pool,
            "configure": self._configure,
            "drop_prefixes": lambda _: self.drop_prefixes(),
        }

    @abstractmethod
    def abort(self, session: _Session) -> None:
        """End the request of a running session."""

    @abstractmethod
    def forget(self, session: _Session) -> None:
        """Free the rows of a session and forget it."""

    @abstractmethod
    def figures(self) -> dict[str, int]:
        """Return what there is of memory and requests."""

    @abstractmethod
    def use(self, method: dict[str, Any]) -> None:
        """Go on with the method of a document; no session is open."""

    @abstractmethod
    def drop_prefixes(self) -> None:
        """Drop the shared prefixes that no session reads."""

    def _stats(self, request: Mapping[str, Any]) -> dict[str, Any] | None:
        session = self._sessions.get(request["session"])
        return None if session is None else asdict(session.ledger.snapshot())

    def _close(self, request: Mapping[str, Any]) -> dict[str, Any] | None:
        session = self._sessions.get(request["session"])
        if session is None:
            return None
        if session.running:
            self.abort(session)
        stats = asdict(session.ledger.snapshot())
        self.forget(session)
        return stats

    def _best(self, request: Mapping[str, Any]) -> list[int]:
        """Return what the model would have drawn in place of a session's last given tokens."""
        given = self._sessions[request["session"]].given
        return [] if given is None else given.own()

    def _pool(self, request: Mapping[str, Any]) -> dict[str, int]:  # noqa: ARG002
        resting = sum(not session.running for session in self._sessions.values())
        return {**self.figures(), "sessions": len(self._sessions), "resting": resting}

    def _configure(self, request: Mapping[str, Any]) -> None:
        if self._sessions:
            raise ValueError(f"{len(self._sessions)} sessions are open; close them first")
        self.use(request["method"])
