"""What every gateway does with sessions: names, locks, limits, cancelling, final accounts."""

from __future__ import annotations

import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from agentbench_kv.engines.base import Engine, KVStats
from agentbench_kv.errors import KVBenchError, UsageError
from agentbench_kv.gateway.accounting import SessionReport, TurnInfo
from agentbench_kv.gateway.cancellation import Cancellation
from agentbench_kv.gateway.messages import Message
from agentbench_kv.gateway.session import BaseSession
from agentbench_kv.gateway.types import (
    Answer,
    ChatResult,
    Options,
    SessionBusyError,
    SessionLimitError,
    UnknownSessionError,
)

# Not a name the HTTP surface lets through.
_ONE_SHOT = "one shot "
_CLOSE_WAIT_S = 60.0


@dataclass(frozen=True)
class Request:
    """What a client asks: `messages` with `tools`, or a raw `prompt` of text or ids."""

    options: Options
    cancellation: Cancellation
    messages: Sequence[Message] = ()
    tools: Sequence[Mapping[str, Any]] | None = None
    prompt: str | Sequence[int] | None = None


S = TypeVar("S", bound=BaseSession)


class BaseGateway(ABC, Generic[S]):
    """Sessions over an engine. Thread-safe.

    A session answers one request at a time; a second one at the same moment is refused with
    `SessionBusyError`, not queued, because it cannot extend a log that is still being written.
    Requests without a session get one of their own, closed when they are answered.

    `on_turn` is called after every answered turn, in the request's thread, with session id and
    figures; `on_close` with the final accounting of every session.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_sessions: int = 1024,
        default_max_tokens: int = 1024,
        on_turn: Callable[[str, TurnInfo], None] | None = None,
        on_close: Callable[[SessionReport], None] | None = None,
    ) -> None:
        self.engine = engine
        self.max_sessions = max_sessions
        self.default_max_tokens = default_max_tokens
        self.on_turn = on_turn
        self.on_close = on_close
        self._sessions: dict[str, S] = {}
        self._closed: dict[str, SessionReport] = {}
        self._cancelled: set[str] = set()
        self._lock = threading.Lock()
        self._one_shots = itertools.count(1)
        self._fatal: KVBenchError | None = None

    @abstractmethod
    def provenance(self) -> dict[str, Any]:
        """Return what the text side contributes to a run's record."""

    @abstractmethod
    def _new_session(self, name: str) -> S:
        """Return a session that is not open yet."""

    @abstractmethod
    def _answer(self, state: S, request: Request) -> Answer:
        """Answer in a session that the request owns; see `stream` and `stream_complete`."""

    def stream(
        self,
        session: str | None,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Options | None = None,
        cancellation: Cancellation | None = None,
    ) -> Answer:
        """Yield the answer's deltas, then the `ChatResult`. Closing it early cancels."""
        asked = Request(options or Options(), cancellation or Cancellation(), messages, tools)
        return self._stream(session, asked)

    def stream_complete(
        self,
        session: str | None,
        prompt: str | Sequence[int],
        options: Options | None = None,
        cancellation: Cancellation | None = None,
    ) -> Answer:
        """Yield the text's deltas, then the `ChatResult`. Closing it early cancels."""
        asked = Request(options or Options(), cancellation or Cancellation(), prompt=prompt)
        return self._stream(session, asked)

    def check(self) -> None:
        """Raise what ends a whole run: a dead endpoint, money spent."""
        if self._fatal is not None:
            raise self._fatal

    def chat(
        self,
        session: str | None,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Options | None = None,
        cancellation: Cancellation | None = None,
    ) -> ChatResult:
        """Answer a chat request whose `messages` are the whole history."""
        return _last(self.stream(session, messages, tools, options, cancellation))

    def complete(
        self,
        session: str | None,
        prompt: str | Sequence[int],
        options: Options | None = None,
        cancellation: Cancellation | None = None,
    ) -> ChatResult:
        """Answer a raw completion; the text is `content`, as generated.

        In a session the prompt is the whole text so far: the last prompt, the text generated for
        it, the stop that ended it, and what is new. Ids must extend the token log.
        """
        return _last(self.stream_complete(session, prompt, options, cancellation))

    def close_report(self, session: str) -> SessionReport:
        """Free a session and return its final report; a request it is answering is cancelled."""
        try:
            self._find(session)
            self.cancel(session)
            with self._owned(session, wait_s=_CLOSE_WAIT_S) as state:
                return self._drop(state)
        finally:
            with self._lock:
                self._cancelled.discard(session)

    def cancel(self, session: str) -> None:
        """End the request a session is answering, and every later one until it is closed.

        From any thread, at any time: a session that is not open yet is cancelled in advance.
        """
        with self._lock:
            self._cancelled.add(session)
            state = self._sessions.get(session)
            running = state.running if state else None
        if running is not None:
            running.cancel()

    def stats(self, session: str) -> KVStats:
        return self._find(session).stats()

    def report(self, session: str) -> SessionReport:
        """Return a session's turns and accounting so far, or its final ones when it is closed.

        The last `max_sessions` closed ones are remembered.
        """
        with self._lock:
            state, final = self._sessions.get(session), self._closed.get(session)
        if state is None and final is not None:
            return final
        return self._find(session).report()

    def sessions(self) -> list[str]:
        with self._lock:
            return sorted(self._sessions)

    def _stream(self, session: str | None, request: Request) -> Answer:
        """Answer in a session; one without a name lives as long as its request."""
        name = session or f"{_ONE_SHOT}{next(self._one_shots)}"
        with self._owned(name) as state:
            try:
                with self._lock:
                    state.running = request.cancellation
                    cancelled = name in self._cancelled
                if cancelled:
                    request.cancellation.cancel()
                yield from self._answer(state, request)
            finally:
                state.running = None
                if session is None or not state.opened:
                    self._drop(state)

    @contextmanager
    def _owned(self, name: str, wait_s: float = 0.0) -> Iterator[S]:
        """Hold a session's lock; a session that was closed meanwhile is replaced by a new one."""
        while True:
            state = self._find_or_add(name)
            if not state.lock.acquire(timeout=wait_s):
                raise SessionBusyError(
                    f"session {name!r} is answering another request; wait for it to end"
                )
            if not state.gone:
                break
            state.lock.release()
        try:
            yield state
        finally:
            state.lock.release()

    def _find_or_add(self, name: str) -> S:
        with self._lock:
            if name not in self._sessions:
                if len(self._sessions) >= self.max_sessions:
                    raise SessionLimitError(
                        f"all {self.max_sessions} sessions are in use; close one first"
                    )
                self._sessions[name] = self._new_session(name)
            return self._sessions[name]

    def _find(self, name: str) -> S:
        with self._lock:
            if name not in self._sessions:
                raise UnknownSessionError(f"no open session {name!r}")
            return self._sessions[name]

    def _drop(self, state: S) -> SessionReport:
        """Close a session its caller owns; its name is free once the engine has let go of it."""
        used = state.opened
        try:
            report = state.close()
        finally:
            state.gone = True
            with self._lock:
                self._sessions.pop(state.id, None)
        if used and not state.id.startswith(_ONE_SHOT):
            with self._lock:
                self._closed.pop(state.id, None)
                self._closed[state.id] = report
                while len(self._closed) > self.max_sessions:
                    self._closed.pop(next(iter(self._closed)))
        if used and self.on_close:
            self.on_close(report)
        return report


AnyGateway = BaseGateway[Any]


def _last(items: Answer) -> ChatResult:
    results = [item for item in items if isinstance(item, ChatResult)]
    if not results:
        raise UsageError("the request ended without an answer")
    return results[-1]
