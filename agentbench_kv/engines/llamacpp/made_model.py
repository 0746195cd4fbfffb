"""Models of any shape with random weights, for measuring and testing what does not read them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from agentbench_kv.engines.llamacpp.convert import write_file, write_shape

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
    """Write a GGUF file without a tokenizer; return its path."""
    import gguf

    config = {
        "num_hidden_layers": shape.layers,
        "max_position_embeddings": shape.context,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.feed_forward,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "rope_theta": shape.rope_base,
        "rms_norm_eps": 1e-6,
        "vocab_size": shape.vocabulary,
    }
    writer = gguf.GGUFWriter(path, "qwen3")
    write_shape(writer, config, "qwen3")
    writer.add_tokenizer_model("none")
    for name, tensor in _weights(shape, seed):
        writer.add_tensor(f"{name}.weight", tensor)
    write_file(writer)
    return path


def _weights(shape: MadeShape, seed: int) -> Iterator[tuple[str, Array]]:
    hidden, inner, vocabulary = shape.hidden, shape.feed_forward, shape.vocabulary
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    draw = np.random.default_rng(seed)

    def matrix(rows: int, columns: int, scale: float = 1.0) -> Array:
        values: Array = draw.standard_normal((rows, columns), np.float32)
        return np.asarray(values * (scale / columns**0.5), shape.dtype)

    yield "token_embd", matrix(vocabulary, hidden, hidden**0.5)
    yield "output_norm", np.ones(hidden, np.float32)
    yield "output", matrix(vocabulary, hidden, 2.0)
    # Above 1, so that attention is uneven enough for an eviction to show in the logits.
    gain = np.full(shape.head_dim, 1.5, np.float32)
    for layer in range(shape.layers):
        block = f"blk.{layer}"
        yield f"{block}.attn_norm", np.ones(hidden, np.float32)
        yield f"{block}.ffn_norm", np.ones(hidden, np.float32)
        yield f"{block}.attn_q", matrix(queries, hidden)
        yield f"{block}.attn_k", matrix(keys, hidden)
        yield f"{block}.attn_v", matrix(keys, hidden)
        yield f"{block}.attn_output", matrix(hidden, queries)
        yield f"{block}.attn_q_norm", gain
        yield f"{block}.attn_k_norm", gain
        yield f"{block}.ffn_gate", matrix(inner, hidden)
        yield f"{block}.ffn_up", matrix(inner, hidden)
        yield f"{block}.ffn_down", matrix(hidden, inner)
