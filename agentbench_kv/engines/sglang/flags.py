"""SGLang's command line: what every arm gets, and what the compressed ones need."""

from __future__ import annotations

from agentbench_kv.engines.options import EngineOptions
from agentbench_kv.engines.serving.model import ModelFacts
from agentbench_kv.engines.serving.wire import as_flags

# Positions SGLang keeps back at the end of a context; it is told of that many more.
MARGIN = 8
_CPU_CACHE_BYTES = 1 << 30


def flags(options: EngineOptions, facts: ModelFacts, *, gpu: bool, stock: bool) -> list[str]:
    """Return the options of a server, without its address; `stock` is as shipped."""
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
    }
    tokens = options.max_live_tokens
    if tokens is None and not gpu:
        tokens = _CPU_CACHE_BYTES // facts.bytes_per_token(options.dtype)
    if tokens is not None:
        arguments["max-total-tokens"] = str(tokens)
    if not gpu:
        arguments |= _cpu(options)
    elif ":" in options.device:
        arguments["base-gpu-id"] = options.device.partition(":")[2]
    if not stock:
        # What eviction in place needs.
        arguments |= {"disable-radix-cache": None, "enable-streaming-session": None}
        if gpu:
            arguments["disable-piecewise-cuda-graph"] = None
    return as_flags({**arguments, **options.engine_args})


def _cpu(options: EngineOptions) -> dict[str, str | None]:
    return {
        "device": "cpu",
        "attention-backend": "torch_native",
        "sampling-backend": "pytorch",
        "disable-cuda-graph": None,
        "mem-fraction-static": "0.1",
        "chunked-prefill-size": "512",
        # Sessions at rest keep their rows in the table of requests.
        "max-running-requests": str(max(32, 2 * options.concurrency)),
        "sleep-on-idle": None,
    }
