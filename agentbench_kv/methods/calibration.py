"""What TriAttention knows of a model, made by `kvbench calibrate`: means of queries before RoPE.

RoPE is in the half-split convention of Llama, Mistral and Qwen: a pair is (x[f], x[f + d/2]), and
position p turns it by p · inverse_frequency[f] (Su et al., RoFormer).
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from agentbench_kv.errors import PrerequisiteError
from agentbench_kv.kernels.torch_backend import rotated


@dataclass(frozen=True)
class Calibration:
    """Statistics of pre-RoPE queries q, as pairs z[f] = q[f] + i·q[f + d/2]."""

    mean: Tensor  # E[z], [layers, q_heads, d / 2], complex64
    abs_mean: Tensor  # E[|z|], [layers, q_heads, d / 2], float32
    frequencies: Tensor  # RoPE's inverse frequencies, [d / 2], float32
    scale: float = 1.0  # RoPE's attention factor, by which queries and keys are multiplied
    meta: dict[str, str] = field(default_factory=dict)  # model hash, text and its hash, tokens

    @property
    def sha256(self) -> str:
        """Hash of the numbers, and so of what a method makes of them; `meta` does not count."""
        parts = (self.mean.real, self.mean.imag, self.abs_mean, self.frequencies)
        digest = hashlib.sha256(repr((tuple(self.mean.shape), self.scale)).encode())
        for part in parts:
            digest.update(part.detach().to("cpu", torch.float32).contiguous().numpy().tobytes())
        return digest.hexdigest()

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {
            "q_mean_real": self.mean.real.contiguous(),
            "q_mean_imag": self.mean.imag.contiguous(),
            "q_abs_mean": self.abs_mean.contiguous(),
            "inv_freq": self.frequencies.contiguous(),
        }
        partial = path.with_suffix(f".{os.getpid()}.partial")  # others may be making it too
        save_file(tensors, partial, metadata={**self.meta, "scale": repr(self.scale)})
        partial.chmod(0o644)
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what `save` wrote; PrerequisiteError if the file is missing or no calibration."""
        try:
            with safe_open(path, "pt") as file:
                real, imaginary, magnitude, frequencies = (
                    file.get_tensor(name)
                    for name in ("q_mean_real", "q_mean_imag", "q_abs_mean", "inv_freq")
                )
                meta = dict(file.metadata() or {})
            scale = float(meta.pop("scale", "1.0"))
            return cls(torch.complex(real, imaginary), magnitude, frequencies, scale, meta)
        except (OSError, SafetensorError, RuntimeError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise PrerequisiteError(
                f"cannot read the calibration {path}: {reason}; "
                "make it again with kvbench calibrate"
            ) from None

    def to(self, device: torch.device) -> Calibration:
        tensors = (self.mean.to(device), self.abs_mean.to(device), self.frequencies.to(device))
        return Calibration(*tensors, self.scale, self.meta)


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
