"""vLLM's command line and its HTTP surface."""

from __future__ import annotations

import json
import secrets
import socket
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from agentbench_kv.engines.options import EngineOptions
from agentbench_kv.engines.serving.backend.policy import VARIABLE, Policy
from agentbench_kv.engines.serving.control import ControlClient
from agentbench_kv.engines.serving.links import link_packages
from agentbench_kv.engines.serving.model import ModelFacts
from agentbench_kv.engines.serving.process import Launch
from agentbench_kv.engines.serving.streams import post_events
from agentbench_kv.engines.serving.wire import Request, Wire, stop_document
from agentbench_kv.methods.base import Method

_BACKEND = "agentbench_kv.engines.vllm.backend"
_SERVED = "kvbench"
_CPU_BLOCK = 32
_CPU_CACHE_BYTES = 1 << 30


@dataclass(frozen=True)
class VllmPaths:
    """Where things are: the environment's Python, the model, a private folder."""

    python: Path
    model: Path
    folder: Path


class VllmWire(Wire):
    """One vLLM server on a Unix socket in a private folder."""

    def __init__(
        self, options: EngineOptions, facts: ModelFacts, paths: VllmPaths, *, stock: bool
    ) -> None:
        self._options = options
        self._facts = facts
        self._paths = paths
        self.stock = stock
        self._key = secrets.token_urlsafe(16)
        transport = httpx.HTTPTransport(uds=str(self._socket), limits=_UNLIMITED)
        headers = {"Authorization": f"Bearer {self._key}"}
        self._client = httpx.Client(
            transport=transport, base_url="http://vllm", headers=headers, timeout=10.0
        )

    @property
    def control(self) -> Path:
        """The control channel's socket; nobody listens on it in a stock server."""
        return self._paths.folder / "control"

    @property
    def _socket(self) -> Path:
        return self._paths.folder / "http"

    @property
    def context_limit(self) -> int:
        """Last position + 1: what the model reads, what was asked for, what the pool holds.

        vLLM wants room for one whole context, as if nothing were ever evicted.
        """
        asked = self._options.engine_args.get("max-model-len")
        limits = [self._facts.context_limit, self._options.max_live_tokens, asked and int(asked)]
        return min(limit for limit in limits if limit)

    def use(self, method: Method) -> None:
        """Start servers with another method from now on."""
        self._options = replace(self._options, method=method)

    def launch(self) -> Launch:
        """Return the command that starts the server."""
        # A server that was killed leaves its socket, which another could not bind.
        self._socket.unlink(missing_ok=True)
        environment = {
            "VLLM_API_KEY": self._key,
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "PYTHONPATH": str(self._links()),
        }
        if not on_gpu(self._options.device):
            environment |= {"VLLM_TARGET_DEVICE": "cpu"}
        if not self.stock:
            policy = Policy(
                self._options.method, self._paths.model, self.control, self._options.trace
            )
            environment[VARIABLE] = str(policy.save(self._paths.folder))
            environment["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        if self._options.allow_untested:
            environment["KVBENCH_ALLOW_UNTESTED_ENGINE"] = "1"
        return Launch(self._command(), self._ready, environment)

    def stream(self, request: Request) -> Generator[int]:
        """Yield a completion's ids."""
        for event in post_events(self._client, "/v1/completions", self._body(request)):
            _note_usage(event, request)
            for choice in event.get("choices", ()):
                yield from choice.get("token_ids") or ()

    def details(self) -> dict[str, str]:
        """Return version, set-up and flags, without what is this machine's own."""
        version = self._client.get("/version").json().get("version", "unknown")
        return {**super().details(), "version": str(version), "flags": " ".join(self._flags())}

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _body(self, request: Request) -> dict[str, Any]:
        sampling = request.sampling
        extra = {"kvbench_session": request.session, "kvbench_labels": request.recipe}
        stop = stop_document(sampling)
        if stop is not None:
            extra["kvbench_stop"] = json.dumps(stop)
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
            **({} if self.stock else {"vllm_xargs": extra}),
        }

    def _ready(self) -> bool:
        if not listens(self._socket):
            return False
        try:
            up = self._client.get("/health").status_code == httpx.codes.OK
        except httpx.TransportError:
            return False
        if not up or self.stock:
            return up
        with closing(ControlClient(self.control)) as control:
            return control.answers()

    def _links(self) -> Path:
        folder = self._paths.folder / "path"
        plugins = (
            {}
            if self.stock
            else {"vllm.general_plugins": {"kvbench": f"{_BACKEND}.plugin:register"}}
        )
        return link_packages(folder, [type(self._options.method).__module__], plugins)

    def _command(self) -> list[str]:
        launcher = [str(self._paths.python), "-m", f"{_BACKEND}.launch", "serve"]
        return [*launcher, str(self._paths.model), "--uds", str(self._socket), *self._flags()]

    def _flags(self) -> list[str]:
        options = self._options
        arguments: dict[str, str | None] = {
            "served-model-name": _SERVED,
            "dtype": options.dtype,
            "max-num-seqs": str(options.concurrency),
            "load-format": options.load_format,
            "generation-config": "vllm",
            "uvicorn-log-level": "warning",
        }
        arguments |= self._memory()
        if not on_gpu(options.device):
            arguments |= {"enforce-eager": None}
        if self.stock:
            arguments |= {"enable-prompt-tokens-details": None}
        if not self.stock:
            arguments |= {
                "scheduler-cls": f"{_BACKEND}.scheduler.Scheduler",
                "worker-cls": f"{_BACKEND}.worker.Worker",
                "no-enable-prefix-caching": None,
                "no-async-scheduling": None,
            }
        return _flags(arguments | dict(options.engine_args))

    def _memory(self) -> dict[str, str | None]:
        """Return how large the cache is: what was asked for, or vLLM's own choice on a GPU."""
        arguments: dict[str, str | None] = {}
        block = 16 if on_gpu(self._options.device) else _CPU_BLOCK
        if self._options.max_live_tokens is not None:
            # One block is vLLM's placeholder.
            blocks = -(-self._options.max_live_tokens // block) + 1
            arguments |= {"block-size": str(block), "num-gpu-blocks-override": str(blocks)}
            arguments["max-model-len"] = str(self.context_limit)
        elif not on_gpu(self._options.device):
            arguments["block-size"] = str(block)
        if not on_gpu(self._options.device):
            arguments["kv-cache-memory-bytes"] = str(_CPU_CACHE_BYTES)
        return arguments


_UNLIMITED = httpx.Limits(max_connections=None, max_keepalive_connections=32)


def listens(path: Path) -> bool:
    """Return whether anybody listens on a Unix socket; vLLM makes it long before it does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


def on_gpu(device: str) -> bool:
    """Return whether a device name means a GPU, `auto` if there is one."""
    if device != "auto":
        return device.startswith("cuda")
    import torch

    return torch.cuda.is_available()


def _note_usage(event: dict[str, Any], request: Request) -> None:
    """Keep how many of the prompt's tokens the server had cached, where it says so."""
    details = (event.get("usage") or {}).get("prompt_tokens_details")
    if details is not None:
        request.usage["cached_tokens"] = int(details.get("cached_tokens") or 0)


def _flags(arguments: dict[str, str | None]) -> list[str]:
    flags = []
    for name, value in arguments.items():
        flags += [f"--{name}"] if value is None or value == "" else [f"--{name}", value]
    return flags
