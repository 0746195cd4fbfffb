"""The attention that rows have got, added up forward by forward: what H2O ranks by."""

from __future__ import annotations

import torch
from torch import Tensor

from agentbench_kv.engines.core.transfers import used_here
from agentbench_kv.kernels import attention_mass
from agentbench_kv.kernels.torch_backend import softmax_beside


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
                used_here(sums)  # let go of below, perhaps before this stream has copied it
                grown[:, :, : sums.shape[-1]] = sums
            sums = self._sums[session] = grown
        # Prefills and evictions, which are on two streams, both come here.
        used_here(sums)
        return sums[:, :, :live]

    def shrink(self, session: str, live: int) -> None:
        """Give back what a prompt took, once an event has left `live` rows."""
        sums = self._sums.get(session)
        if sums is not None and sums.shape[-1] > max(256, 4 * live):
            used_here(sums)
            self._sums[session] = sums[:, :, : max(256, 2 * live)].clone()

    def add(
        self,
        session: str,
        layer: int,
        queries: Tensor,
        keys: Tensor,
        sinks: Tensor | None = None,
    ) -> None:
        """Add what a forward's queries [q_heads, n, head_dim] attend to; see `add_attention`."""
        n, live = queries.shape[1], keys.shape[1]
        sums = self.of(session, live)[layer]
        sums[:, live - n :] = 0.0
        add_attention(sums, queries, keys, sinks)

    def fork(self, session: str, new: str) -> None:
        """Copy a session's sums for another one: every forward adds to all of them."""
        if session in self._sums:
            self._sums[new] = self._sums[session].clone()

    def drop(self, session: str) -> None:
        self._sums.pop(session, None)


MASS_BLOCK = 64  # queries whose attention probabilities exist at the same time


def add_attention(sums: Tensor, queries: Tensor, keys: Tensor, sinks: Tensor | None = None) -> None:
    """Add what queries [q_heads, n, head_dim] attend to to the sums [kv_heads, live] of the rows.

    `keys` are [kv_heads, live, head_dim]; attention is causal, the last n rows are the queries'.
    `sinks` [q_heads] are logits that each head's softmax has besides (gpt-oss).
    """
    live = keys.shape[1]
    positions = torch.arange(live, device=keys.device)
    first = live - queries.shape[1]
    for block in torch.split(queries, MASS_BLOCK, 1):
        seen_from = positions[first : first + block.shape[1]]
        if sinks is None:
            everywhere = positions.expand(keys.shape[0], -1)
            mass = attention_mass(block, keys, query_positions=seen_from, key_positions=everywhere)
            sums += mass * block.shape[1]
        else:
            hidden = positions > seen_from[:, None]
            sums += _mass_beside(block, keys, hidden, sinks)
        first += block.shape[1]


def _mass_beside(queries: Tensor, keys: Tensor, hidden: Tensor, sinks: Tensor) -> Tensor:
    """Return what queries attend to beside sinks [kv_heads, live]: summed, mean over a group."""
    heads, n, head_dim = queries.shape
    grouped = queries.float().reshape(keys.shape[0], -1, head_dim)
    logits = grouped @ keys.float().transpose(1, 2) * head_dim**-0.5
    logits = logits.reshape(heads, n, -1).masked_fill(hidden, float("-inf"))
    probabilities = softmax_beside(logits, sinks[:, None, None])
    return probabilities.sum(1).reshape(keys.shape[0], -1, keys.shape[1]).mean(1)
