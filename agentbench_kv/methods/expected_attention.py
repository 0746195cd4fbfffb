"""Expected attention: what queries of a known mean and spread will attend to (Devoto et al.)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from agentbench_kv.errors import PrerequisiteError
from agentbench_kv.methods.base import Method, Queries, ScoreContext, at_once
from agentbench_kv.methods.calibration import Calibration
from agentbench_kv.params import param


@dataclass(frozen=True, kw_only=True)
class ExpectedAttention(Method):
    """Score a key by the attention it may expect from queries to come, times its value's norm.

    Queries before RoPE are taken as Gaussian, N(μ, Σ) of every query head, and turned by the mean
    rotation R of the next `ahead` positions: `softmax_j(k_j·Rμ/√d + k_jᵀ(RΣRᵀ)k_j/2d)`, over all
    tokens but the sinks, mean over the group. As in kvpress (ExpectedAttentionPress), which takes
    μ and Σ from the prompt that it compresses; here they come from a calibration, because no engine
    keeps all queries.
    """

    name: ClassVar[str] = "expected-attention"
    summary: ClassVar[str] = "attention expected from Gaussian queries of a calibration"
    source: ClassVar[str] = (
        "Devoto et al., Expected Attention: KV Cache Compression by Estimating Attention from "
        "Future Queries Distribution"
    )
    ordered: ClassVar[bool] = False
    needs_calibration: ClassVar[bool] = True
    needs_covariance: ClassVar[bool] = True

    sinks: int = param(4, "first tokens always kept, counted in the budget", low=0)
    ahead: int = param(512, "positions to come over which the rotation is averaged", low=1)
    spread: str = param("on", "the term of the covariance", choices=("off", "on"))
    values: str = param("on", "scores times the norms of values", choices=("off", "on"))
    epsilon: float = param(0.0, "added to the expected attention before that", low=0)
    calibration: Calibration | None = field(default=None, compare=False, repr=False)

    def with_calibration(self, calibration: Calibration) -> Self:
        return replace(self, calibration=calibration)

    def score(self, queries: Queries, keys: Tensor, context: ScoreContext) -> Tensor:  # noqa: ARG002
        known = self.calibration
        covariance = None if known is None else known.on(keys.device).covariance
        if known is None or covariance is None:
            raise PrerequisiteError(
                f"{self.name} has no calibration with covariances; make one: kvbench calibrate"
            )
        known = known.on(keys.device)
        turn = self._mean_turn(known, context.next_position)
        pairs = known.mean[context.layer].to(torch.complex128)
        mean = (torch.cat((pairs.real, pairs.imag), -1) @ turn.T).reshape(len(keys), -1, len(turn))
        spread = None
        if self.spread == "on":
            spread = turn @ covariance[context.layer].double() @ turn.T
            spread = spread.reshape(*mean.shape, -1)
        size = at_once(mean.numel())
        logits = torch.cat([_logits(part, mean, spread) for part in torch.split(keys, size, 1)], -1)
        sinks = context.positions[:, None] < self.sinks
        expected: Tensor = logits.masked_fill_(sinks, -torch.inf).softmax(-1).mean(1)
        if self.values == "off":
            return expected
        parts = torch.split(context.values, size, 1)
        norms = torch.cat([part.double().norm(dim=-1) for part in parts], -1)
        return (expected + self.epsilon) * norms

    def _mean_turn(self, known: Calibration, now: int) -> Tensor:
        """Return the mean rotation matrix [head_dim, head_dim] of the positions from `now` on."""
        places = now + torch.arange(self.ahead, device=known.frequencies.device)
        angles = places[:, None].double() * known.frequencies.double()
        cos, sin = torch.diag(angles.cos().mean(0)), torch.diag(angles.sin().mean(0))
        return torch.cat((torch.cat((cos, -sin), 1), torch.cat((sin, cos), 1))) * known.scale


def _logits(keys: Tensor, mean: Tensor, spread: Tensor | None) -> Tensor:
    """Return k·m/√d + kᵀSk/2d of keys [kv_heads, tokens, d], as [kv_heads, group, tokens].

    Means m are [kv_heads, group, d], covariances S [kv_heads, group, d, d] or left out. All is in
    float64, so that equal keys get equal scores however a matrix product is split up.
    """
    rows = keys.double() / math.sqrt(keys.shape[-1])
    logits = rows @ mean.mT
    if spread is not None:
        turned = rows @ spread.transpose(1, 2).flatten(2)
        logits += (
            turned.reshape(*turned.shape[:-1], *spread.shape[1::2]).mul_(rows[:, :, None]).sum(-1)
            / 2
        )
    return logits.mT
