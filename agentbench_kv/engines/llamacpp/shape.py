"""What a GGUF model looks like to the engine, and which models it must refuse."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from agentbench_kv.errors import UsageError

ARCHITECTURES = ("llama", "qwen2", "qwen3")
ROW_TYPES = {"float32": 0, "float16": 1}  # of cached rows, with ggml's number
ELSEWHERE = "run it with llama.cpp's own server and measure that through --engine api"


@dataclass(frozen=True)
class ModelShape:
    """Shapes of one model."""

    architecture: str  # llama.cpp's name
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    rope_base: float  # pair f turns by `rope_base ** (-2 f / head_dim)` radians per position
    interleaved: bool  # RoPE pairs are (x[2f], x[2f + 1]) instead of (x[f], x[f + head_dim / 2])
    context_limit: int  # positions the model was trained for
    vocabulary: int
    eos_token_ids: tuple[int, ...]  # they end the model's turn

    def bytes_per_token(self, dtype: str) -> int:
        """Return bytes of keys and values of one token over all layers and heads."""
        size = 4 if dtype == "float32" else 2
        return 2 * self.layers * self.kv_heads * self.head_dim * size

    def in_halves(self, vectors: Tensor) -> Tensor:
        """Return keys or queries [..., head_dim] with RoPE pairs half a head apart.

        Methods know this order only; scores do not depend on it as long as both follow it.
        """
        if not self.interleaved:
            return vectors
        pairs = vectors.reshape(*vectors.shape[:-1], -1, 2)
        return torch.cat([pairs[..., 0], pairs[..., 1]], -1)


def model_shape(metadata: Mapping[str, Any]) -> ModelShape:
    """Describe a model from the header of its file; UsageError where `refusal` has a reason."""
    reason = refusal(metadata)
    if reason:
        raise UsageError(f"{reason}; {ELSEWHERE}")
    name = str(metadata["general.architecture"])
    own = {key.removeprefix(f"{name}."): value for key, value in metadata.items()}
    heads = int(own["attention.head_count"])
    width = int(own["embedding_length"])
    named = (metadata.get(f"tokenizer.ggml.{role}_token_id") for role in ("eos", "eot"))
    ends = metadata.get("kvbench.eos_token_ids") or dict.fromkeys(named)
    return ModelShape(
        architecture=name,
        layers=int(own["block_count"]),
        query_heads=heads,
        kv_heads=int(own.get("attention.head_count_kv", heads)),
        head_dim=int(own.get("attention.key_length", width // heads)),
        rope_base=float(own.get("rope.freq_base", 10000.0)),
        interleaved=name == "llama",
        context_limit=int(own["context_length"]),
        vocabulary=int(own.get("vocab_size") or len(metadata["tokenizer.ggml.tokens"])),
        eos_token_ids=tuple(int(end) for end in ends if end is not None),
    )


def refusal(metadata: Mapping[str, Any]) -> str:
    """Say why moving or saving single rows of a model's cache would be wrong; empty if it is not.

    The reasons are those of llama.cpp's memory classes at the pinned version.
    """
    name = str(metadata.get("general.architecture", "?"))
    keys = {key.removeprefix(f"{name}.") for key in metadata}
    if any(key.startswith("ssm.") for key in keys):
        return f"{name} has recurrent layers, whose state cannot be saved or restored by rows"
    if "rope.dimension_sections" in keys:
        return f"{name} has M-RoPE: a token has several positions, and keys cannot be re-anchored"
    if metadata.get(f"{name}.attention.sliding_window"):
        return f"{name} has sliding-window layers, which forget rows that a method means to keep"
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        return f"{name} is not among the architectures whose attention was checked ({known})"
    key = metadata.get(f"{name}.attention.key_length")
    value = metadata.get(f"{name}.attention.value_length", key)
    turned = metadata.get(f"{name}.rope.dimension_count", key)
    if key is not None and (key != value or key != turned):
        return f"{name} with keys of {key}, values of {value} and RoPE over {turned} channels"
    if isinstance(metadata.get(f"{name}.attention.head_count_kv"), list):
        return f"{name} has layers with different numbers of KV heads"
    kind = metadata.get(f"{name}.rope.scaling.type", "none")
    if kind != "none":
        return f"{name} scales RoPE ({kind}), so rotating a key by a distance would be wrong"
    return ""
