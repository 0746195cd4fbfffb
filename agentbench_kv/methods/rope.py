"""Rotary position embedding in the half-split convention of Llama, Mistral and Qwen.

A pair is (x[f], x[f + d/2]); position p turns it by p · inverse_frequency[f] (Su et al., RoFormer).
"""

from __future__ import annotations

import torch
from torch import Tensor

from agentbench_kv.kernels.torch_backend import rotated


def rotate(vectors: Tensor, shifts: Tensor, frequencies: Tensor) -> Tensor:
    """Move vectors [..., tokens, head_dim] that carry RoPE by some positions.

    `shifts`, broadcastable to [..., tokens], are negative to move back; `frequencies`
    [head_dim / 2] are the inverse ones, in radians per position.
    """
    return rotated(vectors, shifts, frequencies, interleaved=False)


def as_complex(vectors: Tensor) -> Tensor:
    """Return the pairs as complex64 numbers, [..., head_dim] -> [..., head_dim / 2]."""
    first, second = vectors.float().chunk(2, -1)
    return torch.complex(first.contiguous(), second.contiguous())
