"""A memory bank's rows in a session: harvested from past ones, spliced in before a prompt."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentbench_kv.engines.embedded.cache import SessionCache
from agentbench_kv.errors import UsageError
from agentbench_kv.kernels import rope_rotate
from agentbench_kv.methods.memory.bank import MemoryBank
from agentbench_kv.methods.memory.memart import MemArt


def harvest(
    cache: SessionCache, rows: slice, first: int, frequencies: Tensor
) -> tuple[Tensor, Tensor]:
    """Copy rows of a cache, the first of which has RoPE position `first`.

    Keys, float32 and before RoPE, and values: [layers, kv_heads, n, head_dim].
    """
    keys = cache.keys[:, :, rows].float().clone()
    back = -torch.arange(first, first + keys.shape[2], device=keys.device)
    rope_rotate(keys, back, frequencies, interleaved=cache.shape.interleaved)
    return keys, cache.values[:, :, rows].clone()


class SessionMemory:
    """What a session brings back from a bank: as many rows in every layer, chosen in each."""

    def __init__(self, method: MemArt, bank: MemoryBank, frequencies: Tensor) -> None:
        self.rows = method.rows_of(bank)
        self.due = False  # whether the next forward begins a prompt
        self._method = method
        self._bank = bank
        self._frequencies = frequencies
        self._chosen: dict[int, Tensor] = {}  # by layer; a fork has the same one until its prompt

    def recalled(self) -> NDArray[np.int64]:
        """Return which of the bank's rows the last prompt brought back: [layers, rows]."""
        chosen = self._chosen
        if not chosen:
            return np.zeros((0, 0), np.int64)
        rows: NDArray[np.int64] = torch.stack([chosen[layer] for layer in sorted(chosen)]).numpy()
        return rows

    def splice(self, cache: SessionCache, layer: int, queries: Tensor, first: int) -> None:
        """Put what a prompt brings back into the first rows of a layer, at positions from 0 on.

        Queries [q_heads, n, head_dim] are post-RoPE, the first of them at position `first`.
        """
        method, bank, turned = self._method, self._bank, cache.shape.interleaved
        asked = queries.float().clone()
        if method.retrieval_rope == "raw":
            back = -torch.arange(first, first + asked.shape[1], device=asked.device)
            rope_rotate(asked[None], back, self._frequencies, interleaved=turned)
        relevance = method.relevance(asked, bank.lows[layer], bank.highs[layer])
        chosen = method.choose(relevance, bank, self.rows)
        self._chosen = {**self._chosen, layer: chosen}
        keys, values = bank.gather(layer, chosen)
        places = torch.arange(self.rows, device=asked.device)
        rope_rotate(keys[None], places, self._frequencies, interleaved=turned)
        cache.keys[layer, :, : self.rows] = keys.to(cache.shape.dtype)
        cache.values[layer, :, : self.rows] = values


def memory_method(method: object) -> MemArt:
    """Return a method that has a memory; UsageError for any other."""
    if not isinstance(method, MemArt):
        raise UsageError(f"method {method!r} has no memory")
    return method
