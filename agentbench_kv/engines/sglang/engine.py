"""The SGLang engine: 0.5.12 or 0.5.23 in a process of its own, evicting through a plug-in."""

from __future__ import annotations

import contextlib
import itertools
import random
import socket
import time
from collections.abc import Generator
from dataclasses import asdict
from functools import cached_property
from typing import Any, ClassVar, Self

import httpx

from agentbench_kv.engines.base import Capability, EngineOptions, KVStats, PhaseLabeller
from agentbench_kv.engines.core.prefixes import PREFIXES
from agentbench_kv.engines.embedded.model import check_dtype, pick_device
from agentbench_kv.engines.serving.engine import ServingEngine, start_server
from agentbench_kv.engines.serving.model_facts import CpuRoom, ModelFacts, room_on_cpu
from agentbench_kv.engines.serving.process import ControlClient, Launch
from agentbench_kv.engines.serving.refusals import (
    check_context,
    check_folder,
    offload_gb,
    refuse_arguments,
    refuse_offload,
    refuse_quantised,
    refuse_shortened,
    refuse_unshared,
)
from agentbench_kv.engines.serving.transport import post_events, request_error
from agentbench_kv.engines.serving.wire import (
    EngineWire,
    GenerationRequest,
    as_flags,
    asked_context,
    stop_document,
)
from agentbench_kv.engines.sglang.plugin.hooks import KEY
from agentbench_kv.environments import python_of, version_there
from agentbench_kv.errors import CapacityError
from agentbench_kv.methods.base import Method

# Positions SGLang keeps back at the end of a context; it is told of that many more.
MARGIN = 8
_CONTEXT = "context-length"
_TOKENS = "max-total-tokens"
_MEMORY = (
    "lower --concurrency or --engine-arg max-total-tokens, or change --engine-arg "
    "mem-fraction-static"
)
_PLUGIN = "agentbench_kv.engines.sglang.plugin"
_NO_GRAMMARS = ("0.5.12",)
_OFFLOAD = ("enable-hierarchical-cache", "hicache-size", "hicache-ratio")
_HOST = "127.0.0.1"
_PORTS = range(20_000, 30_000)
_POLL_S = 0.005
_requests = itertools.count(1)


def _context(facts: ModelFacts, options: EngineOptions) -> int:
    """Last position + 1: what the model reads, or less if that was asked for."""
    asked = asked_context(options, _CONTEXT)
    return facts.context_limit if asked is None else min(facts.context_limit, asked - MARGIN)


def flags(
    options: EngineOptions,
    facts: ModelFacts,
    room: CpuRoom | None,
    *,
    gpu: bool,
    stock: bool,
    grammars: bool,
) -> list[str]:
    """Return the options of a server, without its address; `stock` is as shipped.

    `room` is what a server on a CPU has for its cache; `grammars`: whether llguidance is there.
    """
    arguments: dict[str, str | None] = {
        "dtype": options.dtype,
        "load-format": options.load_format,
        "context-length": str(_context(facts, options) + MARGIN),
        "grammar-backend": "llguidance" if grammars else "none",
        "sampling-defaults": "openai",
        "skip-server-warmup": None,
        "incremental-streaming-output": None,
        "log-level": "info",
        "log-level-http": "warning",
    }
    if options.kv_dtype:
        arguments["kv-cache-dtype"] = options.kv_dtype
    if size := offload_gb(options.method):
        # Its pool there must have room for more than the GPU's.
        arguments |= {"enable-hierarchical-cache": None, "hicache-size": str(size)}
    tokens = options.max_live_tokens
    if tokens is None and room is not None:
        tokens = room.tokens
    if tokens is not None:
        arguments[_TOKENS] = str(tokens)
    if not gpu:
        arguments |= _cpu(options)
    else:
        arguments |= _gpu(options)
    if not stock:
        # What eviction in place needs.
        arguments |= {"disable-radix-cache": None, "enable-streaming-session": None}
        if gpu:
            arguments["disable-piecewise-cuda-graph"] = None
            # SGLang's own is 2,048 and more; a place for queries is kept for each.
            arguments["max-running-requests"] = _requests_of(options)
    return as_flags({**arguments, **options.engine_args})


def _gpu(options: EngineOptions) -> dict[str, str | None]:
    arguments: dict[str, str | None] = {}
    if options.dtype == "float32":
        # SGLang's own choices by the GPU (FlashAttention 3, FlashInfer, TensorRT-LLM) have none.
        arguments |= {"attention-backend": "triton", "sampling-backend": "pytorch"}
    if ":" in options.device:
        arguments["base-gpu-id"] = options.device.partition(":")[2]
    return arguments


def _cpu(options: EngineOptions) -> dict[str, str | None]:
    return {
        "device": "cpu",
        "attention-backend": "torch_native",
        "sampling-backend": "pytorch",
        "disable-cuda-graph": None,
        "mem-fraction-static": "0.1",
        "max-running-requests": _requests_of(options),
        "sleep-on-idle": None,
    }


def _requests_of(options: EngineOptions) -> str:
    """Return how many requests there may be: as many sessions at rest keep theirs as run.

    Shared prefixes have one each.
    """
    prefixes = PREFIXES + 1 if options.method.prefix == "shared" else 0
    return str(max(32, 2 * options.concurrency) + prefixes)


class SglangEngineWire(EngineWire):
    """One SGLang server on a loopback port; as shipped, its radix cache finds earlier turns."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._commands = ControlClient(self.control)
        self._complete: dict[str, int] = {}  # session -> tokens of its completed turns

    @property
    def context_limit(self) -> int:
        return _context(self.facts, self.options)

    @cached_property
    def _room(self) -> CpuRoom | None:
        context = self.context_limit + MARGIN
        return None if self.gpu else room_on_cpu(self.facts, self.options, context)

    def details(self) -> dict[str, str]:
        chosen = self.options.max_live_tokens or _TOKENS in self.options.engine_args
        cache = {} if chosen or self._room is None else {"cache": self._room.said()}
        return super().details() | cache | {"version": self._version()}

    @cached_property
    def holds_grammars(self) -> bool:
        """Whether it can hold to grammars.

        0.5.12 pins an llguidance that cannot. With a newer one, sessions that evict went on with
        other tokens behind an answer that was held to a grammar and cut off.
        """
        version = version_there(self.python, "sglang").partition("+")[0]
        return version not in _NO_GRAMMARS and super().holds_grammars

    def _version(self) -> str:
        with contextlib.suppress(httpx.HTTPError, ValueError, KeyError):
            return str(self._client.get("/server_info").json()["version"])
        return "unknown"

    def launch(self) -> Launch:
        self._commands.close()
        port = _free_port()
        self._client.base_url = httpx.URL(f"http://{_HOST}:{port}")
        command = [str(self.python), "-m", f"{_PLUGIN}.launch"]
        command += ["--model-path", str(self.model), "--host", _HOST, "--port", str(port)]
        what = self.options, self.facts, self._room
        grammars = self.holds_grammars
        command += flags(*what, gpu=self.gpu, stock=self.stock, grammars=grammars)
        plugins = {} if self.stock else {"kvbench": f"{_PLUGIN}.hooks:register"}
        if not self.gpu:
            plugins["kvbench-cpu"] = f"{_PLUGIN}.cpu:register"
        environment = self._environment("sglang.srt.plugins", plugins) | {
            KEY: self._key,
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
        }
        if not self.gpu:
            environment["SGLANG_USE_CPU_ENGINE"] = "1"
        return Launch(command, self._ready, environment, memory=_MEMORY)

    def lost(self) -> bool:
        # `/health` answers without the scheduler; SGLang ends itself if a process of it dies.
        return super().lost() or self._down("/health")

    def empty_cache(self) -> None:
        self._empty("/flush_cache")

    def stream(self, request: GenerationRequest) -> Generator[int]:
        name = f"{request.session}.{next(_requests)}"
        body = self._stock_body(request) if self.stock else self._session_body(request)
        read, ended = len(request.tokens), False
        try:
            for event in post_events(self._client, "/generate", body | {"rid": name}):
                _refuse_abort(event)
                request.usage["cached_tokens"] = event["meta_info"].get("cached_tokens", 0)
                for token in event.get("output_ids") or ():
                    read += 1
                    yield token
            ended = True
            self._complete[request.session] = read
        finally:
            if not ended:
                self._hang_up(request.session, name, read)

    def opened(self, session: str) -> None:
        self._complete[session] = 0

    def forked(self, session: str, new: str) -> None:
        self._complete[new] = self._complete[session]

    def rewound(self, session: str, length: int) -> None:
        self._complete[session] = min(self._complete.get(session, 0), length)

    def forget(self, session: str) -> None:
        self._complete.pop(session, None)

    def close(self) -> None:
        self._commands.close()
        super().close()

    def _session_body(self, request: GenerationRequest) -> dict[str, Any]:
        """Return a turn: what the server's session has not completed, and how it ends."""
        complete = self._complete[request.session]
        if not complete and not self._commands.call("known", session=request.session):
            self._commands.call("open", session=request.session)
        new = request.tokens[complete:]
        # A request must bring an id, even to go on from the last one.
        ids = new or request.tokens[-1:]
        wishes = {
            "phases": asdict(request.prompt),
            "total": len(request.tokens),
            "new": len(request.tokens) - request.known,
            "repeated": len(ids) - len(new),
            "stop": stop_document(request.sampling),
            "stop_ids": sorted(request.sampling.stop_token_ids),
            "given": list(request.given),
        }
        return {
            "input_ids": list(ids),
            "session_params": {"id": request.session},
            "sampling_params": _sampling(request) | {"custom_params": {"kvbench": wishes}},
            "stream": True,
        }

    def _stock_body(self, request: GenerationRequest) -> dict[str, Any]:
        """Return a generation over all tokens, as any client would ask for it."""
        stop_ids = request.sampling.stop_token_ids
        stops = {"stop_token_ids": sorted(stop_ids), "ignore_eos": False} if stop_ids else {}
        return {
            "input_ids": list(request.tokens),
            "sampling_params": _sampling(request) | stops,
            "stream": True,
        }

    def _hang_up(self, session: str, name: str, read: int) -> None:
        """End a generation nobody reads any more, and see where its session is then."""
        with contextlib.suppress(OSError, httpx.HTTPError):
            self._client.post("/abort_request", json={"rid": name})
            if self.stock:
                return
            while (completed := self._commands.call("completed", session=session)) is None:
                time.sleep(_POLL_S)
            if completed > read:
                # It ended by itself, behind the last token that was read.
                self._commands.call("reset", session=session)
                completed = 0
            self._complete[session] = completed

    def _ready(self) -> bool:
        return self._up("/model_info") and (self.stock or self._answers())


def _sampling(request: GenerationRequest) -> dict[str, Any]:
    sampling = request.sampling
    return {
        "max_new_tokens": request.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "sampling_seed": sampling.seed % (1 << 31),
        "ignore_eos": True,
        # What its backend llguidance takes under this name is any Lark of llguidance.
        **({} if sampling.constraint is None else {"ebnf": sampling.constraint.grammar}),
    }


def _refuse_abort(event: dict[str, Any]) -> None:
    """Raise what the server says about a generation it gave up."""
    reason = (event.get("meta_info") or {}).get("finish_reason") or {}
    if reason.get("type") != "abort":
        return
    message = str(reason.get("message"))
    if reason.get("err_type") == CapacityError.__name__:
        raise CapacityError(message)
    # What it says of a grammar is the request's own, and no sign of its death.
    raise request_error(f"the backend gave up: {message}", refused="rammar" in message)


def _unsupported(facts: ModelFacts, options: EngineOptions, *, gpu: bool) -> str:
    """Say what about a model SGLang, or the plug-in within it, would do wrong; empty if nothing."""
    if facts.rope_type == "dynamic":
        return "dynamic RoPE, which SGLang scales at any length and not only beyond the original"
    if facts.rope_type == "longrope" and _context(facts, options) > facts.rope_original:
        return (
            "LongRoPE, for which SGLang goes by the longest session of a batch; up to "
            f"{facts.rope_original} tokens it is exact (--engine-arg context-length="
            f"{facts.rope_original + MARGIN})"
        )
    if facts.windows:
        return "windows, which SGLang's CPU attention does not know and the plug-in not at all"
    if facts.extras and not gpu:
        return f"{' and '.join(facts.extras)}, which SGLang's CPU attention leaves out"
    if facts.nested and options.method.name != "full":
        return "several modalities, of which the plug-in knows nothing"
    return ""


def _free_port() -> int:
    """Return a port nobody has, below those that systems hand out unasked."""
    # 0.5.12 names another one, 10,000 above, that it never opens.
    # It is used many seconds later; one of the others could be some connection's by then.
    while True:
        port = random.choice(_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((_HOST, port))
            return port


class SglangEngine(ServingEngine):
    """Sessions inside SGLang, whose pages go back to its allocator when a method evicts.

    `full` is SGLang as shipped: the radix cache and the overlapping scheduler on, no plug-in. Every
    other method, `full-constrained` among them, runs with the plug-in in streaming sessions.
    """

    capabilities: ClassVar[frozenset[Capability]] = (
        frozenset({Capability.FORK, Capability.OFFLOAD, Capability.SHARE_PREFIX})
        | ServingEngine.capabilities
    )
    takes_arguments: ClassVar[bool] = True
    kv_dtypes: ClassVar[tuple[str, ...]] = ("fp8_e4m3", "fp8_e5m2")

    _wire: SglangEngineWire

    @classmethod
    def create(cls, options: EngineOptions) -> Self:
        gpu = pick_device(options.device).type == "cuda"
        return start_server(cls, SglangEngineWire, "sglang", options, "sglang", gpu=gpu)

    @classmethod
    def check_model(cls, model: str) -> None:
        super().check_model(model)
        python_of("sglang")

    @classmethod
    def check_compute(cls, dtype: str, device: str) -> None:
        check_dtype(dtype)
        pick_device(device)

    @classmethod
    def check_method(cls, model: str, method: Method) -> None:
        cls.check_options(EngineOptions(model, method))

    @classmethod
    def check_options(cls, options: EngineOptions) -> None:
        named = options.device.startswith("cuda")
        gpu = named or (options.device == "auto" and pick_device("auto").type == "cuda")
        refuse_shortened(options, _CONTEXT, _TOKENS, *_OFFLOAD)
        check_context(options, _CONTEXT, MARGIN)
        refuse_arguments("sglang", options, ("dp", "pp", "tp"))
        cls.check_kv_dtype(options)
        refuse_quantised(options)
        refuse_offload("SGLang", _OFFLOAD, options, gpu)
        check_folder("sglang", options, lambda facts: _unsupported(facts, options, gpu=gpu))
        refuse_unshared("SGLang", options)

    @classmethod
    def able(cls, wire: EngineWire) -> frozenset[Capability]:
        able = super().able(wire)
        # Rows that a fork shares may not move.
        return able - {Capability.FORK} if wire.options.method.compresses else able

    def close(self, session: str) -> KVStats:
        self._wire.forget(self._sessions[session].backend_name)
        return super().close(session)

    def fork(self, session: str, new: str, labeller: PhaseLabeller) -> None:
        """Open a session that goes on from where another one is.

        Whole pages of rows are shared, a partial last one is copied. While both are open no rows of
        either can be evicted.
        """
        if self._fork(session, new, labeller):
            names = (self._sessions[name].backend_name for name in (session, new))
            self._wire.forked(*names)

    def rewind(self, session: str, length: int) -> None:
        """Forget a session's tokens from logical position `length` on.

        Not while it shares rows with a fork, unless this is SGLang as shipped.
        """
        super().rewind(session, length)
        self._wire.rewound(self._sessions[session].backend_name, length)
