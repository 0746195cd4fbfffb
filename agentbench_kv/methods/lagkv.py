"""LagKV: how much a token stands out against the stretch behind it (Liang et al., 2025)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from agentbench_kv.methods.base import Method, Queries, ScoreContext, at_once
from agentbench_kv.params import param


@dataclass(frozen=True, kw_only=True)
class LagKV(Method):
    """Rank keys and values within stretches of `lag` tokens, scaled by the next stretch.

    Every channel is scaled by its minimum and maximum over the next stretch; a token's score is
    the standard deviation over its channels, softmax over its stretch, mean of keys and values, and
    of that the rank. The last whole stretch and what follows it have no next one: they stay, the
    newest first. As in kvpress (LagKVPress), over the rows that are cached at the event.
    """

    name: ClassVar[str] = "lagkv"
    summary: ClassVar[str] = "keys and values that stand out against the next tokens'"
    source: ClassVar[str] = "Liang et al., LagKV: Lag-Relative Information of the KV Cache"

    sinks: int = param(4, "first tokens always kept, counted in the budget", low=0)
    lag: int = param(128, "tokens of a stretch", low=2)

    def score(self, queries: Queries, keys: Tensor, context: ScoreContext) -> Tensor:  # noqa: ARG002
        heads, tokens, _ = keys.shape
        newest_first = 1 + torch.arange(tokens, device=keys.device) / tokens
        most = tokens // self.lag
        if most < 2:
            return newest_first.expand(heads, -1).clone()
        # Where the sinks end is known to the device alone: as many stretches as there could be, of
        # which the last one is not used where it runs over the end.
        first = (context.positions[0] < self.sinks).sum()
        places = torch.arange(tokens, device=keys.device)
        inside = (first + places[: most * self.lag]).clamp(max=tokens - 1)
        size = at_once(keys[:1].numel())
        of_keys, of_values = (
            torch.cat([self._standing_out(part, inside) for part in torch.split(rows, size)])
            for rows in (keys, context.values)
        )
        found = of_keys + of_values
        ranks = (found.argsort(dim=-1, stable=True).argsort(-1) / self.lag).flatten(1).float()
        whole, places = (tokens - first) // self.lag, places - first
        ranked = (places >= 0) & (places < (whole - 1) * self.lag)
        return ranks[:, places.clamp(0, ranks.shape[1] - 1)].where(ranked, newest_first)

    def _standing_out(self, rows: Tensor, inside: Tensor) -> Tensor:
        """Score rows [kv_heads, tokens, head_dim], of which those `inside` are whole stretches.

        [kv_heads, stretches - 1, lag]: each by the next stretch, which the last one has not.
        """
        parts = rows[:, inside].reshape(len(rows), -1, self.lag, rows.shape[-1]).double()
        behind = parts[:, 1:]
        low, high = behind.amin(2, keepdim=True), behind.amax(2, keepdim=True)
        width = high - low
        # A channel that is constant in the next stretch has no scale.
        scaled = (parts[:, :-1] - low) / width.where(width > 0, torch.ones_like(width))
        return scaled.std(-1).softmax(-1)
