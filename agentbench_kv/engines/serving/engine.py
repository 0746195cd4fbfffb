"""The base of engines that run in a process of their own: sessions, restarts, accounting."""

from __future__ import annotations

import itertools
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
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
    KVEvent,
    KVStats,
    PhaseLabeller,
    Sampling,
)
from agentbench_kv.engines.core.context import stretched_folder
from agentbench_kv.engines.core.ledger import SessionLedger, WindowBytes
from agentbench_kv.engines.core.policy import method_document
from agentbench_kv.engines.embedded.model import folder_sha, model_path
from agentbench_kv.engines.sampling import StreamedGeneration
from agentbench_kv.engines.serving.process import BackendProcess, ControlClient, ControlError
from agentbench_kv.engines.serving.wire import (
    TURNABLE,
    EngineWire,
    GenerationRequest,
    ModelFacts,
    RequestError,
    read_model,
    stop_document,
)
from agentbench_kv.environments import home, python_of
from agentbench_kv.errors import EngineGoneError, KVBenchError, PrerequisiteError, UsageError
from agentbench_kv.methods.base import Method, Phase
from agentbench_kv.methods.full import Full
from agentbench_kv.phases.machine import Labeller, PromptPhases, add_run, resumable

# Tokens the stream may be ahead of its reader, so that a cancel takes effect where it was meant.
_AHEAD = 4
# Restarts one request waits for, and starts in a row that may fail after the first, before the
# engine is given up for good.
RESTARTS = 3
_PATIENCE_S = 5.0  # that a server may take to die once something about it broke
_LOOK_S = 0.1
_BROKEN = (OSError, httpx.TransportError, RequestError)
_T = TypeVar("_T")
# Options of vLLM and of SGLang that change what a model's config says.
_OVERRIDES = ("hf-overrides", "json-model-override-args")


class ServingGeneration(StreamedGeneration):
    """Tokens on their way from a backend; `play` runs to the end and calls `push` per token."""

    def __init__(
        self, sampling: Sampling, play: Callable[[ServingGeneration], FinishReason]
    ) -> None:
        super().__init__(sampling, ahead=_AHEAD)
        self.running = True  # the backend may still change the session
        self._play = play
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            reason = self._play(self)
        except BaseException as error:  # noqa: BLE001  the reader is told, on its own thread
            self.running = False
            self.fail(error)
        else:
            self.running = False
            self.finish(reason)


class ObservedLedger(SessionLedger):
    """One session of a server that evicts nothing within a request.

    A prefix cache may have dropped what the session had before; the server says how many tokens it
    found, and the others count as recomputed.
    """

    def __init__(self, bytes_per_token: int, windows: WindowBytes | None) -> None:
        super().__init__(Full(), bytes_per_token, windows)
        self._expected = 0  # rows the next forward writes
        self._before = 0  # rows the session had when the generation began

    def begin(self, tokens: int) -> None:
        # The last token it generated was never fed; it is part of no prompt.
        self.begin_turn(tokens - (self.fed + (self.fed > 0)))
        self._before = self.fed
        self._expected = tokens - self.fed

    def token(self) -> None:
        """Count a generated token and the forward it came from."""
        self.forward(self._expected)
        self.sampled()
        self._expected = 1

    def end(self, cached_tokens: int | None) -> None:
        """Take in how many of the prompt's tokens the server had cached, where it says so."""
        if cached_tokens is not None:
            self.stats.recomputed += max(0, self._before - cached_tokens)


_numbers = itertools.count(1)


@dataclass
class ServingSession:
    """One session as the harness keeps it, so that a backend may die without its being lost."""

    name: str
    labeller: Labeller
    # What the backend calls it; new after every loss, so that nothing old is taken for it.
    backend_name: str = field(init=False)
    tokens: list[int] = field(default_factory=list)  # everything it was given or generated
    phases: list[list[int]] = field(default_factory=list)  # of the tokens, as runs
    known: int = 0  # how many of them this backend was given, or gave
    held: int = 0  # how many of them it is known to have computed
    epoch: int = 0  # which start of the backend it lives in; 0: none yet
    carried: KVStats = field(default_factory=KVStats)  # accounting of backends that died
    last: KVStats = field(default_factory=KVStats)  # the living backend's, when it was last asked
    observed: ObservedLedger | None = None  # the accounting, where the backend keeps none
    generation: ServingGeneration | None = None  # the last one
    _lost: int | None = None  # tokens whose rows went with a backend, until they are computed again

    def __post_init__(self) -> None:
        self._rename()

    def prompt(self) -> PromptPhases:
        """Return the phases of all tokens, from which the backend goes on labelling."""
        runs = [run.copy() for run in self.phases]
        return PromptPhases(self.labeller.labeller_name, self.labeller.document(), runs)

    def accept(self, token: int) -> None:
        add_run(self.phases, [self.labeller.label(token)])
        self.held = len(self.tokens)
        self.tokens.append(token)
        self.known += 1
        if self.observed is not None:
            self.observed.token()

    @property
    def generating(self) -> bool:
        """Whether a generation of it has not ended."""
        return self.generation is not None and self.generation.running

    @property
    def lost(self) -> bool:
        """Whether the backend that had its rows is gone, and no other one has them yet."""
        return self._lost is not None

    def lose(self) -> None:
        """Note that its backend is gone; the next generation computes everything again."""
        self.carried = self.carried.followed_by(self.last)
        self.carried.restarts.append((len(self.carried.events), len(self.tokens)))
        self._lost = self.held
        self._rename()
        self.last = KVStats()
        self.observed = None
        self.known = self.held = self.epoch = 0

    def enter(self, epoch: int) -> None:
        """Move to another start of the backend; what an old one held is computed again."""
        if self.epoch:
            self.lose()
        if self._lost is not None:
            self.carried.restarts[-1] = (len(self.carried.events), len(self.tokens))
            self.carried.recomputed += self._lost
            self._lost = None
        self.epoch = epoch

    def total(self) -> KVStats:
        merged = self.carried.followed_by(self.last)
        merged.logical = len(self.tokens)
        return merged

    def _rename(self) -> None:
        self.backend_name = f"{self.name}~{next(_numbers)}"


def stats_from(document: dict[str, Any]) -> KVStats:
    events = [KVEvent(**event) for event in document["events"]]
    restarts = [(before, tokens) for before, tokens in document["restarts"]]
    return KVStats(**{**document, "events": events, "restarts": restarts})


class ServingEngine(Engine):
    """Sessions over a backend in another process.

    The engine keeps every session's tokens. A backend that dies, as a whole or in part, is started
    again by the request that finds out; its sessions are computed again from their tokens, and
    counted (`recomputed`). After `RESTARTS` of them in vain the engine is gone: EngineGoneError.
    """

    capabilities: ClassVar[frozenset[Capability]] = frozenset({Capability.COMPRESS})

    def __init__(self, info: EngineInfo, wire: EngineWire, log: Path, bytes_per_token: int) -> None:
        self.info = info
        # Keys and values, over all layers that look back on everything and their heads.
        self.bytes_per_token = bytes_per_token
        self._wire = wire
        self._log = log
        self._control = ControlClient(wire.control)
        self._sessions: dict[str, ServingSession] = {}
        self._starting = threading.Lock()
        self._epoch = 0  # starts of the backend so far
        self._produced = 0  # tokens that came, as a sign of life: not counted exactly
        self._gone: str | None = None  # why it will not be started again
        self._process: BackendProcess | None = None
        try:
            self._alive()
            self.info = replace(info, details=wire.details())
        except BaseException:
            self.shutdown()
            raise

    @classmethod
    def check_model(cls, model: str) -> None:
        model_path(model)

    @property
    def backend_pid(self) -> int | None:
        """Process id of the backend, for those who want to kill it."""
        return None if self._process is None else self._process.pid

    @property
    def restarts(self) -> int:
        return max(0, self._epoch - 1)

    def open(self, session: str, labeller: PhaseLabeller) -> None:
        if session in self._sessions:
            raise KVBenchError(f"session {session} is open already")
        self._sessions[session] = ServingSession(session, resumable(labeller))

    def extend(self, session: str, tokens: Sequence[int], phases: Sequence[Phase]) -> None:
        state = self._sessions[session]
        self._check_length(session, len(state.tokens) + len(tokens))
        state.tokens += tokens
        add_run(state.phases, phases)

    def generate(self, session: str, sampling: Sampling) -> Generation:
        state = self._sessions[session]
        if not state.tokens:
            raise KVBenchError(f"session {session} has no tokens to start from")
        state.generation = ServingGeneration(sampling, partial(self._play, state))
        return state.generation

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
        """Go on with another method, not from or to `full`; ControlError if sessions are open."""
        refuse_method(method, self._wire.facts)
        self._control.call("configure", method=method_document(method, self._wire.folder))
        self._wire.use(method)

    def pool(self) -> dict[str, int]:
        """Return what the backend says of its memory; nothing where it is as shipped, or gone."""
        if self._wire.stock:
            return {}
        with suppress(OSError):
            return dict(self._control.call("pool"))
        return {}

    def progress(self) -> int | None:
        """Return a number that changes with every token while anything is generated."""
        sessions = list(self._sessions.values())
        if not any(state.generating for state in sessions):
            return None
        return self._epoch + self._produced

    def kept_names(self, session: str) -> str:
        """Return how the backend names a session in its traces."""
        return self._sessions[session].backend_name

    def shutdown(self) -> None:
        self._gone = self._gone or "the engine has been shut down"
        self._control.close()
        self._wire.close()
        if self._process is not None:
            self._process.stop()
        shutil.rmtree(self._wire.folder, ignore_errors=True)

    def _play(self, state: ServingSession, generation: ServingGeneration) -> FinishReason:
        def stream() -> FinishReason:
            if state.epoch != self._epoch:
                state.enter(self._epoch)
            try:
                return self._stream(state, generation)
            except _BROKEN:
                if generation.cancelled and generation.produced:
                    return FinishReason.CANCELLED
                raise

        return self._with_backend(stream)

    def _with_backend(self, work: Callable[[], _T]) -> _T:
        """Do what needs the backend, again if it dies meanwhile, and return the result."""
        for _ in range(RESTARTS + 1):
            process = self._alive()
            try:
                return work()
            except RequestError as error:
                if error.refused or not self._is_gone(process):
                    raise
            except (OSError, httpx.TransportError) as error:
                if not self._is_gone(process):
                    # No failure of whoever asked: another time it may go well.
                    broke = f"the connection to the {self.info.name} backend broke: {error}"
                    raise ConnectionError(broke) from error
            except Exception:
                if self._gone is None:  # or whatever failed because it was shut down meanwhile
                    raise
        with self._starting:
            what = f"died {RESTARTS + 1} times in one request"
            self._gone = self._gone or f"{process.ended(what)}; a run goes on with the same command"
            raise EngineGoneError(self._gone)

    def _is_gone(self, process: BackendProcess) -> bool:
        """Return whether a backend about which something broke is dead or dying."""
        deadline = time.monotonic() + _PATIENCE_S
        while not self._is_lost(process):
            if time.monotonic() > deadline:
                return False
            time.sleep(_LOOK_S)
        return True

    def _is_lost(self, process: BackendProcess | None) -> bool:
        """Return whether a backend is dead; what is left of one that lost a part is ended."""
        if self._gone is not None or process is None or not (process.alive and process.ready):
            return True
        if not self._wire.lost():
            return False
        process.kill(crippled=True)
        return True

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
        moved = state.epoch != self._epoch
        if state.epoch and (moved or (look and self._is_lost(self._process))):
            state.lose()

    def _stream(self, state: ServingSession, generation: ServingGeneration) -> FinishReason:
        if not state.known:
            self._wire.opened(state.backend_name)
        sampling = generation.sampling
        room = self.info.context_limit - len(state.tokens)
        left = min(sampling.max_tokens - generation.produced, room)
        request = GenerationRequest(
            state.backend_name, state.prompt(), tuple(state.tokens), state.known, sampling, left
        )
        state.known = len(state.tokens)
        if not self._wire.stock:
            return self._read(state, generation, request)
        # A stock server keeps no accounts of a session: they are kept here.
        windows = self._wire.facts.window_bytes(self._wire.options.dtype)
        ledger = state.observed = state.observed or ObservedLedger(self.bytes_per_token, windows)
        ledger.begin(len(request.tokens))
        try:
            return self._read(state, generation, request)
        finally:
            ledger.end(request.usage.get("cached_tokens"))
            state.last = ledger.snapshot()

    def _read(
        self, state: ServingSession, generation: ServingGeneration, request: GenerationRequest
    ) -> FinishReason:
        sampling = generation.sampling
        backend_stops = not self._wire.stock and stop_document(sampling) is not None
        own_stop = None if backend_stops else sampling.stop
        last = None
        with closing(self._wire.stream(request)) as stream:
            for token in stream:
                state.accept(token)
                self._produced += 1
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
            if self._gone is None and (self._process is None or not self._process.alive):
                self._start()
            if self._gone is not None or self._process is None:
                raise EngineGoneError(self._gone)
            return self._process

    def _start(self) -> None:
        """Start a backend; one that ran before may fail to come back a few times."""
        for left in reversed(range(RESTARTS if self._epoch else 1)):
            if self._process is not None:
                self._process.kill()
            self._control.close()
            process = self._process = BackendProcess(self.info.name, self._wire.launch(), self._log)
            if self._gone is not None:  # shut down meanwhile
                process.kill()
                return
            try:
                process.wait_ready()
            except PrerequisiteError as error:
                if not self._epoch:
                    raise
                if process.timed_out or not left:
                    self._gone = self._gone or str(error)
                if self._gone is not None:
                    return
            else:
                self._epoch += 1
                return

    def _ask(self, state: ServingSession, command: str) -> bool:
        """Bring a session's accounting up to date; False if its backend is not there."""
        if self._wire.stock or not state.epoch:
            return True
        if state.epoch != self._epoch:
            return False
        try:
            document = self._control.call(command, session=state.backend_name)
        except OSError:
            return False
        except ControlError as error:
            raise KVBenchError(f"session {state.name}: {error}") from error
        if document is not None:
            state.last = stats_from(document)
        return True


def refuse_method(method: Method, facts: ModelFacts | None = None) -> None:
    """Refuse a method whose cache a serving engine cannot hold, or not with this model's RoPE."""
    if method.per_query_head:
        raise UsageError(
            f"{method.label} keeps a set per query head, a serving engine's cache has rows per KV "
            "head; use another preset or --engine embedded"
        )
    if method.positions == "cache" and facts is not None and (reason := facts.unturnable()):
        raise UsageError(
            f"{method.label} turns keys to their places in the cache, which is known for "
            f"{', '.join(TURNABLE)} with RoPE over whole heads: {reason}; "
            "use --set positions=logical or another preset"
        )


def check_folder(
    engine: str, options: EngineOptions, unsupported: Callable[[ModelFacts], str]
) -> None:
    """Read a model folder; UsageError if its engine would crash on it or answer wrongly.

    `unsupported` says why, for this engine alone; empty if it would not.
    """
    (_, facts), method = read_asked(options), options.method
    if reason := facts.unevictable or unsupported(facts):
        raise UsageError(
            f"the {engine} engine does not run model family {facts.family!r}: it has {reason}; use "
            "another model or engine (docs/models.md)"
        )
    if method.name != "full" and not facts.full_layers:
        raise UsageError(
            f"every layer keeps a window of {facts.window} tokens, so there is nothing for a "
            f"method to evict in the {engine} engine; use --method full"
        )
    refuse_method(method, facts)
    given = [name for name in options.engine_args if name in _OVERRIDES]
    if given and method.positions == "cache":
        raise UsageError(
            f"--engine-arg {given[0]}: {method.label} turns keys by the RoPE of the model's "
            "config.json; change it there"
        )


def read_asked(options: EngineOptions) -> tuple[Path, ModelFacts]:
    """Return a model's folder and what it says, with the context that was asked for."""
    path = stretched_folder(model_path(options.model), options.context_limit)
    facts = read_model(path)
    limit = options.context_limit or facts.context_limit
    return path, replace(facts, context_limit=min(limit, facts.context_limit))


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
        *(options.dtype, wire.context_limit, facts.eos_token_ids, engine.capabilities),
    )
    # The log stays when the scratch folder is removed.
    logs = home() / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"{name}-{wire.folder.name}.log"
    return engine(info, wire, log, facts.bytes_per_token(options.dtype))
