"""The entry point that vLLM calls in each of its processes."""

from __future__ import annotations


def register() -> None:
    """Put the query-keeping attention backends in the place of vLLM's own."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    module = "agentbench_kv.engines.vllm.backend.attention"
    if current_platform.is_cpu():
        register_backend(AttentionBackendEnum.CPU_ATTN, f"{module}.cpu.CapturingBackend")
    else:
        register_backend(AttentionBackendEnum.FLASH_ATTN, f"{module}.flash.CapturingBackend")
