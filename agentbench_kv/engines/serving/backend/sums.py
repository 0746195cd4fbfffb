"""Attention every cached row has got so far, for methods that rank by it (H2O)."""

from __future__ import annotations

import torch
from torch import Tensor

from agentbench_kv.kernels import attention_mass

BLOCK = 64  # queries whose attention probabilities exist at the same time


class AttentionSums:
    """Sums of all sessions, [layers, kv_heads, capacity] of float32 each.

    Serving engines do not keep attention probabilities, so every forward's are computed again from
    its queries and the cached keys: exact, and slow on long contexts.
    """

    def __init__(self, layers: int, kv_heads: int, device: torch.device) -> None:
        self._shape = (layers, kv_heads)
        self._device = device
        self._sums: dict[str, Tensor] = {}

    def of(self, session: str, live: int) -> Tensor:
        """Return the sums [layers, kv_heads, live] of a session's rows, to be read or written."""
        sums = self._sums.get(session)
        if sums is None or sums.shape[-1] < live:
            grown = torch.zeros(*self._shape, max(256, 2 * live), device=self._device)
            if sums is not None:
                grown[:, :, : sums.shape[-1]] = sums
            sums = self._sums[session] = grown
        return sums[:, :, :live]

    def add(self, session: str, layer: int, queries: Tensor, keys: Tensor) -> None:
        """Add what queries [q_heads, n, head_dim] attend to in keys [kv_heads, live, head_dim].

        Attention is causal; the last n rows are the queries' own.
        """
        n, live = queries.shape[1], keys.shape[1]
        sums = self.of(session, live)[layer]
        sums[:, live - n :] = 0.0
        rows = torch.arange(live, device=keys.device)
        for first in range(0, n, BLOCK):
            block = queries[:, first : first + BLOCK]
            size = block.shape[1]
            mass = attention_mass(
                block,
                keys,
                query_positions=rows[live - n + first :][:size],
                key_positions=rows.expand(keys.shape[0], -1),
            )
            sums += mass * size

    def drop(self, session: str) -> None:
        self._sums.pop(session, None)
