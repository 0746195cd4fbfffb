"""R-KV: importance minus redundancy (Cai et al., R-KV: Redundancy-aware KV Cache Compression)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from agentbench_kv.methods.base import Queries, ScoreContext
from agentbench_kv.methods.params import param
from agentbench_kv.methods.snapkv import SnapKV

BLOCK_BYTES = {"cpu": 4 << 20, "cuda": 64 << 20}
"""Bytes of similarities that exist at a time; a CPU works best inside its cache."""


@dataclass(frozen=True, kw_only=True)
class RKV(SnapKV):
    """Keep the last `window` tokens and the best of `λ·I - (1-λ)·R` among the rest.

    I is SnapKV's score in the form of `snapkv@rkv`; R, the softmax over tokens of a key's mean
    cosine with all keys, cosines of near duplicates spared once a row (see `redundancy`). Presets:
    `agentkv`, the settings of AgentKV's comparison; `code` and `paper`, the authors'; `serving`,
    their SGLang port, with one set for all heads and layers.
    """

    name: ClassVar[str] = "rkv"
    summary: ClassVar[str] = "window attention minus redundancy among keys"
    source: ClassVar[str] = "Cai et al., R-KV: Redundancy-aware KV Cache Compression"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "agentkv": {"lam": 0.07, "window": 32},
        "code": {"lam": 0.07, "window": 8},
        "paper": {"lam": 0.1, "window": 8},
        "serving": {"lam": 0.1, "window": 8, "kept_set": "shared"},
    }
    default_preset: ClassVar[str] = "agentkv"

    lam: float = param(0.07, "weight of importance against redundancy", low=0, high=1)
    threshold: float = param(0.5, "cosine above which two keys repeat each other", low=-1, high=1)

    def score(self, queries: Queries, keys: Tensor, context: ScoreContext) -> Tensor:
        """Return λ·I - (1-λ)·R; the window scores 0."""
        importance = super().score(queries, keys, context)
        repeated = redundancy(keys, self.threshold)
        score = self.lam * importance - (1 - self.lam) * repeated
        score[:, keys.shape[1] - self.window :] = 0.0
        return score


def redundancy(keys: Tensor, threshold: float) -> Tensor:
    """Return how much each key repeats others.

    Cosines of all pairs, zero on the diagonal; in every row the last column above the threshold
    counts 0 (column 0 if there is none, as in the authors' code); then column means, and their
    softmax.

    Parameters
    ----------
    keys : Tensor [kv_heads, tokens, head_dim]
        By ascending position.
    threshold : float

    Returns
    -------
    Tensor [kv_heads, tokens], float32
    """
    units = keys.float()
    units = units / (units.norm(dim=-1, keepdim=True) + 1e-8)
    # One head at a time fits a CPU's cache; a GPU wants few, large products.
    at_once = 1 if keys.device.type == "cpu" else len(units)
    means = torch.cat([_mean_cosines(part, threshold) for part in units.split(at_once)])
    return torch.softmax(means, -1)


def _mean_cosines(units: Tensor, threshold: float) -> Tensor:
    """Column means of the cosines [heads, tokens, tokens], a block of rows at a time."""
    heads, tokens, _ = units.shape
    # Floats hold every index exactly and halve what the comparison below has to move.
    columns = torch.arange(tokens, device=units.device, dtype=torch.float32)
    total = torch.zeros(heads, tokens, device=units.device)
    size = max(1, BLOCK_BYTES[units.device.type] // (4 * heads * tokens))
    for first in range(0, tokens, size):
        cosines = units[:, first : first + size] @ units.transpose(1, 2)
        cosines.diagonal(first, 1, 2).zero_()
        spared = ((cosines > threshold) * columns).amax(-1, keepdim=True).long()
        total += cosines.scatter_(-1, spared, 0.0).sum(1)
    return total / tokens
