"""Muon for the matrices, AdamW for the rest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised, so that all directions of a matrix learn alike.

    For matrices only; Nesterov momentum, decoupled decay. See
    https://kellerjordan.github.io/posts/muon/
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float = 0.02,
        momentum: float = 0.95,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Update the matrices, those of a shape together."""
        for group in self.param_groups:
            shapes = defaultdict(list)
            for weight in group["params"]:
                if weight.grad is not None:
                    shapes[weight.shape].append(weight)
            for weights in shapes.values():
                self._update(weights, group)

    def _update(self, weights: list[nn.Parameter], group: dict[str, float]) -> None:
        nudges = [self._nudge(weight, group["momentum"]) for weight in weights]
        rows, columns = weights[0].shape
        scale = group["lr"] * max(1.0, rows / columns) ** 0.5
        for weight, update in zip(weights, _orthogonal(torch.stack(nudges)), strict=True):
            weight.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-scale)

    def _nudge(self, weight: nn.Parameter, momentum: float) -> Tensor:
        state = self.state[weight]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(weight)
        gradient = weight.grad
        if gradient is None:
            raise RuntimeError("a weight without a gradient reached the update")
        state["momentum"].lerp_(gradient, 1 - momentum)
        return gradient.lerp(state["momentum"], momentum)


def _orthogonal(stack: Tensor) -> Tensor:
    """Bring all singular values near one by five Newton-Schulz steps; (matrices, rows, columns)."""
    tall = stack.shape[-2] > stack.shape[-1]
    x: Tensor = stack.mT if tall else stack
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (2.0315 * gram @ gram - 4.7750 * gram) @ x
    return x.mT if tall else x


class Optimizers:
    """Both optimizers behind one learning-rate factor."""

    def __init__(self, model: nn.Module) -> None:
        named = list(model.named_parameters())
        matrices = [p for name, p in named if p.dim() == 2 and "embed" not in name]
        embeddings = [p for name, p in named if p.dim() == 2 and "embed" in name]
        gains = [p for _, p in named if p.dim() < 2]
        adam = torch.optim.AdamW(
            [{"params": embeddings, "lr": 3e-3}, {"params": gains, "lr": 1e-2}],
            betas=(0.9, 0.95),
            weight_decay=0.0,
        )
        self.parts: tuple[torch.optim.Optimizer, ...] = (Muon(matrices), adam)
        self._rates = [[group["lr"] for group in part.param_groups] for part in self.parts]

    def step(self, factor: float) -> None:
        """Update the weights at `factor` times the learning rates, and drop the gradients."""
        for part, rates in zip(self.parts, self._rates, strict=True):
            for group, rate in zip(part.param_groups, rates, strict=True):
                group["lr"] = rate * factor
            part.step()
            part.zero_grad(set_to_none=True)

    def state(self) -> list[dict[str, object]]:
        """Return what a resumed run needs."""
        return [part.state_dict() for part in self.parts]

    def restore(self, state: list[dict[str, object]]) -> None:
        for part, saved in zip(self.parts, state, strict=True):
            part.load_state_dict(saved)
