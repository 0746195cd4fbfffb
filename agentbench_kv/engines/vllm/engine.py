"""The vLLM engine: vLLM 0.32 or 0.33 in a process of its own, evicting through a plug-in."""

from __future__ import annotations

import getpass
import json
import os
import re
import tempfile
from collections.abc import Generator
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

import httpx

from agentbench_kv.engines.base import Capability, Constraint, EngineOptions
from agentbench_kv.engines.embedded.model import check_dtype
from agentbench_kv.engines.serving.engine import ServingEngine, start_server
from agentbench_kv.engines.serving.model_facts import CpuRoom, ModelFacts, room_on_cpu
from agentbench_kv.engines.serving.process import Launch
from agentbench_kv.engines.serving.refusals import (
    check_context,
    check_folder,
    offload_gb,
    refuse_arguments,
    refuse_divided,
    refuse_offload,
    refuse_quantised,
    refuse_shortened,
    refuse_unshared,
)
from agentbench_kv.engines.serving.transport import UnixTransport, post_events
from agentbench_kv.engines.serving.wire import (
    EngineWire,
    GenerationRequest,
    as_flags,
    asked_context,
    stop_document,
)
from agentbench_kv.environments import python_of
from agentbench_kv.errors import PrerequisiteError, UsageError
from agentbench_kv.methods.base import Method

_PLUGIN = "agentbench_kv.engines.vllm.plugin"
_SERVED = "kvbench"
_URL = "http://vllm"  # a name only: the socket decides
_CPU_BLOCK = 32
_CONTEXT = "max-model-len"
_BYTES = "kv-cache-memory-bytes"


def _compiled_by_torch() -> str:
    """Return where PyTorch keeps what it has compiled, which outlives a run."""
    usual = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"
    return os.environ.get("TORCHINDUCTOR_CACHE_DIR") or str(usual)


class VllmEngineWire(EngineWire):
    """One vLLM server on a Unix socket; as shipped, with prefix caching and async scheduling."""

    threads: ClassVar[tuple[str, ...]] = (
        *("VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_NUM_OF_RESERVED_CPU", *EngineWire.threads),
    )

    @property
    def _socket(self) -> Path:
        return self.folder / "http"

    def _transport(self) -> httpx.BaseTransport:
        return UnixTransport(self._socket)

    @property
    def context_limit(self) -> int:
        """Last position + 1: what the model reads, what was asked for, what the pool holds.

        vLLM wants room for one whole context, as if nothing were ever evicted.
        """
        asked = asked_context(self.options, _CONTEXT)
        limits = [self.facts.context_limit, self.options.max_live_tokens, asked]
        return min(limit for limit in limits if limit)

    def launch(self) -> Launch:
        # A server that was killed leaves its socket, which another could not bind.
        self._socket.unlink(missing_ok=True)
        plugins = {} if self.stock else {"kvbench": f"{_PLUGIN}.launch:register"}
        environment = self._environment("vllm.general_plugins", plugins)
        environment |= {
            "VLLM_API_KEY": self._key,
            "VLLM_NO_USAGE_STATS": "1",
            # Its processes' sockets, and the file by which they meet: what is stopped or killed
            # would leave them behind in the temporary folder. PyTorch keeps what it compiled there.
            "VLLM_RPC_BASE_PATH": str(self.folder),
            "TMPDIR": str(self.folder),
            "TORCHINDUCTOR_CACHE_DIR": _compiled_by_torch(),
        }
        environment |= shown_gpus(self.options) if self.gpu else {"VLLM_TARGET_DEVICE": "cpu"}
        if self.stock:
            environment["VLLM_SERVER_DEV_MODE"] = "1"  # routes more, to empty its cache among them
        else:
            environment["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # `told` says so
        command = [str(self.python), "-m", f"{_PLUGIN}.launch", "serve"]
        command += [str(self.model), "--uds", str(self._socket), *self._flags()]
        size = "gpu-memory-utilization" if self.gpu else _BYTES
        memory = f"lower --engine-arg max-model-len or --concurrency, or change --engine-arg {size}"
        return Launch(command, self._ready, environment, memory=memory)

    def lost(self) -> bool:
        return super().lost() or self._down(f"{_URL}/health")

    def stream(self, request: GenerationRequest) -> Generator[int]:
        for event in post_events(self._client, f"{_URL}/v1/completions", self._body(request)):
            details = (event.get("usage") or {}).get("prompt_tokens_details")
            if details is not None:
                request.usage["cached_tokens"] = int(details.get("cached_tokens") or 0)
            for choice in event.get("choices", ()):
                yield from choice.get("token_ids") or ()

    def empty_cache(self) -> None:
        moved = "?reset_external=true" if offload_gb(self.options.method) else ""
        self._empty(f"{_URL}/reset_prefix_cache{moved}")

    def details(self) -> dict[str, str]:
        """Return version, set-up and flags, without what is this machine's own."""
        version = self._client.get(f"{_URL}/version").json().get("version", "unknown")
        sized = self._sized_here and self.options.max_live_tokens is None
        cache = {"cache": self._room.said()} if sized else {}
        flags = {"version": str(version), "flags": " ".join(self._flags())}
        return super().details() | cache | flags

    def told(self, log: str) -> dict[str, str]:
        """Name the model runner: what vLLM chose for `full` stands in its log alone."""
        if not self.stock:
            return {"model_runner": "V1"}
        if "Using V2 Model Runner" in log:
            return {"model_runner": "V2"}
        # It says nothing of V1; of itself it does, unless VLLM_LOGGING_LEVEL has it say less.
        said = "LLM engine (v" in log
        return {"model_runner": "V1" if said else "not known"}

    def _body(self, request: GenerationRequest) -> dict[str, Any]:
        sampling = request.sampling
        extra = {
            "kvbench_session": request.session,
            "kvbench_phases": json.dumps(asdict(request.prompt)),
        }
        stop = stop_document(sampling)
        if stop is not None:
            extra["kvbench_stop"] = json.dumps(stop)
        if request.given:
            extra["kvbench_given"] = json.dumps(list(request.given))
        return {
            "model": _SERVED,
            "prompt": list(request.tokens),
            "max_tokens": request.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "seed": sampling.seed,
            "stop_token_ids": sorted(sampling.stop_token_ids),
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
            "stream_options": {"include_usage": True},
            **self._form(sampling.constraint),
            **({} if self.stock else {"vllm_xargs": extra}),
        }

    @staticmethod
    def _form(constraint: Constraint | None) -> dict[str, Any]:
        return {} if constraint is None else {"structured_outputs": {"grammar": constraint.grammar}}

    def stock_tokens(self) -> int | None:
        try:
            return tokens_taken(self._client.get(f"{_URL}/metrics").text)
        except httpx.HTTPError:
            return None

    def _ready(self) -> bool:
        return self._up(f"{_URL}/health") and (self.stock or self._answers())

    def _flags(self) -> list[str]:
        options = self.options
        arguments: dict[str, str | None] = {
            "served-model-name": _SERVED,
            "dtype": options.dtype,
            "max-num-seqs": str(options.concurrency),
            "load-format": options.load_format,
            "generation-config": "vllm",
            "uvicorn-log-level": "warning",
            # Others read no grammar in llguidance's Lark.
            "structured-outputs-config": json.dumps({"backend": "guidance"}),
        }
        if options.kv_dtype:
            arguments["kv-cache-dtype"] = _KV_DTYPES[options.kv_dtype]
        if size := offload_gb(options.method):
            arguments |= {
                "kv-offloading-size": f"{size * 1e9 / 2**30:.4f}",  # GiB, over all ranks
                "kv-offloading-backend": "native",
            }
        arguments |= self._memory()
        if not self.gpu:
            arguments["enforce-eager"] = None
        if self.stock:
            arguments["enable-prompt-tokens-details"] = None
        else:
            arguments |= {
                "scheduler-cls": f"{_PLUGIN}.scheduler.EvictingScheduler",
                "worker-cls": f"{_PLUGIN}.runner.EvictingWorker",
                "no-enable-prefix-caching": None,
                "no-async-scheduling": None,
            }
        return as_flags(arguments | dict(options.engine_args))

    def _memory(self) -> dict[str, str | None]:
        """Return how large the cache is: what was asked for, or vLLM's own choice on a GPU."""
        # vLLM's own limit is another where RoPE is scaled (YaRN: more, LongRoPE: the original).
        arguments: dict[str, str | None] = {"max-model-len": str(self.context_limit)}
        block = 16 if self.gpu else _CPU_BLOCK
        if self.options.max_live_tokens is not None:
            # One block is vLLM's placeholder.
            blocks = -(-self.options.max_live_tokens // block) * self.facts.groups + 1
            arguments |= {"block-size": str(block), "num-gpu-blocks-override": str(blocks)}
        elif not self.gpu:
            arguments["block-size"] = str(block)
        if self.options.max_live_tokens is not None or self.options.context_limit:
            arguments["max-model-len"] = str(self.context_limit)
        if self._sized_here:
            size = self._room.tokens * self._room.bytes_per_token
            arguments[_BYTES] = str(size)
        return arguments

    @property
    def _sized_here(self) -> bool:
        return not self.gpu and _BYTES not in self.options.engine_args

    @cached_property
    def _room(self) -> CpuRoom:
        """The cache on a CPU, into which vLLM wants one whole context to fit."""
        # A whole context begins a block, and the placeholder is one more.
        needed = self.context_limit + 2 * _CPU_BLOCK
        room = room_on_cpu(self.facts, self.options, needed)
        if room.tokens < needed:
            size = room.bytes_per_token
            raise PrerequisiteError(
                f"vLLM wants room for one whole context, {needed * size / 2**30:.1f} GiB; half of "
                f"the memory that is free beside the weights is {room.most * size / 2**30:.1f} "
                f"GiB; lower it: --engine-arg max-model-len={max(room.most - 2 * _CPU_BLOCK, 1)}"
            )
        return room


def tokens_taken(metrics: str) -> int | None:
    """Read from vLLM's own metrics how many places of its cache are taken; None if they lack it.

    Blocks that only its prefix cache still knows are free to it.
    """
    share = re.search(r"^vllm:kv_cache_usage_perc\{.*\} (\S+)$", metrics, re.MULTILINE)
    about = re.search(r"^vllm:cache_config_info\{(.*)\}", metrics, re.MULTILINE)
    if share is None or about is None:
        return None
    facts = dict(re.findall(r'(\w+)="(\d+)"', about[1]))
    if not {"num_gpu_blocks", "block_size"} <= facts.keys():
        return None
    # The placeholder is no block that could be taken.
    blocks = round(float(share[1]) * (int(facts["num_gpu_blocks"]) - 1))
    return blocks * int(facts["block_size"])


# Model types whose windows were found exact beside layers that a method evicts from.
_WINDOWED = ("gpt_oss", "gemma3_text")


def _unsupported(facts: ModelFacts, options: EngineOptions, *, gpu: bool) -> str:
    """Say what about a model vLLM, or the plug-in within it, would do wrong; empty if nothing."""
    stock = options.method.name == "full"
    if facts.rope_type == "dynamic":
        return "dynamic RoPE, which vLLM scales at any length and not only beyond the original"
    if facts.family == "gpt_oss" and facts.rope_type != "yarn":
        return "RoPE without YaRN, which vLLM takes for granted in this family"
    mixed = 0 < facts.full_layers < facts.layers
    if mixed and facts.family not in _WINDOWED:
        return "windows in some layers, and nobody has checked it here"
    if facts.nested and not gpu:
        return "a part for images, for which vLLM needs torchvision (the CPU environment has none)"
    if not stock and facts.groups_of(facts.full_layers) > 1:
        return "more layers without a window than with one"
    return ""


def on_gpu(device: str) -> bool:
    """Return whether a device name means a GPU, `auto` if there is one; UsageError if none does."""
    if re.fullmatch(r"cpu|cuda(:\d+)?", device, re.ASCII):
        return device != "cpu"
    if device != "auto":
        raise UsageError(f"device {device!r} is none; use auto, cpu, cuda or cuda:N")
    import torch

    return torch.cuda.is_available()


def shown_gpus(options: EngineOptions) -> dict[str, str]:
    """Return the variable by which a server sees no other GPUs than `cuda:N` and those next to it.

    N counts those that this process sees. UsageError if there are not so many.
    """
    number = options.device.partition(":")[2]
    if not number:
        return {}
    size = next((options.engine_args[name] for name in _TENSOR if name in options.engine_args), "1")
    wanted = range(int(number), int(number) + int(size if size.isdigit() else 1))
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if seen is None:
        return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, wanted))}
    there = [each.strip() for each in seen.split(",") if each.strip()]
    if wanted.stop > len(there):
        raise UsageError(
            f"--device {options.device}: CUDA_VISIBLE_DEVICES={seen} shows {len(there)} GPUs"
        )
    return {"CUDA_VISIBLE_DEVICES": ",".join(there[wanted.start : wanted.stop])}


_TENSOR = ("tensor-parallel-size", "tp-size", "tp")
_OFFLOAD = ("kv-offloading-size", "kv-offloading-backend", "kv-transfer-config")
# What `--kv-dtype` is called on its command line; per token and head in its Triton backend alone.
_KV_DTYPES = {
    "fp8": "fp8",
    "fp8_e4m3": "fp8_e4m3",
    "fp8_e5m2": "fp8_e5m2",
    "int8": "int8_per_token_head",
    "int4": "int4_per_token_head",
}
_CPU_KV_DTYPES = ("fp8", "fp8_e4m3", "fp8_e5m2")


class VllmEngine(ServingEngine):
    """Sessions inside vLLM, whose blocks go back to its allocator when a method evicts.

    `full` is vLLM as shipped: prefix caching and async scheduling on, no plug-in. Every other
    method, `full-constrained` among them, runs with the plug-in and both off.
    """

    capabilities: ClassVar[frozenset[Capability]] = (
        frozenset({Capability.OFFLOAD, Capability.SHARE_PREFIX}) | ServingEngine.capabilities
    )
    takes_arguments: ClassVar[bool] = True
    kv_dtypes: ClassVar[tuple[str, ...]] = tuple(_KV_DTYPES)

    @classmethod
    def create(cls, options: EngineOptions) -> Self:
        environment, gpu = _environment_for(options.device), on_gpu(options.device)
        return start_server(cls, VllmEngineWire, "vllm", options, environment, gpu=gpu)

    @classmethod
    def check_compute(cls, dtype: str, device: str) -> None:
        check_dtype(dtype)
        python_of(_environment_for(device))

    @classmethod
    def check_method(cls, model: str, method: Method) -> None:
        cls.check_options(EngineOptions(model, method))

    @classmethod
    def check_kv_dtype(cls, options: EngineOptions) -> None:
        super().check_kv_dtype(options)
        if options.kv_dtype in {"", *_CPU_KV_DTYPES} or on_gpu(options.device):
            return
        raise UsageError(
            f"--kv-dtype {options.kv_dtype}: vLLM's attention on a CPU has no such rows; use "
            f"{', '.join(_CPU_KV_DTYPES)}, --device cuda where there is a GPU, or --engine "
            "embedded, which simulates it"
        )

    @classmethod
    def check_options(cls, options: EngineOptions) -> None:
        gpu = on_gpu(options.device)
        shown_gpus(options)
        refuse_shortened(options, _CONTEXT, _BYTES, *_OFFLOAD)
        check_context(options, _CONTEXT)
        refuse_arguments("vllm", options, ("dp", "pp", "dcp", "pcp"))
        refuse_divided("vllm", options)
        cls.check_kv_dtype(options)
        refuse_quantised(options)
        refuse_offload("vLLM", _OFFLOAD, options, gpu)
        check_folder("vllm", options, lambda facts: _unsupported(facts, options, gpu=gpu))
        refuse_unshared("vLLM", options)


def _environment_for(device: str) -> str:
    return "vllm-cuda" if on_gpu(device) else "vllm"
