"""Picking the next token."""

from __future__ import annotations

import torch
from torch import Tensor

from agentbench_kv.engines.base import Sampling


class Sampler:
    """Draws the tokens of one generation from its own seeded stream."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._stream = torch.Generator().manual_seed(sampling.seed)

    @property
    def greedy(self) -> bool:
        return self._sampling.temperature == 0.0

    def draw(self, logits: Tensor) -> int:
        """Draw one token id from logits [vocab]; ties in greedy mode go to the lower id."""
        if self.greedy:
            return int(logits.argmax())
        probs = torch.softmax(logits.double().cpu() / self._sampling.temperature, -1)
        ranked, ids = probs.sort(descending=True, stable=True)
        ranked = ranked * self._allowed(ranked)
        return int(ids[torch.multinomial(ranked, 1, generator=self._stream)])

    def _allowed(self, ranked: Tensor) -> Tensor:
        """Mask [vocab] of what top-k and top-p leave, over descending probabilities."""
        before = ranked.cumsum(-1) - ranked
        allowed = before < self._sampling.top_p
        if self._sampling.top_k:
            allowed[self._sampling.top_k :] = False
        allowed[0] = True
        return allowed
