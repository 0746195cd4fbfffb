"""The platform's attention backend, keeping the queries that a method wants."""

from __future__ import annotations

from typing import Any

from vllm.platforms import current_platform

from agentbench_kv.engines.vllm.plugin.runner import CAPTURE

if current_platform.is_cpu():
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend as BaseBackend
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl as BaseImpl
else:
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend as BaseBackend
    from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl as BaseImpl


class CapturingImpl(BaseImpl):
    """Shows every forward's queries, post-RoPE, to `CAPTURE`."""

    def forward(self, layer: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
        CAPTURE.see(layer.layer_name, query)
        return super().forward(layer, query, *args, **kwargs)


class CapturingBackend(BaseBackend):
    """The backend that `CapturingImpl` belongs to."""

    @staticmethod
    def get_impl_cls() -> type[CapturingImpl]:
        return CapturingImpl
