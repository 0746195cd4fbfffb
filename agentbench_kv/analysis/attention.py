"""Sums of attention over many queries, in blocks: no [heads, tokens, tokens] tensor ever exists."""

from __future__ import annotations

import torch
from torch import Tensor

from agentbench_kv.kernels import attention_mass

BLOCK_BYTES = 32 << 20
"""Size of the attention probabilities that exist at a time."""


def attention_sums(
    queries: Tensor, query_positions: Tensor, keys: Tensor, key_positions: Tensor
) -> Tensor:
    """Sum over queries of the attention that each key gets, mean over a group's query heads.

    A query of `queries` [q_heads, n, head_dim] sees the keys [kv_heads, tokens, head_dim] at its
    own position and before, and no others. `query_positions` is [n], `key_positions` [tokens] or
    [kv_heads, tokens]; the result [kv_heads, tokens], float32.
    """
    places = key_positions.expand(keys.shape[:2])
    total = torch.zeros(keys.shape[:2], device=keys.device)
    size = max(1, BLOCK_BYTES // (4 * queries.shape[0] * keys.shape[1]))
    for first in range(0, queries.shape[1], size):
        block = queries[:, first : first + size].float()
        mass = attention_mass(
            block,
            keys.float(),
            query_positions=query_positions[first : first + size],
            key_positions=places,
        )
        total += mass * block.shape[1]
    return total
