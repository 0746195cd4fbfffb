"""What a session brings back from a memory bank: which rows, and how they come before its own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from copy import copy

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentbench_kv.errors import UsageError
from agentbench_kv.kernels import rope_rotate
from agentbench_kv.methods.memory.bank import BlockIndex, MemoryBank
from agentbench_kv.methods.memory.memart import MemArt


def before_rope(keys: Tensor, first: int, frequencies: Tensor, *, interleaved: bool) -> Tensor:
    """Return copies, float32, of keys or queries of which the first has RoPE position `first`.

    [..., heads, n, head_dim], turned back to position 0.
    """
    plain = keys.float().clone()
    back = -torch.arange(first, first + plain.shape[-2], device=plain.device)
    shaped = plain[None] if plain.ndim == 3 else plain
    rope_rotate(shaped, back, frequencies, interleaved=interleaved)
    return plain


class SessionMemory:
    """What a session brings back from a bank: as many rows in every layer.

    They are chosen in each layer as the prompt is read; or, the same in all, before: the prompt is
    then fed once without any of the bank's rows, to find them. Keys are the bank's, whose RoPE
    pairs are neighbours (`interleaved`) or half a head apart.
    """

    def __init__(
        self, method: MemArt, bank: MemoryBank, frequencies: Tensor, *, interleaved: bool = False
    ) -> None:
        self.rows = method.rows_of(bank)
        self.passes = method.passes
        self.due = False  # whether the next forward begins a prompt
        self.looking = False  # or is part of the first of two passes
        self._method = method
        self._bank = bank
        self._frequencies = frequencies
        self._interleaved = interleaved
        self._chosen: dict[int, Tensor] = {}  # by layer; a fork has the same one until its prompt
        # Relevance by layer, and by the position of the first token that it is for.
        self._found: defaultdict[int, dict[int, Tensor]] = defaultdict(dict)
        # Blocks of the bank that this session's own rows are in: it has these anyway.
        self._own: frozenset[int] = frozenset()
        self._seen: BlockIndex | None = None  # what the bank had when the prompt began, of others

    def fork(self) -> SessionMemory:
        """Return that of a session which goes on from here."""
        return copy(self)

    def recalled(self) -> NDArray[np.int64]:
        """Return which of the bank's rows the last prompt brought back: [layers, rows]."""
        chosen = self._chosen
        if not chosen:
            return np.zeros((0, 0), np.int64)
        rows: NDArray[np.int64] = torch.stack([chosen[layer] for layer in sorted(chosen)]).numpy()
        return rows

    def has(self, blocks: Iterable[int]) -> None:
        """Take in which blocks of the bank the session's own rows have come to."""
        self._own |= frozenset(blocks)

    def holds(self, bank: MemoryBank) -> bool:
        """Whether it brings back from a bank."""
        return bank is self._bank

    def begin(self) -> None:
        """Take in that a prompt is about to be read."""
        self.due, self.looking = True, self.passes > 1
        self._seen = self._bank.index().without(self._own) if self._bank.rows else None
        self._found = defaultdict(dict)

    def ask(self, layer: int, queries: Tensor, first: int) -> None:
        """Find what a layer's queries need; what comes back, if it is chosen by layer.

        Queries [q_heads, n, head_dim] are post-RoPE, the first of them at position `first`.
        """
        if self.looking:
            # A forward that failed may come again: the same entry.
            self._found[layer][first] = self._relevance(layer, queries, first)
        elif self.passes == 1:
            relevance = self._relevance(layer, queries, first)
            chosen = self._method.choose(relevance, self._blocks, self.rows)
            self._chosen = {**self._chosen, layer: chosen}

    def choose(self) -> None:
        """Choose for all layers together what the prompt needs, all of which has been looked at."""
        found = [list(parts.values()) for parts in self._found.values()]
        chosen = self._method.choose(self._method.mean_relevance(found), self._blocks, self.rows)
        self._chosen = dict.fromkeys(self._found, chosen)
        self.looking = False

    def front(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return a layer's rows that come back: keys, float32 and at positions from 0 on, values.

        [kv_heads, rows, head_dim], on the bank's device.
        """
        keys, values = self._bank.gather(layer, self._chosen[layer])
        places = torch.arange(self.rows, device=keys.device)
        rope_rotate(keys[None], places, self._frequencies, interleaved=self._interleaved)
        return keys, values

    @property
    def _blocks(self) -> BlockIndex:
        if self._seen is None:
            raise UsageError("the memory is empty")
        return self._seen

    def _relevance(self, layer: int, queries: Tensor, first: int) -> Tensor:
        """Score the blocks that the bank had when the prompt began: [blocks]."""
        asked = queries.float()
        if self._method.retrieval_rope == "raw":
            asked = before_rope(asked, first, self._frequencies, interleaved=self._interleaved)
        return self._method.relevance(asked, self._blocks.lows[layer], self._blocks.highs[layer])


def memory_method(method: object) -> MemArt:
    """Return a method that has a memory; UsageError for any other."""
    if not isinstance(method, MemArt):
        raise UsageError(f"method {method!r} has no memory")
    return method
