"""What some methods know of a model, made by `kvbench calibrate`: its queries before RoPE.

RoPE is in the half-split convention of Llama, Mistral and Qwen: a pair is (x[f], x[f + d/2]), and
position p turns it by p · inverse_frequency[f] (Su et al., RoFormer).
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from agentbench_kv.errors import PrerequisiteError
from agentbench_kv.kernels.torch_backend import rotated

Index = slice | list[int] | Tensor
ALL = slice(None)
VERSION = 2  # of the file: 1 has no covariance


@dataclass(frozen=True)
class Calibration:
    """Statistics of pre-RoPE queries q, as pairs z[f] = q[f] + i·q[f + d/2]."""

    mean: Tensor  # E[z], [layers, q_heads, d / 2], complex64
    abs_mean: Tensor  # E[|z|], [layers, q_heads, d / 2], float32
    frequencies: Tensor  # RoPE's inverse frequencies, [d / 2], float32
    scale: float = 1.0  # RoPE's attention factor, by which queries and keys are multiplied
    meta: dict[str, str] = field(default_factory=dict)  # model hash, text and its hash, tokens
    # Of q as it is, [layers, q_heads, d, d], float32; None where no method needs it, and in files
    # of version 1, which had none.
    covariance: Tensor | None = None
    _copies: dict[torch.device, Calibration] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        """Refuse a covariance of other queries with a ValueError."""
        shape = (*self.mean.shape[:2], 2 * self.mean.shape[-1], 2 * self.mean.shape[-1])
        if self.covariance is not None and self.covariance.shape != shape:
            raise ValueError(f"a covariance {list(self.covariance.shape)} for {list(shape)}")

    def without_covariance(self) -> Calibration:
        """Return what methods that need no covariance score with: its hash is that of version 1."""
        return replace(self, covariance=None)

    def on(self, device: torch.device) -> Calibration:
        """Return the statistics on a device, which are copied there once."""
        if self.mean.device == device:
            return self
        if device not in self._copies:
            covariance = None if self.covariance is None else self.covariance.to(device)
            self._copies[device] = replace(
                self,
                mean=self.mean.to(device),
                abs_mean=self.abs_mean.to(device),
                frequencies=self.frequencies.to(device),
                covariance=covariance,
            )
        return self._copies[device]

    def part(self, layers: Index = ALL, heads: Index = ALL) -> Calibration:
        """Return the statistics of some layers and query heads, in the order given."""
        covariance = None if self.covariance is None else self.covariance[layers][:, heads]
        mean, abs_mean = self.mean[layers][:, heads], self.abs_mean[layers][:, heads]
        return replace(self, mean=mean, abs_mean=abs_mean, covariance=covariance)

    @property
    def sha256(self) -> str:
        """Hash of the numbers, and so of what a method makes of them; `meta` does not count."""
        parts = [self.mean.real, self.mean.imag, self.abs_mean, self.frequencies]
        if self.covariance is not None:
            parts.append(self.covariance)
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
        if self.covariance is not None:
            tensors["q_covariance"] = self.covariance.contiguous()
        noted = {**self.meta, "scale": repr(self.scale), "version": str(VERSION)}
        partial = path.with_suffix(f".{os.getpid()}.partial")  # others may be making it too
        save_file(tensors, partial, metadata=noted)
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
                has = "q_covariance" in file.keys()  # noqa: SIM118  no mapping
                covariance = file.get_tensor("q_covariance") if has else None
                meta = dict(file.metadata() or {})
            if (version := int(meta.pop("version", "1"))) > VERSION:
                raise ValueError(f"it is of version {version}, this kvbench reads {VERSION}")
            scale, mean = float(meta.pop("scale", "1.0")), torch.complex(real, imaginary)
            return cls(mean, magnitude, frequencies, scale, meta, covariance)
        except (OSError, SafetensorError, RuntimeError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise PrerequisiteError(
                f"cannot read the calibration {path}: {reason}; "
                "make it again with kvbench calibrate"
            ) from None

    def to(self, device: torch.device) -> Calibration:
        tensors = (self.mean.to(device), self.abs_mean.to(device), self.frequencies.to(device))
        covariance = None if self.covariance is None else self.covariance.to(device)
        return Calibration(*tensors, self.scale, self.meta, covariance)


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
