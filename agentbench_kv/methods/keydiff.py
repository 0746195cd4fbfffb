"""KeyDiff: tokens whose keys are unlike the others (Park et al., NeurIPS 2025)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from agentbench_kv.methods.base import Method, Queries, ScoreContext, at_once


@dataclass(frozen=True, kw_only=True)
class KeyDiff(Method):
    """Keep the keys with the lowest cosine to the mean of all keys, each of unit length.

    No queries are used. As in kvpress (KeyDiffPress); the authors score block by block.
    """

    name: ClassVar[str] = "keydiff"
    summary: ClassVar[str] = "keys least like the mean key"
    source: ClassVar[str] = (
        "Park et al., KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM "
        "Inference in Resource-Constrained Environments"
    )
    # In a fixed order: the mean of the keys depends on it by a rounding error.
    ordered: ClassVar[bool] = True

    def score(self, queries: Queries, keys: Tensor, context: ScoreContext) -> Tensor:  # noqa: ARG002
        some = torch.split(keys, at_once(keys[:1].numel()))
        return torch.cat([_unlike_the_mean(part) for part in some])


def _unlike_the_mean(keys: Tensor) -> Tensor:
    """Score keys [kv_heads, tokens, head_dim] by their negative cosine to the head's mean."""
    own = normalize(keys.double(), dim=-1)
    anchor = normalize(own.mean(1, keepdim=True), dim=-1)
    return -(own * anchor).sum(-1)
