"""The base of engines that run in a process of their own: sessions, restarts, accounting."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import httpx

from agentbench_kv.engines.base import (
    Capability,
    Engine,
    EngineInfo,
    FinishReason,
    Generation,
    KVStats,
    Phase,
    PhaseLabeller,
    Sampling,
)
from agentbench_kv.engines.serving.backend.policy import method_document
from agentbench_kv.engines.serving.control import ControlClient, ControlError
from agentbench_kv.engines.serving.generation import ServingGeneration
from agentbench_kv.engines.serving.observed import ObservedLedger
from agentbench_kv.engines.serving.process import BackendProcess
from agentbench_kv.engines.serving.sessions import ServingSession, stats_from
from agentbench_kv.engines.serving.wire import Request, Wire, stop_document
from agentbench_kv.errors import ContextLimitError, KVBenchError, UsageError
from agentbench_kv.methods.base import Method

RESTARTS = 3  # restarts one generation waits for before it gives up
_GONE = (OSError, httpx.TransportError)


class ServingEngine(Engine):
    """Sessions over a backend in another process.

    The engine keeps every session's tokens. A backend that dies is started again by the next
    request; its sessions are computed again from their tokens, and counted (`recomputed`).
    """

    capabilities: ClassVar[frozenset[Capability]] = frozenset({Capability.COMPRESS})

    def __init__(
        self, info: EngineInfo, wire: Wire, folder: Path, log: Path, bytes_per_token: int
    ) -> None:
        self.info = info
        self.bytes_per_token = bytes_per_token  # keys and values, over all layers and heads
        self._wire = wire
        self._folder = folder  # private; removed at `shutdown`
        self._log = log
        self._control = ControlClient(wire.control)
        self._sessions: dict[str, ServingSession] = {}
        self._starting = threading.Lock()
        self._epoch = 0  # starts of the backend so far
        self._down = False
        self._process: BackendProcess | None = None
        try:
            self._alive()
            self.info = replace(info, details=wire.details())
        except BaseException:
            self.shutdown()
            raise

    @property
    def backend_pid(self) -> int | None:
        """Process id of the backend, for those who want to kill it."""
        return None if self._process is None else self._process.pid

    @property
    def restarts(self) -> int:
        """How often the backend had to be started again."""
        return max(0, self._epoch - 1)

    def open(self, session: str, labeller: PhaseLabeller) -> None:
        """Start an empty session."""
        if session in self._sessions:
            raise KVBenchError(f"session {session} is open already")
        self._sessions[session] = ServingSession(session, labeller)

    def extend(self, session: str, tokens: Sequence[int], phases: Sequence[Phase]) -> None:  # noqa: ARG002
        """Append prompt tokens; the backend labels them itself, by the session's labeller."""
        state = self._sessions[session]
        if len(state.tokens) + len(tokens) >= self.info.context_limit:
            raise ContextLimitError(
                f"session {session} would reach {len(state.tokens) + len(tokens)} tokens; "
                f"the model's context is {self.info.context_limit}"
            )
        state.tokens += tokens

    def generate(self, session: str, sampling: Sampling) -> Generation:
        """Prefill what is pending and decode."""
        state = self._sessions[session]
        if not state.tokens:
            raise KVBenchError(f"session {session} has no tokens to start from")
        return ServingGeneration(sampling, lambda generation: self._play(state, generation))

    def stats(self, session: str) -> KVStats:
        """Return a snapshot of the accounting, as the backend's scheduler keeps it."""
        state = self._sessions[session]
        self._ask(state, "stats")
        return state.total()

    def close(self, session: str) -> KVStats:
        """Free the session in the backend and return its accounting."""
        state = self._sessions.pop(session)
        self._ask(state, "close")
        return state.total()

    def reconfigure(self, method: Method) -> None:
        """Go on with another method, not from or to `full`; ControlError if sessions are open."""
        refuse_method(method)
        self._control.call("configure", method=method_document(method, self._folder))
        self._wire.use(method)

    def pool(self) -> dict[str, int]:
        """Return what the backend says of its memory; nothing where it is as shipped, or gone."""
        if self._wire.stock:
            return {}
        try:
            pool: dict[str, int] = self._control.call("pool")
        except OSError:
            return {}
        return pool

    def kept_names(self, session: str) -> str:
        """Return how the backend names a session in its traces."""
        return self._sessions[session].backend_name

    def shutdown(self) -> None:
        """End the backend and remove its scratch folder."""
        self._down = True
        self._control.close()
        self._wire.close()
        if self._process is not None:
            self._process.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _play(self, state: ServingSession, generation: ServingGeneration) -> FinishReason:
        for _ in range(RESTARTS + 1):
            process = self._alive()
            if state.epoch != self._epoch:
                state.enter(self._epoch)
            try:
                return self._stream(state, generation)
            except _GONE as error:
                if process.survives():
                    raise KVBenchError(f"the connection to the backend broke: {error}") from error
        raise process.stopped()

    def _stream(self, state: ServingSession, generation: ServingGeneration) -> FinishReason:
        if not state.known:
            self._wire.opened(state.backend_name)
        sampling = generation.sampling
        room = self.info.context_limit - len(state.tokens)
        left = min(sampling.max_tokens - generation.produced, room)
        request = Request(
            state.backend_name, state.recipe, tuple(state.tokens), state.known, sampling, left
        )
        state.known = len(state.tokens)
        if not self._wire.stock:
            return self._read(state, generation, request)
        # A stock server keeps no accounts of a session: they are kept here.
        ledger = state.observed = state.observed or ObservedLedger(self.bytes_per_token)
        ledger.begin(len(request.tokens))
        reason = self._read(state, generation, request)
        ledger.end(request.usage.get("cached_tokens"))
        state.last = ledger.snapshot()
        return reason

    def _read(
        self, state: ServingSession, generation: ServingGeneration, request: Request
    ) -> FinishReason:
        sampling = generation.sampling
        backend_stops = not self._wire.stock and stop_document(sampling) is not None
        own_stop = None if backend_stops else sampling.stop
        last = None
        with closing(self._wire.stream(request)) as stream:
            for token in stream:
                state.accept(token)
                generation.push(token)
                if generation.cancelled:
                    return FinishReason.CANCELLED
                if own_stop is not None and own_stop(token):
                    return FinishReason.STOP
                last = token
        # Why the backend ended it.
        if last in sampling.stop_token_ids:
            return FinishReason.STOP
        if generation.produced >= sampling.max_tokens:
            return FinishReason.LENGTH
        if len(state.tokens) >= self.info.context_limit:
            return FinishReason.CONTEXT_LIMIT
        return FinishReason.STOP

    def _alive(self) -> BackendProcess:
        """Return a backend that runs, starting one if there is none."""
        with self._starting:
            if self._down:
                raise KVBenchError("the engine has been shut down")
            if self._process is None or not self._process.alive:
                if self._process is not None:
                    self._process.stop()
                self._control.close()
                self._process = BackendProcess(self.info.name, self._wire.launch(), self._log)
                self._process.wait_ready()
                self._epoch += 1
            return self._process

    def _ask(self, state: ServingSession, command: str) -> None:
        """Bring a session's accounting up to date, as far as its backend lives."""
        if self._wire.stock or state.epoch != self._epoch or not state.epoch:
            return
        try:
            document = self._control.call(command, session=state.backend_name)
        except OSError:
            return
        except ControlError as error:
            raise KVBenchError(f"session {state.name}: {error}") from error
        if document is not None:
            state.last = stats_from(document)


def refuse_method(method: Method) -> None:
    """Refuse a method whose cache a serving engine cannot hold: a kept set per query head."""
    if method.per_query_head:
        raise UsageError(
            f"{method.label} keeps a set per query head, a serving engine's cache has rows per KV "
            "head; use another preset or --engine embedded"
        )


def scratch_folder() -> Path:
    """Make a private folder whose path is short enough for a Unix socket in it."""
    return Path(tempfile.mkdtemp(prefix="kvbench-"))
