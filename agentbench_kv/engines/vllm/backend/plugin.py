"""The entry point that vLLM calls in each of its processes."""

from __future__ import annotations


def register() -> None:
    """Put the query-keeping attention backend in the place of vLLM's own."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    cpu = current_platform.is_cpu()
    replaced = AttentionBackendEnum.CPU_ATTN if cpu else AttentionBackendEnum.FLASH_ATTN
    register_backend(replaced, "agentbench_kv.engines.vllm.backend.attention.CapturingBackend")
