"""The platform's attention backends, showing their queries to the rings that a method keeps.

Layers with a window evict nothing: they go by logical lengths where the others go by physical ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.platforms import current_platform

from agentbench_kv.engines.core.rings import as_methods_see
from agentbench_kv.engines.vllm.plugin.capture import QueryCapture

# The worker's own; vLLM creates attention objects itself, so they find it here.
CAPTURE = QueryCapture()


class LogicalLengths:
    """How many tokens each request of this worker's batch has seen, evicted ones included.

    A buffer that stays where it is, as a CUDA graph reads it again at every replay.
    """

    def __init__(self) -> None:
        self._lengths = torch.zeros(0, dtype=torch.int32)
        self._on_cpu: Tensor | None = None  # of a batch that misses rows, until `end`

    def allocate(self, like: Tensor) -> None:
        """Make the buffer, as long as vLLM's own of physical lengths."""
        self._lengths = torch.zeros_like(like)

    def begin(self, lengths: Tensor, on_cpu: Tensor) -> None:
        """Remember the lengths of a batch before the physical ones take their place."""
        self._lengths.copy_(lengths)
        self._on_cpu = on_cpu.clone()

    def end(self) -> None:
        self._on_cpu = None

    def put_into(self, common: Any) -> Any:
        """Return a batch's metadata with logical lengths."""
        rows = len(common.seq_lens)
        lengths = self._lengths[:rows]
        if self._on_cpu is None:
            # Nothing is evicted, or vLLM tries itself out: the two are the same.
            lengths.copy_(common.seq_lens)
            return common.replace(seq_lens=lengths)
        on_cpu = self._on_cpu[:rows]
        return common.replace(
            seq_lens=lengths, seq_lens_cpu_upper_bound=on_cpu, max_seq_len=int(on_cpu.max())
        )


LOGICAL = LogicalLengths()


class WindowBuilder:
    """Gives layers with a window their logical lengths; before a builder of vLLM's."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Any:
        builder: Any = super()
        if getattr(getattr(self, "kv_cache_spec", None), "sliding_window", None) is not None:
            common_attn_metadata = LOGICAL.put_into(common_attn_metadata)
        return builder.build(common_prefix_len, common_attn_metadata, fast_build)


class CapturingImpl:
    """Shows every forward's queries, post-RoPE, to `CAPTURE`; before a class of vLLM's."""

    scale: float

    def forward(self, layer: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
        seen = as_methods_see(query, self.scale)
        CAPTURE.see(layer.layer_name, seen)
        attention: Any = super()
        output = attention.forward(layer, query, *args, **kwargs)
        CAPTURE.attended(layer.layer_name, seen)
        return output


def capturing(name: str, backend: Any, impl: Any, builder: Any) -> Any:
    """Return a backend of vLLM's whose parts go through ours.

    `name` is the one it has in this module, by which vLLM looks it up.
    """
    ours = type(f"Capturing{impl.__name__}", (CapturingImpl, impl), {})
    windows = type(f"Window{builder.__name__}", (WindowBuilder, builder), {})
    parts = {
        "get_impl_cls": staticmethod(lambda: ours),
        "get_builder_cls": staticmethod(lambda: windows),
        # On a GPU vLLM imports what it chose by this name; a class made by ABCMeta has `abc`.
        "__module__": __name__,
    }
    return type(name, (backend,), parts)


if current_platform.is_cpu():
    from vllm.v1.attention.backends import cpu_attn

    CapturingCpu = capturing(
        "CapturingCpu",
        cpu_attn.CPUAttentionBackend,
        cpu_attn.CPUAttentionBackendImpl,
        cpu_attn.CPUAttentionMetadataBuilder,
    )
else:
    from vllm.v1.attention.backends import flash_attn, triton_attn

    CapturingFlash = capturing(
        "CapturingFlash",
        flash_attn.FlashAttentionBackend,
        flash_attn.FlashAttentionImpl,
        flash_attn.FlashAttentionMetadataBuilder,
    )
    # FlashAttention takes no float32, in which engines are held to be exact.
    CapturingTriton = capturing(
        "CapturingTriton",
        triton_attn.TritonAttentionBackend,
        triton_attn.TritonAttentionImpl,
        triton_attn.TritonAttentionMetadataBuilder,
    )
