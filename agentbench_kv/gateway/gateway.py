"""The gateway: messages in, messages out, and between them an exact token log per session."""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from agentbench_kv.engines.base import Engine, KVStats
from agentbench_kv.errors import UsageError
from agentbench_kv.gateway.accounting import SessionReport, TurnInfo
from agentbench_kv.gateway.cancellation import Cancellation
from agentbench_kv.gateway.messages import Message
from agentbench_kv.gateway.parsing import PARSERS, Delta, OutputParser, choose_parser
from agentbench_kv.gateway.phases import PhaseTable
from agentbench_kv.gateway.planning import Planner
from agentbench_kv.gateway.session import Plan, Session
from agentbench_kv.gateway.tokens import TokenCodec, load_tokenizer
from agentbench_kv.gateway.turn import PlainReader, Reader, Turn, TurnSetup
from agentbench_kv.gateway.types import (
    ChatResult,
    Options,
    SessionBusyError,
    SessionLimitError,
    UnknownSessionError,
)

__all__ = ["Gateway"]

TurnHook = Callable[[str, TurnInfo], None]
# Not a name the HTTP surface lets through.
_ONE_SHOT = "one shot "
_CLOSE_WAIT_S = 60.0

CloseHook = Callable[[SessionReport], None]


class Gateway:
    """Chat and completions over an engine. Thread-safe.

    A session answers one request at a time; a second one at the same moment is refused with
    `SessionBusyError`, not queued, because it cannot extend a log that is still being written.
    Requests without a session get one of their own, closed when they are answered.

    Parameters
    ----------
    engine : Engine
        Who holds the KV cache.
    tokenizer : transformers.PreTrainedTokenizerBase, optional
        By default the one in the engine's model folder.
    parser : str
        Tool-call syntax: `hermes`, `llama3_json`, `none`, or `auto` from the vocabulary.
    max_sessions : int
        Most sessions open at once.
    default_max_tokens : int
        For requests that do not say.
    on_turn : callable, optional
        Called after every answered turn with session id and figures, in the request's thread.
    on_close : callable, optional
        Called with the final accounting of every session.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        tokenizer: Any = None,
        parser: str = "auto",
        max_sessions: int = 1024,
        default_max_tokens: int = 1024,
        on_turn: TurnHook | None = None,
        on_close: CloseHook | None = None,
    ) -> None:
        self.engine = engine
        self.codec = TokenCodec(tokenizer or load_tokenizer(engine.info.model_path))
        self.table = PhaseTable.for_tokenizer(self.codec)
        self.syntax = choose_parser(parser, self.codec.added)
        self.max_sessions = max_sessions
        self.default_max_tokens = default_max_tokens
        self.on_turn = on_turn
        self.on_close = on_close
        self._planner = Planner(self.codec, self._message_ends())
        self._eos = frozenset(engine.info.eos_token_ids)
        self._sessions: dict[str, Session] = {}
        self._closed: dict[str, SessionReport] = {}
        self._cancelled: set[str] = set()
        self._lock = threading.Lock()
        self._one_shots = itertools.count(1)

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

    def stream(
        self,
        session: str | None,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Options | None = None,
        cancellation: Cancellation | None = None,
    ) -> Iterator[Delta | ChatResult]:
        """Yield the answer's deltas, then the `ChatResult`. Closing it early cancels."""
        options = options or Options()
        with self._using(session) as state:
            plan = self._planner.chat(state, messages, tools)
            syntax = self.syntax if options.parse_tools else PARSERS["none"]
            reader = OutputParser(syntax, state.next_call_id, thinking=plan.thinking)
            yield from self._answer(state, plan, reader, options, cancellation)

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

    def stream_complete(
        self,
        session: str | None,
        prompt: str | Sequence[int],
        options: Options | None = None,
        cancellation: Cancellation | None = None,
    ) -> Iterator[Delta | ChatResult]:
        """Yield the text's deltas, then the `ChatResult`. Closing it early cancels."""
        with self._using(session) as state:
            plan = self._planner.raw(state, prompt)
            options = options or Options()
            yield from self._answer(state, plan, PlainReader(), options, cancellation)

    def close(self, session: str) -> KVStats:
        """Free a session and return its final accounting, resets included."""
        return self.close_report(session).stats

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
        """Return a session's accounting so far, resets included."""
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

    def provenance(self) -> dict[str, Any]:
        """Return what the text side contributes to a run's record."""
        template = str(getattr(self.codec.tokenizer, "chat_template", None) or "")
        return {
            "tool_parser": self.syntax.name,
            "phase_family": self.table.family.name,
            "chat_template_sha": hashlib.sha256(template.encode()).hexdigest(),
        }

    def token_log(self, session: str) -> tuple[list[int], list[int]]:
        """Return copies of a session's ids and their phases."""
        state = self._find(session)
        return list(state.tokens), [int(phase) for phase in state.phases]

    def sessions(self) -> list[str]:
        """Return the ids of the open sessions."""
        with self._lock:
            return sorted(self._sessions)

    def close_all(self) -> None:
        """Close every session that is not answering a request."""
        for session in self.sessions():
            try:
                self.close(session)
            except (SessionBusyError, UnknownSessionError):
                continue

    def _answer(
        self,
        state: Session,
        plan: Plan,
        reader: Reader,
        options: Options,
        cancellation: Cancellation | None,
    ) -> Iterator[Delta | ChatResult]:
        cancellation = self._register(state, cancellation or Cancellation())
        setup = TurnSetup(
            codec=self.codec,
            reader=reader,
            options=options,
            max_tokens=options.max_tokens or self.default_max_tokens,
            hidden=self._hidden(),
            eos=self._eos,
            cancellation=cancellation,
        )
        turn = Turn(state, plan, setup)
        turns = len(state.turns)
        try:
            yield from turn.deltas()
        finally:
            state.running = None
            if self.on_turn and len(state.turns) > turns:
                self.on_turn(state.id, state.turns[-1])
        yield turn.result()

    def _register(self, state: Session, cancellation: Cancellation) -> Cancellation:
        """Make a request the one that `cancel` ends; it may be so already."""
        with self._lock:
            state.running = cancellation
            cancelled = state.id in self._cancelled
        if cancelled:
            cancellation.cancel()
        return cancellation

    @contextmanager
    def _using(self, session: str | None) -> Iterator[Session]:
        """Give a session to one request; one without a name lives as long as its request."""
        name = session or f"{_ONE_SHOT}{next(self._one_shots)}"
        with self._owned(name) as state:
            try:
                yield state
            finally:
                if session is None or not state.opened:
                    self._drop(state)

    @contextmanager
    def _owned(self, name: str, wait_s: float = 0.0) -> Iterator[Session]:
        state = self._acquire(name, wait_s)
        try:
            yield state
        finally:
            state.lock.release()

    def _acquire(self, name: str, wait_s: float) -> Session:
        while True:
            state = self._find_or_add(name)
            if not state.lock.acquire(timeout=wait_s):
                raise SessionBusyError(
                    f"session {name!r} is answering another request; wait for it to end"
                )
            if not state.gone:
                return state
            state.lock.release()

    def _find_or_add(self, name: str) -> Session:
        with self._lock:
            if name not in self._sessions:
                if len(self._sessions) >= self.max_sessions:
                    raise SessionLimitError(
                        f"all {self.max_sessions} sessions are in use; close one first"
                    )
                self._sessions[name] = Session(name, self.engine, self.table)
            return self._sessions[name]

    def _find(self, name: str) -> Session:
        with self._lock:
            if name not in self._sessions:
                raise UnknownSessionError(f"no open session {name!r}")
            return self._sessions[name]

    def _drop(self, state: Session) -> SessionReport:
        """Close a session its caller owns; its name is free once the engine has let go of it."""
        used = state.opened
        try:
            report = state.close()
        finally:
            state.gone = True
            with self._lock:
                self._sessions.pop(state.id, None)
        if used:
            self._remember(report)
        if self.on_close and used:
            self.on_close(report)
        return report

    def _remember(self, report: SessionReport) -> None:
        if report.session.startswith(_ONE_SHOT):
            return
        with self._lock:
            self._closed.pop(report.session, None)
            self._closed[report.session] = report
            while len(self._closed) > self.max_sessions:
                self._closed.pop(next(iter(self._closed)))

    def _hidden(self) -> frozenset[int]:
        """Return the ids without text: turn ends, special tokens the parser does not read."""
        markers = (self.syntax.open, self.syntax.close, "<think>", "</think>")
        shown = {self.codec.added.get(text) for text in markers if text}
        return (self.codec.special - shown) | self._eos

    def _message_ends(self) -> frozenset[int]:
        ends = (self.codec.added.get(text) for text in self.table.family.message_close)
        return frozenset(index for index in ends if index is not None)


def _last(items: Iterator[Delta | ChatResult]) -> ChatResult:
    result: ChatResult | None = None
    for item in items:
        if isinstance(item, ChatResult):
            result = item
    if result is None:
        raise UsageError("the request ended without an answer")
    return result
