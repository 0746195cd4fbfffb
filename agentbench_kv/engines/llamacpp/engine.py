"""The llama.cpp engine: a GGUF model on a CPU, in a process of its own (`server.app`)."""

from __future__ import annotations

import json
import socket
from collections.abc import Generator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from agentbench_kv.engines.base import (
    SPAN_CAPABILITIES,
    Capability,
    EngineInfo,
    EngineOptions,
    FinishReason,
    PhaseLabeller,
)
from agentbench_kv.engines.core.kv_dtype import BLOCK
from agentbench_kv.engines.core.memory import memory_method
from agentbench_kv.engines.embedded.model import free_tokens
from agentbench_kv.engines.llamacpp.models import KV_ROW_TYPES, ROW_TYPES, resolve_model
from agentbench_kv.engines.llamacpp.server.app import SETTINGS, Settings
from agentbench_kv.engines.serving.engine import ServingEngine, run_server, scratch_folder
from agentbench_kv.engines.serving.model_facts import ModelFacts
from agentbench_kv.engines.serving.process import ControlError, Launch
from agentbench_kv.engines.serving.refusals import refuse_method
from agentbench_kv.engines.serving.session import ServingGeneration, ServingSession
from agentbench_kv.engines.serving.transport import request_error
from agentbench_kv.engines.serving.wire import EngineWire, GenerationRequest, stop_document
from agentbench_kv.environments import process_env, python_of
from agentbench_kv.environments.processors import free_threads
from agentbench_kv.errors import CapacityError, KVBenchError, MemoryLostError, UsageError
from agentbench_kv.methods.base import Method
from agentbench_kv.methods.spans import Block, SpanRange

_START_S = 300.0
_ANSWER_S = 3600.0  # a token may wait behind a queue of prefills
SMALLEST_CELLS = 1024
# Cached tokens if nothing else is said; the cache is taken from memory at the start.
MOST_CELLS = 65536
_FLASH = "flash-attention"
_MEMORY = "lower --engine-arg cells=N, the cached tokens of all sessions together"


@dataclass(eq=False)
class LlamaCppWire(EngineWire):
    """One server on two Unix sockets in a private folder."""

    full_as_shipped: ClassVar[bool] = False

    file: Path  # GGUF
    cells: int  # cached tokens of all sessions together
    sha: str
    computing: int = field(default_factory=free_threads, init=False)  # threads

    @property
    def _stream(self) -> Path:
        return self.folder / "stream"

    def details(self) -> dict[str, str]:
        setup = "llama-cpp-python 0.3.36, unified cache"
        attention = {"attention": "flash"} if _flash(self.options) else {}
        sizes = {"cells": str(self.cells), "threads": str(self.computing)}
        return {"setup": setup} | sizes | attention | self._threads()

    def launch(self) -> Launch:
        options, cells = self.options, self.cells
        settings = Settings(
            *(str(self.file), str(self._stream), options.dtype, cells, options.concurrency),
            *(options.context_limit, options.kv_dtype, _flash(options)),
            *("" if options.banks is None else str(options.banks.resolve()), self.sha),
            *(str(self.model / "tokenizer.json"), self.facts.eos_token_ids),
            threads=self.computing,
        )
        environment = self._environment("", {}) | process_env.settings()
        environment |= {SETTINGS: json.dumps(asdict(settings))}
        command = [str(self.python), "-m", "agentbench_kv.engines.llamacpp.server.app"]
        return Launch(command, self._ready, environment, _START_S, _MEMORY)

    def _ready(self) -> bool:
        return self._stream.exists() and self._answers()

    def stream(self, request: GenerationRequest) -> Generator[int]:
        document = _document(request)
        with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as connection:
            connection.settimeout(_ANSWER_S)
            connection.connect(str(self._stream))
            with connection.makefile("rb") as lines:
                connection.sendall(json.dumps(document).encode() + b"\n")
                request.on_cancel(partial(_hang_up, connection))
                while (answer := _answer(lines.readline())) is not None:
                    if request.best is not None:
                        request.best.append(int(answer["best"]))
                    yield int(answer["token"])
                    if document["stepwise"]:
                        connection.sendall(b"\n")


def _hang_up(connection: socket.socket) -> None:
    """Say that no token is wanted any more; the backend still says when it has ended."""
    with suppress(OSError):  # it has ended already
        connection.shutdown(socket.SHUT_WR)


def _document(request: GenerationRequest) -> dict[str, Any]:
    sampling, stop = request.sampling, stop_document(request.sampling)
    same = ("temperature", "top_p", "top_k", "seed")
    return {
        "session": request.session,
        "phases": asdict(request.prompt),
        "tokens": list(request.tokens[request.known :]),
        "known": request.known,
        "given": list(request.given),
        "predict": request.best is not None,
        "stop": stop,
        "stepwise": sampling.stop is not None and stop is None,
        "sampling": {
            "max_tokens": request.max_tokens,
            **{name: getattr(sampling, name) for name in same},
            "stop_token_ids": sorted(sampling.stop_token_ids),
        },
        "grammar": None if sampling.constraint is None else sampling.constraint.grammar,
    }


def _answer(line: bytes) -> dict[str, int] | None:
    """Return a token, with the model's own best if that was asked for; None at the end."""
    if not line.endswith(b"\n"):
        raise ConnectionResetError("the backend hung up")
    document = json.loads(line)
    if "error" in document:
        error = document["error"]
        if error["kind"] == "CapacityError":
            raise CapacityError(error["message"])
        refused = error["kind"] in ("KVBenchError", "UsageError")
        raise request_error(f"{error['kind']}: {error['message']}", refused=refused)
    return document if "token" in document else None


def _cells(options: EngineOptions) -> int | None:
    """Return how many cached tokens were asked for, in one way or the other."""
    if unknown := options.engine_args.keys() - {"cells", _FLASH}:
        raise UsageError(
            f"--engine-arg {min(unknown)}: llamacpp takes cells=N and {_FLASH}=on or off only"
        )
    if (text := options.engine_args.get("cells")) is None:
        return options.max_live_tokens
    if not (text.isascii() and text.isdigit() and SMALLEST_CELLS <= int(text[:10]) < 1 << 31):
        raise UsageError(f"--engine-arg cells={text}: expected {SMALLEST_CELLS} or more tokens")
    return int(text)


def _flash(options: EngineOptions) -> bool:
    """Return whether attention is llama.cpp's fused one, which computes in half precision.

    As `llama-server` chooses, but never for rows in float32, which are for exact tokens.
    """
    chosen = options.engine_args.get(_FLASH)
    if chosen not in (None, "on", "off"):
        raise UsageError(f"--engine-arg {_FLASH}={chosen}: expected on or off")
    if options.kv_dtype and chosen == "off":
        raise UsageError(
            f"--kv-dtype {options.kv_dtype} needs flash attention, without which llama.cpp "
            f"quantises no values; leave out --engine-arg {_FLASH}=off"
        )
    if chosen is None:
        return bool(options.kv_dtype) or options.dtype == "float16"
    return chosen == "on"


class LlamaCppEngine(ServingEngine):
    """Sessions as sequences of one llama.cpp cache."""

    capabilities: ClassVar[frozenset[Capability]] = (
        SPAN_CAPABILITIES
        | {Capability.FORK, Capability.MEMORY_BLOCKS, Capability.SHARE_PREFIX}
        | ServingEngine.capabilities
    )
    takes_arguments: ClassVar[bool] = True
    kv_dtypes: ClassVar[tuple[str, ...]] = tuple(KV_ROW_TYPES)
    # Every session's attention goes over the cells of all.
    at_once: ClassVar[int] = 1

    _wire: LlamaCppWire

    def __init__(self, info: EngineInfo, wire: EngineWire, log: Path, bytes_per_token: int) -> None:
        self._banks: dict[str, int] = {}  # memory bank -> start of the backend that has it
        super().__init__(info, wire, log, bytes_per_token)

    @classmethod
    def create(cls, options: EngineOptions) -> Self:
        refuse_method(options.method)
        cls.check_kv_dtype(options)
        cls.check_compute(options.dtype, options.device)
        python = python_of("llamacpp")
        model = resolve_model(options.model, python, options.context_limit)
        shape, folder = model.shape, scratch_folder()
        facts = ModelFacts(
            *(shape.architecture, shape.layers, shape.query_heads, shape.kv_heads, shape.head_dim),
            *(shape.context_limit, shape.eos_token_ids),
            vocabulary=shape.vocabulary,
        )
        size = facts.bytes_per_token(options.kv_dtype or options.dtype)
        cells = _cells(options) or min(free_tokens(size, SMALLEST_CELLS), MOST_CELLS)
        wire = LlamaCppWire(
            *(options, facts, python, model.tokenizer, folder, False, False),
            *(model.file, cells, model.sha),
        )
        return run_server(cls, wire, "llamacpp", model.sha)

    @classmethod
    def check_model(cls, model: str) -> None:
        resolve_model(model, python_of("llamacpp"))

    @classmethod
    def check_options(cls, options: EngineOptions) -> None:
        refuse_method(options.method)
        _cells(options)
        _flash(options)
        cls.check_kv_dtype(options)
        model = resolve_model(options.model, python_of("llamacpp"), options.context_limit)
        if options.kv_dtype and (size := model.shape.head_dim) % BLOCK:
            raise UsageError(
                f"--kv-dtype {options.kv_dtype}: llama.cpp quantises blocks of {BLOCK} values, and "
                f"heads of this model have {size}; leave it out"
            )

    @classmethod
    def check_kv_dtype(cls, options: EngineOptions) -> None:
        super().check_kv_dtype(options)
        if options.kv_dtype and options.method.name != "full":
            raise UsageError(
                f"--kv-dtype {options.kv_dtype}: llama.cpp's own, rows in quantised blocks, which "
                f"{options.method.label} can neither score nor move; use --method full"
            )

    @classmethod
    def check_compute(cls, dtype: str, device: str) -> None:
        """Refuse a row type that is not exact enough to be moved, and a GPU."""
        if dtype not in ROW_TYPES:
            known = ", ".join(ROW_TYPES)
            raise UsageError(f"dtype {dtype!r}: rows of the llamacpp engine are {known}")
        if device not in ("auto", "cpu"):
            raise UsageError(f"device {device!r}: the llamacpp engine is built for the CPU")

    def fork(self, session: str, new: str, labeller: PhaseLabeller) -> None:
        """Open a session that goes on from where another one is.

        Both have the same cells, until one of the two would change what lies in some: it copies
        those first. Kept queries, and sums (h2o), are copied at once.
        """
        source = self._sessions[session]
        if source.bank:
            self._check_bank(source.bank)
        self._fork(session, new, labeller)
        state = self._sessions[new]
        if source.bank and not state.bank:  # no backend has any of its tokens yet
            self._attach(state, source.bank)

    def memorise(self, session: str, bank: str, tokens: int | None = None, start: int = 0) -> int:
        """Add rows of a session to a memory bank, between two generations; return how many.

        Those that it brought back itself are no part of it.
        """
        memory_method(self._wire.options.method)
        self._check_bank(bank)
        epoch = self._sessions[session].epoch
        rows = int(self._command(session, "memorise", bank=bank, tokens=tokens, start=start))
        self._banks[bank] = epoch
        return rows

    def recollect(self, session: str, bank: str, tokens: Sequence[int]) -> float | None:  # noqa: ARG002
        # Too many to be read are too many: who reads them says so.
        room = min(self.info.context_limit, self._wire.cells)
        if self._wire.options.banks is None or len(tokens) >= room:
            return None
        return self._backend.serve(partial(self._recollect, bank, tokens))

    def _recollect(self, bank: str, tokens: Sequence[int]) -> float | None:
        """Have the backend that runs now find a past session; it must have the earlier ones."""
        self._check_bank(bank)
        epoch = self._backend.epoch
        seconds: float | None = self._told("recollect", bank=bank, past=list(tokens))
        if seconds is not None:
            self._banks[bank] = epoch
        return seconds

    def preserve(self, bank: str, tokens: Sequence[int], seconds: float) -> None:
        if self._wire.options.banks is not None:
            self._check_bank(bank)
            self._told("preserve", bank=bank, past=list(tokens), seconds=seconds)

    def attach(self, session: str, bank: str) -> None:
        """Have every prompt of a new session bring back rows of a bank, before it is read.

        Their number is fixed here; a bank that grows later has more to choose from.
        """
        memory_method(self._wire.options.method)
        if bank not in self._banks:
            raise KeyError(bank)
        state = self._at_rest(session)
        if state.tokens or state.bank:
            raise UsageError(f"session {session} has begun: a memory is attached before that")
        self._attach(state, bank)
        self._check_length(session, state.taken)

    def _attach(self, state: ServingSession, bank: str) -> None:
        self._check_bank(bank)
        state.taken = self._told("attach", session=state.backend_name, bank=bank)
        state.bank, state.epoch = bank, self._backend.epoch

    def recalled(self, session: str) -> NDArray[np.int64]:
        state = self._sessions[session]
        if not state.bank:
            return np.zeros((0, 0), np.int64)
        self._check_bank(state.bank)
        rows = self._told("recalled", session=state.backend_name)
        return np.array(rows, np.int64).reshape(len(rows), -1)

    def forget(self, bank: str) -> None:
        if self._banks.pop(bank, 0) == self._backend.epoch:
            with suppress(OSError):  # it went with its backend
                self._told("forget", bank=bank)

    def reconfigure(self, method: Method) -> None:
        super().reconfigure(method)
        for bank in list(self._banks):  # in another method's blocks
            self.forget(bank)

    def _check_bank(self, bank: str) -> None:
        """Raise if rows of a memory bank went with a backend: MemoryLostError."""
        if self._banks.get(bank, self._backend.epoch) != self._backend.epoch:
            raise MemoryLostError(f"the backend that had memory bank {bank} is gone")

    def _told(self, command: str, **arguments: Any) -> Any:
        """Return what the backend answers to a command about memories."""
        try:
            return self._control.call(command, **arguments)
        except ControlError as error:
            raise _refusal(error) from None

    def _stream(self, state: ServingSession, generation: ServingGeneration) -> FinishReason:
        if state.bank:
            self._check_bank(state.bank)
        return super()._stream(state, generation)

    def save_block(self, session: str, start: int, end: int) -> Block:
        saved = self._command(session, "save_block", start=start, end=end)
        path = Path(saved["path"])
        data = np.fromfile(path, np.uint8)
        path.unlink()
        return Block(start, end, saved["at"], data)

    def evict_spans(self, session: str, spans: Sequence[SpanRange]) -> int:
        return int(self._command(session, "evict_spans", spans=[list(span) for span in spans]))

    def restore_block(self, session: str, block: Block, at: int | None = None) -> None:
        path = self._wire.folder / f"block-{id(block):x}.restored"
        block.data.tofile(path)
        try:
            self._command(session, "restore_block", start=block.start, path=str(path), at=at)
        finally:
            path.unlink(missing_ok=True)

    def span_attention(
        self, session: str, spans: Sequence[SpanRange], layers: Sequence[int], decay: float
    ) -> list[float]:
        asked = {"spans": [list(span) for span in spans], "layers": list(layers), "decay": decay}
        return [float(mass) for mass in self._command(session, "span_attention", **asked)]

    def embed_tokens(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        ask = partial(self._control.call, "embed_tokens", tokens=list(tokens))
        return np.asarray(self._backend.serve(ask), np.float32)

    def _command(self, session: str, command: str, **arguments: Any) -> Any:
        """Send a command about a session that lives in the backend.

        ConnectionError if its rows went with a backend: what the caller believed to be in the cache
        is not, and only the next generation computes it again.
        """
        state = self._at_rest(session)
        self._note_loss(state, look=False)
        if state.lost:
            raise ConnectionError(f"session {session}: the backend that had its rows is gone")
        if not state.epoch:
            raise UsageError(f"session {session} has nothing in the cache yet")
        try:
            return self._control.call(command, session=state.backend_name, **arguments)
        except ControlError as error:
            raise _refusal(error) from None
        except OSError as error:
            self._note_loss(state)
            raise ConnectionError(f"session {session}: {error}") from error

    def _tell(self, state: ServingSession, command: str, **arguments: Any) -> Any:
        try:
            return super()._tell(state, command, **arguments)
        except ControlError as error:
            raise _refusal(error) from None


def _refusal(error: ControlError) -> KVBenchError:
    """Return what the backend refused a command with: it says `Kind: text`."""
    kind, _, text = str(error).partition(": ")
    kinds = {"UsageError": UsageError, "CapacityError": CapacityError}
    return kinds[kind](text) if kind in kinds else KVBenchError(str(error))
