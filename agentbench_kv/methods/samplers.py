"""Which of a phase's past queries represent it (AgentKV, appendix C.3).

Every sampler takes the queries of one phase, oldest first, and returns the indices of at most
`count` of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

SAMPLERS = ("last", "multiscale", "weighted", "diverse")

# Queries per phase that a sampler chooses from; 0 means no more than it takes.
HISTORY = {"last": 0, "multiscale": 128, "weighted": 64, "diverse": 128}

WINDOWS = (4, 32, 128)
WINDOW_SHARES = (3, 2, 1)
WEIGHTING = 8  # last queries that weigh the keys in `weighted`


def sample(name: str, queries: Tensor, keys: Tensor, count: int) -> Tensor:
    """Choose at most `count` representatives of one phase; return their indices, ascending.

    `queries` [group, n, head_dim] are the phase's under one KV head, oldest first; `keys`
    [tokens, head_dim] are what that head has cached.
    """
    n = queries.shape[1]
    if n <= count:
        return torch.arange(n, device=queries.device)
    chosen = _SAMPLERS[name](queries.float(), keys.float(), count)
    return torch.tensor(sorted(chosen), device=queries.device)


def _last(queries: Tensor, keys: Tensor, count: int) -> Sequence[int]:  # noqa: ARG001
    return range(queries.shape[1] - count, queries.shape[1])


def _multiscale(queries: Tensor, keys: Tensor, count: int) -> Sequence[int]:  # noqa: ARG001
    """Share the slots 3:2:1 over the last 4, 32 and 128 queries, evenly spaced in each."""
    n = queries.shape[1]
    chosen: list[int] = []
    for window, quota in zip(WINDOWS, _quotas(count), strict=True):
        size = min(window, n)
        free = [n - size + i for i in range(size) if n - size + i not in chosen]
        quota = min(quota, len(free))
        # The middle of each of `quota` equal stretches.
        chosen += [free[int((i + 0.5) * len(free) / quota)] for i in range(quota)]
    newest_first = (i for i in reversed(range(n)) if i not in chosen)
    return chosen + [next(newest_first) for _ in range(count - len(chosen))]


def _quotas(count: int) -> list[int]:
    """Split `count` by the window shares; what rounding leaves goes to the nearest windows."""
    total = sum(WINDOW_SHARES)
    quotas = [count * share // total for share in WINDOW_SHARES]
    for index in range(count - sum(quotas)):
        quotas[index % len(quotas)] += 1
    return quotas


def _weighted(queries: Tensor, keys: Tensor, count: int) -> Sequence[int]:
    """Choose greedily to maximise Σ_i w_i · max_{a chosen} q_a·k_i; w from the last queries."""
    if not len(keys):
        return _last(queries, keys, count)
    logits = queries.mean(0) @ keys.T
    weights = logits[-WEIGHTING:].sum(0)
    reached = torch.full_like(weights, -torch.inf)
    chosen: list[int] = []
    for _ in range(count):
        gains = (torch.maximum(reached, logits) * weights).sum(-1)
        gains[chosen] = -torch.inf
        best = int(gains.argmax())
        chosen.append(best)
        reached = torch.maximum(reached, logits[best])
    return chosen


def _diverse(queries: Tensor, keys: Tensor, count: int) -> Sequence[int]:  # noqa: ARG001
    """Add the query least like those chosen (cosine), starting from the newest."""
    vectors = torch.nn.functional.normalize(queries.mean(0), dim=-1)
    cosines = vectors @ vectors.T
    chosen = [len(vectors) - 1]
    for _ in range(count - 1):
        nearest = cosines[:, chosen].amax(-1)
        nearest[chosen] = torch.inf
        chosen.append(int(nearest.argmin()))
    return chosen


_SAMPLERS: dict[str, Callable[[Tensor, Tensor, int], Sequence[int]]] = {
    "last": _last,
    "multiscale": _multiscale,
    "weighted": _weighted,
    "diverse": _diverse,
}
