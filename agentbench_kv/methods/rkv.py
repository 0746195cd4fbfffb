"""R-KV: importance minus redundancy (Cai et al., R-KV: Redundancy-aware KV Cache Compression)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from agentbench_kv.kernels import similarity_column_mean
from agentbench_kv.methods.base import Queries, ScoreContext
from agentbench_kv.methods.snapkv import SnapKV
from agentbench_kv.params import param


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
    ordered: ClassVar[bool] = True

    lam: float = param(0.07, "weight of importance against redundancy", low=0, high=1)
    threshold: float = param(0.5, "cosine above which two keys repeat each other", low=-1, high=1)

    def score(self, queries: Queries, keys: Tensor, context: ScoreContext) -> Tensor:
        importance = super().score(queries, keys, context)
        repeated = redundancy(keys, self.threshold)
        score = self.lam * importance - (1 - self.lam) * repeated
        score[:, keys.shape[1] - self.window :] = 0.0
        return score


def redundancy(keys: Tensor, threshold: float) -> Tensor:
    """Return the softmax of how alike each key is to the others, see `similarity_column_mean`."""
    return torch.softmax(similarity_column_mean(keys, threshold), -1)
