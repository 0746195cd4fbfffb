"""Sessions over an engine: names, locks, limits, cancelling, expiry, final accounts."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from agentbench_kv.adapters.base import LastUses
from agentbench_kv.engines.base import Capability, Engine, KVStats
from agentbench_kv.errors import EngineGoneError, KVBenchError, UsageError
from agentbench_kv.gateway.exchange import Answer, Cancellation, ChatResult, Options
from agentbench_kv.gateway.headerless import HINT, HINT_AFTER, Conversations, Opening
from agentbench_kv.gateway.memory import Memories
from agentbench_kv.gateway.messages import Message
from agentbench_kv.gateway.reports import SessionReport, TurnInfo
from agentbench_kv.gateway.session import (
    BaseSession,
    Known,
    SessionBusyError,
    SessionLimitError,
    UnknownSessionError,
)

# Of sessions that no client named: nothing that the HTTP surface lets through.
_UNNAMED = "one shot "
# For a request that was cancelled: a forward of long prompts goes on, which takes minutes on a CPU
# that has other work.
_CLOSE_WAIT_S = 600.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Request:
    """What a client asks: `messages`, or a raw `prompt` of text or ids; either with `tools`."""

    options: Options
    cancellation: Cancellation
    messages: Sequence[Message] = ()
    tools: Sequence[Mapping[str, Any]] | None = None
    prompt: str | Sequence[int] | None = None
    said: Message | None = None  # the answer, where it is given
    # Of a prompt of ids, those that the session has not had: its client drops messages itself.
    new_tokens: int | None = None


S = TypeVar("S", bound=BaseSession)


class BaseGateway(ABC, Generic[S]):
    """Sessions over an engine. Thread-safe.

    A session answers one request at a time; a second one at the same moment is refused with
    `SessionBusyError`, not queued, because it cannot extend a log that is still being written.
    Requests without a session get one of their own, closed when they are answered. With
    `conversations` the sessions of that many such chats live on: a request whose messages extend
    the answer of exactly one of them goes on in its session, see `headerless`.

    `max_sessions` bounds the named sessions. `expire` closes those that had no request for `idle_s`
    seconds; a request that names one of them again is answered, and its `note` says what happened.

    `on_turn` is called after every answered turn, in the request's thread, with session id and
    figures; `on_close` with the final accounting of every session.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_sessions: int = 1024,
        default_max_tokens: int = 1024,
        idle_s: float | None = None,
        conversations: int = 0,
        on_turn: Callable[[str, TurnInfo], None] | None = None,
        on_close: Callable[[SessionReport], None] | None = None,
    ) -> None:
        self.engine = engine
        self.max_sessions = max_sessions
        self.default_max_tokens = default_max_tokens
        self.idle_s = idle_s
        self.clock = time.monotonic
        self.on_turn = on_turn
        self.on_close = on_close
        self._sessions: dict[str, S] = {}
        self._closed: dict[str, SessionReport] = {}
        self._cancelled: set[str] = set()
        self._foreseen: dict[str, LastUses] = {}
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._conversations = Conversations(conversations)
        self.keeps_conversations = conversations > 0
        self._hint_due = not conversations
        self._unread_due = True
        self._fatal: KVBenchError | None = None
        self._stopped = False

    memories: Memories | None = None  # under a method that has a memory
    ends_run = True  # whether a request that no trial could do without, and is refused, ends it

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
        tools: Sequence[Mapping[str, Any]] | None = None,
        new_tokens: int | None = None,
    ) -> Answer:
        """Yield the text's deltas, then the `ChatResult`. Closing it early cancels.

        With `tools`, which the prompt must explain itself, the answer is read as in a chat. With
        `new_tokens`, under a method that drops messages, ids may be the history without what the
        client has dropped; so many of them are new.
        """
        given = (options or Options(), cancellation or Cancellation())
        asked = Request(*given, tools=tools, prompt=prompt, new_tokens=new_tokens)
        return self._stream(session, asked)

    def check(self) -> None:
        """Raise what ends a whole run: an engine that is gone, a dead endpoint, money spent."""
        if self._fatal is not None:
            raise self._fatal

    def stop(self, reason: KVBenchError) -> None:
        """End every request, and refuse every later one, with `reason`; the first reason counts.

        Nothing that was cut off passes for an answer: `check` raises from now on.
        """
        with self._lock:
            self._fatal, self._stopped = self._fatal or reason, True
            running = [state.running for state in self._sessions.values() if state.running]
        for request in running:
            request.cancel()

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

    def force(
        self,
        session: str,
        messages: Sequence[Message],
        said: Message,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> ChatResult:
        """Have a session answer a chat request with a given message, as if the model wrote it.

        UsageError if the engine cannot.
        """
        self._require(Capability.FORCE)
        given = Request(Options(), Cancellation(), messages, tools, said=said)
        return _last(self._stream(session, given))

    def fork(self, session: str, new: str) -> None:
        """Open a session that goes on from where another one is; the two are apart from then on.

        UsageError if the engine cannot, UnknownSessionError if there is no such session.
        """
        self._require(Capability.FORK)
        self._find(session)
        if self.memories is not None:
            self.memories.settle(session)
        with self._owned(session) as state:
            twin = self._fork_of(state, new)
        with self._lock:
            twin.used_at = self.clock()
            self._sessions[new] = twin

    def places(self, session: str, texts: Sequence[str]) -> list[list[int]]:  # noqa: ARG002
        """Return, for each text, the positions of the tokens it begins with, all over a session.

        A part of a longer word or number is no such place. UsageError if the session has no
        tokens.
        """
        raise UsageError(f"engine {self.engine.info.name!r} shows no tokens of session {session!r}")

    def _require(self, capability: Capability) -> None:
        info = self.engine.info
        if capability not in info.capabilities:
            raise UsageError(
                f"engine {info.name!r} has no {capability.value}; kvbench ls engines shows who has"
            )

    def _fork_of(self, state: S, new: str) -> S:  # noqa: ARG002
        """Return a new session, open, that goes on from one that its caller owns."""
        raise UsageError(f"engine {self.engine.info.name!r} forks no session like {state.id!r}")

    def foresee(self, session: str, last_uses: LastUses) -> None:
        """Tell when a session, not open yet, last needs its tool results; forgotten as it opens."""
        with self._lock:
            self._foreseen[session] = last_uses

    def close_report(self, session: str) -> SessionReport:
        """Free a session and return its final report; a request it is answering is cancelled.

        That of a session that has expired is still there, once.
        """
        try:
            if (final := self._take_expired(session)) is not None:
                return final
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

    def touch(self, session: str) -> None:
        """Note that somebody asks a session, though its request may have to wait or be refused."""
        with self._lock:
            if session in self._sessions:
                self._sessions[session].used_at = self.clock()

    def expire(self) -> list[SessionReport]:
        """Close every session that was idle for too long; return their final reports."""
        if self.idle_s is None:
            return []
        with self._lock:
            states = list(self._sessions.values())
        return [report for state in states if (report := self._expired(state)) is not None]

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
        """Answer in a session; one without a name lives as long as its request or conversation."""
        if self.memories is not None and session is not None:
            self.memories.settle(session)
            if request.prompt is None:
                shown = self.memories.shown(session, request.messages)
                request = replace(request, messages=shown)
        opening = self._open(session, request)
        name = session or opening.session or f"{_UNNAMED}{next(self._numbers)}"
        result: ChatResult | None = None
        given_up: list[str] = []
        # A conversation's last request may not be over, though it is answered.
        with self._owned(name, wait_s=_CLOSE_WAIT_S if opening.session else 0.0) as state:
            try:
                self._begin(state, request, opening)
                for item in self._guarded(state, request):
                    if isinstance(item, ChatResult):
                        result = item
                    else:
                        yield item
            finally:
                if session is None:
                    given_up = self._ended(state, opening, answered=result is not None)
                state.running, state.note, state.used_at = None, "", self.clock()
                if name in given_up or not state.opened:
                    self._drop(state)
            if result is not None:
                self._remember_turn(state)
        for other in given_up:
            with suppress(UnknownSessionError):
                self.close_report(other)
        # Last, so that whoever has the answer can go on from it.
        if result is not None:
            yield result

    def _remember_turn(self, state: S) -> None:
        """Have what a finished turn read and wrote added to a memory, where that is wanted."""

    def _open(self, session: str | None, request: Request) -> Opening:
        """Return what a request without a session goes on from."""
        if session is not None or request.prompt is not None:
            return Opening()
        return self._conversations.claim(Known.of_chat(request.messages, request.tools))

    def _begin(self, state: S, request: Request, opening: Opening) -> None:
        if self._hint_due and opening.requests + 1 == HINT_AFTER:
            self._hint_due = False
            state.note = HINT
            _log.warning("kvbench: %s", HINT)
        with self._lock:
            state.running = request.cancellation
            cancelled = state.id in self._cancelled
        if cancelled:
            request.cancellation.cancel()

    def _ended(self, state: S, opening: Opening, *, answered: bool) -> list[str]:
        """Return the sessions to close after a request without a name; most often its own."""
        if not answered or state.known is None or state.known.text is not None:
            return [state.id]
        kept = state.id if self.keeps_conversations else None
        given_up = self._conversations.answered(state.known, Opening(kept, opening.requests + 1))
        return given_up if kept else [state.id]

    def _guarded(self, state: S, request: Request) -> Answer:
        """Answer unless the gateway is stopped meanwhile; remember an engine that is gone."""
        try:
            self._check_stopped()
            yield from self._answer(state, request)
            self._check_stopped()
        except EngineGoneError as error:
            self._fatal = self._fatal or error
            raise

    def _check_stopped(self) -> None:
        if self._stopped:
            self.check()

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
                self._check_room(name)
                state = self._sessions[name] = self._new_session(name)
                state.remembers = self.memories is not None and bool(self.memories.bank_of(name))
                foreseen = self._foreseen.pop(name, None)
                if state.drops is not None:
                    state.drops.last_uses = foreseen
                state.used_at = self.clock()
                old = self._closed.get(name)
                if old is not None and old.expired:
                    state.resets = old.resets + 1
                    state.note = f"session {name!r} had expired, so this is a fresh cache"
            return self._sessions[name]

    def _check_room(self, name: str) -> None:
        """Refuse one named session too many; those without a name end with their requests."""
        if name.startswith(_UNNAMED) or len(self._sessions) < self.max_sessions:
            return
        if sum(not name.startswith(_UNNAMED) for name in self._sessions) >= self.max_sessions:
            raise SessionLimitError(f"all {self.max_sessions} sessions are in use; close one first")

    def _find(self, name: str) -> S:
        with self._lock:
            if name not in self._sessions:
                raise UnknownSessionError(f"no open session {name!r}")
            return self._sessions[name]

    def _expired(self, state: S) -> SessionReport | None:
        """Close a session if nobody asked it for too long and nobody asks it now."""
        if self.idle_s is None or self.clock() - state.used_at < self.idle_s:
            return None
        if not state.lock.acquire(blocking=False):
            return None
        try:
            if state.gone or self.clock() - state.used_at < self.idle_s:
                return None
            report = self._drop(state, expired=True)
            _log.info(
                "kvbench: session %s expired: no request for %g s; %d turns, %d tokens live",
                report.session, self.idle_s, len(report.turns), report.stats.live,
            )  # fmt: skip
            return report
        except Exception:  # noqa: BLE001  the others still have to be closed
            _log.exception("kvbench: session %s expired and could not be closed", state.id)
            return None
        finally:
            state.lock.release()

    def _take_expired(self, session: str) -> SessionReport | None:
        """Return the final report of a session that has expired, to the first who closes it."""
        with self._lock:
            final = self._closed.get(session)
            if session in self._sessions or final is None or not final.expired:
                return None
            self._closed[session] = replace(final, expired=False)
            return final

    def _answered(self, state: S) -> None:
        """Report a turn; a server's first one whose calls nobody reads to the log, too.

        A run counts them, and says so at its end.
        """
        turn = state.turns[-1]
        if turn.unread_syntax and self._unread_due and self.on_turn:
            self._unread_due = False
            _log.warning(
                "kvbench: an answer in session %s writes its calls as %s and is read as %s; none "
                "of them was run", state.id, turn.unread_syntax, self.provenance()["tool_parser"],
            )  # fmt: skip
        if self.on_turn:
            self.on_turn(state.id, turn)

    def _drop(self, state: S, *, expired: bool = False) -> SessionReport:
        """Close a session its caller owns; its name is free once the engine has let go of it."""
        used = state.opened
        try:
            report = replace(state.close(), expired=expired)
        finally:
            state.gone = True
            with self._lock:
                self._sessions.pop(state.id, None)
        if used and not state.id.startswith(_UNNAMED):
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
