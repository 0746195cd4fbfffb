"""Models of any shape with random weights, for measuring and testing what does not read them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["MID", "TINY", "MadeShape", "make_model"]

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class MadeShape:
    """A Qwen3's shape; weights are float32 or float16."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    vocabulary: int
    context: int
    rope_base: float = 1e6
    dtype: str = "float32"


TINY = MadeShape(4, 128, 4, 2, 32, 256, 512, 8192)
MID = MadeShape(8, 512, 8, 4, 64, 1536, 4096, 32768, dtype="float16")
"""8 KiB of float16 keys and values per token; large enough that a prefill costs something."""


def make_model(path: Path, shape: MadeShape, seed: int = 0) -> Path:
    """Write a GGUF file without a tokenizer; return its path.

    Norms of queries and keys have a gain above 1, so that attention is uneven enough for an
    eviction to show in the logits.
    """
    import gguf

    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.feed_forward)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(shape.vocabulary)
    writer.add_tokenizer_model("none")
    for name, tensor in _Weights(shape, seed).all().items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


class _Weights:
    def __init__(self, shape: MadeShape, seed: int) -> None:
        self._shape = shape
        self._random = np.random.default_rng(seed)

    def all(self) -> dict[str, Array]:
        shape = self._shape
        tensors = {
            "token_embd.weight": self._matrix(shape.vocabulary, shape.hidden, shape.hidden**0.5),
            "output_norm.weight": np.ones(shape.hidden, np.float32),
            "output.weight": self._matrix(shape.vocabulary, shape.hidden, 2.0),
        }
        for layer in range(shape.layers):
            own = self._layer()
            tensors |= {f"blk.{layer}.{name}.weight": tensor for name, tensor in own.items()}
        return tensors

    def _layer(self) -> dict[str, Array]:
        shape = self._shape
        hidden, inner = shape.hidden, shape.feed_forward
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        gain = np.full(shape.head_dim, 1.5, np.float32)
        return {
            "attn_norm": np.ones(hidden, np.float32),
            "ffn_norm": np.ones(hidden, np.float32),
            "attn_q": self._matrix(queries, hidden),
            "attn_k": self._matrix(keys, hidden),
            "attn_v": self._matrix(keys, hidden),
            "attn_output": self._matrix(hidden, queries),
            "attn_q_norm": gain,
            "attn_k_norm": gain,
            "ffn_gate": self._matrix(inner, hidden),
            "ffn_up": self._matrix(inner, hidden),
            "ffn_down": self._matrix(hidden, inner),
        }

    def _matrix(self, rows: int, columns: int, scale: float = 1.0) -> Array:
        values: Array = self._random.standard_normal((rows, columns), np.float32)
        return np.asarray(values * (scale / columns**0.5), self._shape.dtype)
