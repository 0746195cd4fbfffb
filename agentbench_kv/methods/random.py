"""Random eviction: what a method must beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from agentbench_kv.methods.base import Method, Queries, ScoreContext
from agentbench_kv.params import param

_MASK = (1 << 63) - 1


@dataclass(frozen=True, kw_only=True)
class Random(Method):
    """Keep random tokens, drawn anew at every event; equal seeds keep equal tokens.

    A token's draw depends on seed, layer, KV head, position and time only, so a run repeats on any
    device, whatever other sessions run.
    """

    name: ClassVar[str] = "random"
    summary: ClassVar[str] = "random tokens, the sceptic's baseline"
    source: ClassVar[str] = "baseline"
    ordered: ClassVar[bool] = False
    treats_heads_alike: ClassVar[bool] = False

    seed: int = param(0, "of the draws", low=0)

    def score(self, queries: Queries, keys: Tensor, context: ScoreContext) -> Tensor:  # noqa: ARG002
        """Hash every row to a number in [0, 1)."""
        heads = torch.arange(keys.shape[0], device=keys.device)[:, None]
        state = _mixed(heads + _mixed(torch.full((), self.seed, device=keys.device)))
        state = _mixed(state + context.layer)
        state = _mixed(state + context.now)
        return (_mixed(state + context.positions) >> 40).float() / (1 << 23)


def _mixed(numbers: Tensor) -> Tensor:
    """Scramble int64 numbers (the finaliser of MurmurHash3, on 63 bits)."""
    x = numbers & _MASK
    x = (x ^ (x >> 33)) * -49064778989728563 & _MASK
    x = (x ^ (x >> 33)) * -4265267296055464877 & _MASK
    return x ^ (x >> 33)
