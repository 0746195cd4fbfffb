"""RoPE's inverse frequencies, as transformers computes them from a model's config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor


def rope_frequencies(model_path: Path) -> Tensor:
    """Return inverse frequencies [head_dim / 2], float32, of a decoder with standard RoPE."""
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config: Any = AutoConfig.from_pretrained(model_path, local_files_only=True)
    frequencies: Tensor = LlamaRotaryEmbedding(config).inv_freq
    return frequencies
