"""The base of engines that run in a process of their own: their sessions."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import httpx

from agentbench_kv.engines.base import (
    Capability,
    Engine,
    EngineInfo,
    EngineOptions,
    FinishReason,
    Generation,
    KVStats,
    PhaseLabeller,
    Sampling,
)
from agentbench_kv.engines.core.policy import method_document
from agentbench_kv.engines.embedded.model import folder_sha, model_path
from agentbench_kv.engines.serving.backend import SupervisedBackend
from agentbench_kv.engines.serving.process import ControlError
from agentbench_kv.engines.serving.refusals import read_asked
from agentbench_kv.engines.serving.session import (
    ObservedLedger,
    ServingGeneration,
    ServingSession,
    stats_from,
)
from agentbench_kv.engines.serving.transport import RequestError
from agentbench_kv.engines.serving.wire import EngineWire, GenerationRequest, stop_document
from agentbench_kv.environments import home, python_of
from agentbench_kv.errors import KVBenchError, UsageError
from agentbench_kv.methods.base import Method, Phase
from agentbench_kv.methods.spans import SpanRange, TurnNotes
from agentbench_kv.phases.machine import add_run, resumable

_BROKEN = (OSError, httpx.TransportError, RequestError)
# What a server as shipped does to no session.
_OF_PLUGINS = frozenset({Capability.EVICT_SPANS, Capability.FORK, Capability.SHARE_PREFIX})


class ServingEngine(Engine):
    """Sessions over a backend in another process.

    The engine keeps every session's tokens. What a backend that died had of them is computed again
    by the next one (`backend`), and counted (`recomputed`).
    """

    capabilities: ClassVar[frozenset[Capability]] = frozenset(
        {
            *(Capability.COMPRESS, Capability.CONSTRAIN, Capability.EVICT_SPANS),
            *(Capability.FORCE, Capability.PROTECT_SYSTEM, Capability.REWIND),
        }
    )

    def __init__(self, info: EngineInfo, wire: EngineWire, log: Path, bytes_per_token: int) -> None:
        self.info = info
        # Keys and values, over all layers that look back on everything and their heads.
        self.bytes_per_token = bytes_per_token
        self._wire = wire
        self.wants_notes = wire.options.method.asks_for_system
        self.outlives_runs = not wire.stock  # its prefix cache knows the runs before
        self._backend = SupervisedBackend(info.name, wire, log)
        self._control = self._backend.control
        self._sessions: dict[str, ServingSession] = {}
        self._produced = 0  # tokens that came, as a sign of life: not counted exactly
        try:
            self._backend.running()
            told = wire.told(log.read_text(errors="replace"))
            self.info = replace(info, details=wire.details() | told)
        except BaseException:
            self.shutdown()
            raise

    @classmethod
    def check_model(cls, model: str) -> None:
        model_path(model)

    @classmethod
    def able(cls, wire: EngineWire) -> frozenset[Capability]:
        """Return what it can do as `wire` starts it, under that method."""
        lacks = set(_OF_PLUGINS) if wire.stock else set()
        if not wire.holds_grammars:
            lacks.add(Capability.CONSTRAIN)
        return cls.capabilities - lacks

    @property
    def backend_pid(self) -> int | None:
        """Process id of the backend, for those who want to kill it."""
        return self._backend.pid

    @property
    def restarts(self) -> int:
        return self._backend.restarts

    def open(self, session: str, labeller: PhaseLabeller) -> None:
        if session in self._sessions:
            raise KVBenchError(f"session {session} is open already")
        self._sessions[session] = ServingSession(session, resumable(labeller))

    def note(self, session: str, tokens: Sequence[int], notes: TurnNotes) -> None:
        super().note(session, tokens, notes)
        state = self._sessions[session]
        state.system = state.system or notes.system

    def extend(self, session: str, tokens: Sequence[int], phases: Sequence[Phase]) -> None:
        state = self._sessions[session]
        self._check_length(session, state.taken + len(state.tokens) + len(tokens))
        state.tokens += tokens
        add_run(state.phases, phases)

    def generate(self, session: str, sampling: Sampling) -> Generation:
        return self._begin(session, sampling)

    def force(self, session: str, tokens: Sequence[int], *, predict: bool = False) -> Generation:
        if not tokens:
            raise UsageError(f"session {session}: no tokens to force")
        vocabulary = self._wire.facts.vocabulary
        if min(tokens) < 0 or (vocabulary is not None and max(tokens) >= vocabulary):
            raise UsageError(
                f"session {session}: token ids from {min(tokens)} to {max(tokens)}; the model has "
                f"{vocabulary}, numbered from 0"
            )
        state = self._sessions[session]
        self._check_length(session, state.taken + len(state.tokens) + len(tokens) - 1)
        return self._begin(session, Sampling(max_tokens=len(tokens)), tokens, predict=predict)

    def _begin(
        self,
        session: str,
        sampling: Sampling,
        given: Sequence[int] = (),
        *,
        predict: bool = False,
    ) -> Generation:
        """Start a generation; one whose tokens are given takes them as if they had been drawn."""
        state = self._sessions[session]
        if not state.tokens:
            raise KVBenchError(f"session {session} has no tokens to start from")
        state.opening = state.opening or len(state.tokens)
        best: list[int] | None = [] if predict else None
        state.generation = ServingGeneration(sampling, partial(self._play, state), given, best)
        return state.generation

    def _fork(self, session: str, new: str, labeller: PhaseLabeller) -> bool:
        """Open a fork, between two generations; return whether the backend had rows for it."""
        source = self._at_rest(session)
        if new in self._sessions:
            raise KVBenchError(f"session {new} is open already")
        fork = source.fork(new, resumable(labeller))
        names = {"new": fork.backend_name}
        lives = self._lives(source) and self._tell(source, "fork", **names) is not None
        if lives:
            fork.epoch, fork.known, fork.held = source.epoch, source.known, source.held
            fork.bank, fork.taken = source.bank, source.taken
        self._sessions[new] = fork
        return lives

    def _lives(self, state: ServingSession) -> bool:
        """Return whether the backend that runs now has a session's rows."""
        if self._wire.stock:
            raise UsageError(
                f"{self.info.name} as shipped shares and evicts rows as it likes; "
                "use full-constrained"
            )
        self._note_loss(state, look=False)
        return state.known > 0 and state.epoch == self._backend.epoch

    def rewind(self, session: str, length: int) -> None:
        """Forget a session's tokens from logical position `length` on.

        A server as shipped is told nothing: what its prefix cache finds of the next prompt is not
        computed again, the rest is and counts (`recomputed`).
        """
        state, wire = self._at_rest(session), self._wire
        lengths = {"tokens": len(state.tokens), "fed": state.held}
        window = 0 if wire.stock else wire.facts.window
        self._check_rewind(session, wire.options.method, length, **lengths, window=window)
        if length < state.known and not wire.stock:
            self._note_loss(state, look=False)
            if not state.lost:
                self._tell(state, "rewind", length=length)
        state.rewind(length)
        self._ask(state, "stats")

    def evict_spans(self, session: str, spans: Sequence[SpanRange]) -> int:
        state = self._at_rest(session)
        if not self._lives(state):
            return 0
        return int(self._tell(state, "evict_spans", spans=[list(span) for span in spans]) or 0)

    def stats(self, session: str) -> KVStats:
        state = self._sessions[session]
        if not self._ask(state, "stats") and not state.generating:
            self._note_loss(state)
        return state.total()

    def close(self, session: str) -> KVStats:
        state = self._sessions.pop(session)
        self._ask(state, "close")
        return state.total()

    def reconfigure(self, method: Method) -> None:
        """Go on with another method that a start would take, but from and to one as shipped."""
        if self._wire.stock or (method.name == "full" and self._wire.full_as_shipped):
            raise UsageError("a server as shipped has no plug-in, and needs a start of its own")
        self.check_options(replace(self._wire.options, method=method))
        self._control.call("configure", method=method_document(method, self._wire.folder))
        self._wire.use(method)
        self.info = replace(self.info, capabilities=self.able(self._wire))
        self.wants_notes = method.asks_for_system

    def pool(self) -> dict[str, int]:
        """Return what the backend says of its memory; nothing where it is as shipped, or gone."""
        if self._wire.stock:
            return {}
        with suppress(OSError):
            return dict(self._control.call("pool"))
        return {}

    def pool_peak(self) -> int | None:
        if self._wire.facts.window:
            return None  # layers with a window have blocks of their own
        if self._wire.stock:
            tokens = self._wire.stock_tokens()
        else:
            pool = self.pool()
            if "total_blocks" not in pool:
                return None
            tokens = (pool["total_blocks"] - pool["free_blocks"]) * pool.get("block_size", 1)
        return None if tokens is None else tokens * self.bytes_per_token

    def drop_prefixes(self) -> None:
        if self._wire.stock:
            self._wire.empty_cache()
        elif self._wire.options.method.prefix == "shared":
            self._control.call("drop_prefixes")

    def progress(self) -> int | None:
        """Return a number that changes with every token while anything is generated."""
        sessions = list(self._sessions.values())
        if not any(state.generating for state in sessions):
            return None
        return self._backend.epoch + self._produced

    def kept_names(self, session: str) -> str:
        """Return how the backend names a session in its traces."""
        return self._sessions[session].backend_name

    def shutdown(self) -> None:
        self._backend.shutdown()
        shutil.rmtree(self._wire.folder, ignore_errors=True)

    def _play(self, state: ServingSession, generation: ServingGeneration) -> FinishReason:
        def stream() -> FinishReason:
            if generation.produced and generation.sampling.constraint is not None:
                raise KVBenchError(
                    f"session {state.name}: its backend was lost in the middle of an answer that "
                    "is held to a grammar, and no other can go on with that; ask again"
                )
            if len(generation.best) < generation.produced and generation.predicted is not None:
                raise KVBenchError(
                    f"session {state.name}: its backend was lost in the middle of a given answer, "
                    "and with it what the model would have said; ask again"
                )
            if state.epoch != self._backend.epoch:
                state.enter(self._backend.epoch)
            try:
                return self._stream(state, generation)
            except _BROKEN:
                if generation.cancelled and generation.produced:
                    return FinishReason.CANCELLED
                raise

        return self._backend.serve(stream)

    def _at_rest(self, session: str) -> ServingSession:
        """Return a session that does not generate: only then may its rows be changed."""
        state = self._sessions[session]
        if state.generating:
            raise KVBenchError(f"session {session} is generating")
        return state

    def _note_loss(self, state: ServingSession, *, look: bool = True) -> None:
        """Note it if the rows of a session at rest went with the backend that had them.

        `look`: whether the backend may have died without anybody having noticed.
        """
        moved = state.epoch != self._backend.epoch
        if state.epoch and (moved or (look and self._backend.lost())):
            state.lose()

    def _stream(self, state: ServingSession, generation: ServingGeneration) -> FinishReason:
        if not state.known:
            self._wire.opened(state.backend_name)
        sampling = generation.sampling
        room = self.info.context_limit - state.taken - len(state.tokens)
        left = min(sampling.max_tokens - generation.produced, room)
        request = GenerationRequest(
            *(state.backend_name, state.prompt(), tuple(state.tokens), state.known, sampling, left),
            on_cancel=generation.on_cancel,
            given=generation.given[generation.produced :],
            best=generation.predicted,
        )
        state.known = len(state.tokens)
        if not self._wire.stock:
            return self._read(state, generation, request)
        # A stock server keeps no accounts of a session: they are kept here.
        options = self._wire.options
        windows = self._wire.facts.window_bytes(options.kv_dtype or options.dtype)
        ledger = state.observed = state.observed or ObservedLedger(self.bytes_per_token, windows)
        ledger.begin(len(request.tokens))
        try:
            return self._read(state, generation, request)
        finally:
            found = request.usage.get("cached_tokens")
            # Given tokens are sent as part of the prompt, so the count would be of both.
            generation.cached_tokens = None if request.given else found
            ledger.end(found)
            state.account(ledger.snapshot())

    def _read(
        self, state: ServingSession, generation: ServingGeneration, request: GenerationRequest
    ) -> FinishReason:
        sampling = generation.sampling
        backend_stops = not self._wire.stock and stop_document(sampling) is not None
        own_stop = None if backend_stops else sampling.stop
        last = None
        reads_given = self._wire.stock and request.given
        source = self._wire.stream_given if reads_given else self._wire.stream
        with closing(source(request)) as stream:
            for token in stream:
                state.accept(token)
                self._produced += 1
                generation.push(token)
                if generation.cancelled:
                    return FinishReason.CANCELLED
                if own_stop is not None and own_stop(token):
                    return FinishReason.STOP
                last = token
        if request.best is not None and len(request.best) < generation.produced:
            request.best.extend(self._control.call("best", session=state.backend_name))
        # Why the backend ended it.
        if last in sampling.stop_token_ids:
            return FinishReason.STOP
        if generation.produced >= sampling.max_tokens:
            return FinishReason.LENGTH
        if state.taken + len(state.tokens) >= self.info.context_limit:
            return FinishReason.CONTEXT_LIMIT
        return FinishReason.CANCELLED if generation.cancelled else FinishReason.STOP

    def _tell(self, state: ServingSession, command: str, **arguments: Any) -> Any:
        """Send a command about a session; None if its rows went with the backend meanwhile."""
        try:
            return self._control.call(command, session=state.backend_name, **arguments)
        except OSError as error:
            self._note_loss(state)
            if not state.lost:
                raise ConnectionError(f"session {state.name}: {error}") from error
            return None

    def _ask(self, state: ServingSession, command: str) -> bool:
        """Bring a session's accounting up to date; False if its backend is not there."""
        if self._wire.stock or not state.epoch:
            return True
        if state.epoch != self._backend.epoch:
            return False
        try:
            document = self._control.call(command, session=state.backend_name)
        except OSError:
            return False
        except ControlError as error:
            raise KVBenchError(f"session {state.name}: {error}") from error
        if document is not None:
            state.account(stats_from(document))
        return True


def scratch_folder() -> Path:
    """Make a private folder whose path is short enough for a Unix socket in it."""
    return Path(tempfile.mkdtemp(prefix="kvbench-"))


_Engine = TypeVar("_Engine", bound=ServingEngine)


def start_server(
    engine: type[_Engine],
    wire_class: type[EngineWire],
    name: str,
    options: EngineOptions,
    environment: str,
    *,
    gpu: bool,
) -> _Engine:
    """Return an engine over a new server; one for `full` runs as shipped."""
    engine.check_options(options)
    path, facts = read_asked(options)
    python, folder = python_of(environment), scratch_folder()
    stock = options.method.name == "full"
    wire = wire_class(options, facts, python, path, folder, gpu, stock)
    return run_server(engine, wire, name, folder_sha(model_path(options.model)))


def run_server(engine: type[_Engine], wire: EngineWire, name: str, model_sha: str) -> _Engine:
    """Return an engine over the server that `wire` starts."""
    options, facts = wire.options, wire.facts
    info = EngineInfo(
        *(name, options.model, wire.model, model_sha, "cuda" if wire.gpu else "cpu"),
        *(options.dtype, wire.context_limit, facts.eos_token_ids, engine.able(wire)),
    )
    # The log stays when the scratch folder is removed.
    logs = home() / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"{name}-{wire.folder.name}.log"
    return engine(info, wire, log, facts.bytes_per_token(options.kv_dtype or options.dtype))
