"""What the vLLM engine cannot do, said when it starts."""

from __future__ import annotations

from typing import Any

from agentbench_kv.engines.vllm.backend import contract
from agentbench_kv.methods.base import Method


def refuse_unknown() -> None:
    """Refuse a vLLM whose insides are not the ones the engine was written against."""
    found = contract.problems()
    if found:
        raise ValueError(f"kvbench: this vLLM is not the one the plug-in knows: {'; '.join(found)}")


def refuse_unsupported(config: Any, cache: Any, method: Method) -> None:
    """Refuse what physical eviction would make wrong."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    groups = cache.kv_cache_groups
    parallel = config.parallel_config
    shared = method.kept_set == "shared" and parallel.tensor_parallel_size > 1
    problems = {
        "one kept set for all heads under tensor parallelism": shared,
        "speculative decoding": config.speculative_config is not None,
        "KV connectors": config.kv_transfer_config is not None,
        "prefix caching": config.cache_config.enable_prefix_caching,
        "async scheduling": config.scheduler_config.async_scheduling,
        "several KV cache groups": len(groups) != 1,
        "attention other than full attention": any(
            type(group.kv_cache_spec) is not FullAttentionSpec
            or getattr(group.kv_cache_spec, "sliding_window", None) is not None
            for group in groups
        ),
        "context parallelism": parallel.decode_context_parallel_size > 1,
        "a quantised KV cache": groups[0].kv_cache_spec.dtype.itemsize < 2,
    }
    found = [name for name, there in problems.items() if there]
    if found:
        raise ValueError(f"kvbench: eviction in vLLM does not support {', '.join(found)}")


def bytes_per_token(cache: Any) -> int:
    """Return bytes of keys and values of one token, all layers and heads of a worker."""
    return sum(
        len(group.layer_names)
        * group.kv_cache_spec.page_size_bytes
        // group.kv_cache_spec.block_size
        for group in cache.kv_cache_groups
    )
