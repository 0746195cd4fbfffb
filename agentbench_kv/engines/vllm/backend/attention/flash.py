"""FlashAttention, keeping queries."""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend, FlashAttentionImpl

from agentbench_kv.engines.vllm.backend.capture import CAPTURE


class CapturingImpl(FlashAttentionImpl):
    """Shows every forward's queries, post-RoPE, to `CAPTURE`."""

    def forward(self, layer: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
        """Attend as vLLM does."""
        CAPTURE.see(layer.layer_name, query)
        return super().forward(layer, query, *args, **kwargs)


class CapturingBackend(FlashAttentionBackend):
    """The backend that `CapturingImpl` belongs to."""

    @staticmethod
    def get_impl_cls() -> type[CapturingImpl]:
        """Return the implementation."""
        return CapturingImpl
