"""SGLang's command line: what every arm gets, and what the compressed ones need."""

from __future__ import annotations

from collections.abc import Mapping

from agentbench_kv.engines.options import EngineOptions
from agentbench_kv.engines.serving.model import ModelFacts

MARGIN = 8
"""Positions SGLang keeps back at the end of a context; it is told of so many more."""

_CPU_CACHE_BYTES = 1 << 30
_CPU_CHUNK = 512


def flags(options: EngineOptions, facts: ModelFacts, *, gpu: bool, stock: bool) -> list[str]:
    """Return the options of a server, without its address."""
    arguments: dict[str, str | None] = {
        "dtype": options.dtype,
        "load-format": options.load_format,
        "context-length": str(facts.context_limit + MARGIN),
        "grammar-backend": "none",
        "sampling-defaults": "openai",
        "skip-server-warmup": None,
        "incremental-streaming-output": None,
        "log-level": "info",
        "log-level-http": "warning",
        **_memory(options, facts, gpu=gpu),
    }
    if not gpu:
        arguments |= _cpu(options)
    elif ":" in options.device:
        arguments["base-gpu-id"] = options.device.partition(":")[2]
    if not stock:
        arguments |= required(gpu=gpu)
    return as_flags({**arguments, **options.engine_args})


def required(*, gpu: bool) -> dict[str, str | None]:
    """Return what eviction in place needs."""
    sessions: dict[str, str | None] = {
        "disable-radix-cache": None,
        "enable-streaming-session": None,
    }
    return sessions | ({"disable-piecewise-cuda-graph": None} if gpu else {})


def as_flags(arguments: Mapping[str, str | None]) -> list[str]:
    """Return options as words of a command line; without a value they are switches."""
    words = []
    for name, value in arguments.items():
        words += [f"--{name}"] if value is None or value == "" else [f"--{name}", value]
    return words


def _memory(options: EngineOptions, facts: ModelFacts, *, gpu: bool) -> dict[str, str | None]:
    tokens = options.max_live_tokens
    if tokens is None and not gpu:
        tokens = _CPU_CACHE_BYTES // facts.bytes_per_token(options.dtype)
    return {} if tokens is None else {"max-total-tokens": str(tokens)}


def _cpu(options: EngineOptions) -> dict[str, str | None]:
    return {
        "device": "cpu",
        "attention-backend": "torch_native",
        "sampling-backend": "pytorch",
        "disable-cuda-graph": None,
        "mem-fraction-static": "0.1",
        "chunked-prefill-size": str(_CPU_CHUNK),
        # Sessions at rest keep their rows in the table of requests.
        "max-running-requests": str(max(32, 2 * options.concurrency)),
        "sleep-on-idle": None,
    }
