"""Which of a phase's past queries stand for it (AgentKV, appendix C.3).

Every sampler takes the queries of one phase, oldest first, and returns the indices of at most
`count` of them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

SAMPLERS = ("last", "multiscale", "weighted", "diverse")

HISTORY = {"last": 0, "multiscale": 128, "weighted": 64, "diverse": 128}
"""Queries per phase that a sampler chooses from; 0 means no more than it takes."""

WINDOWS = (4, 32, 128)
WINDOW_SHARES = (3, 2, 1)
WEIGHTING = 8
"""Last queries that weigh the keys in `weighted`."""


def sample(name: str, queries: Tensor, keys: Tensor, count: int) -> Tensor:
    """Choose representatives of one phase.

    Parameters
    ----------
    name : str
        One of `SAMPLERS`.
    queries : Tensor [group, n, head_dim]
        The phase's queries under one KV head, oldest first.
    keys : Tensor [tokens, head_dim]
        Cached keys of that head.
    count : int

    Returns
    -------
    Tensor [min(count, n)], int64, ascending
    """
    n = queries.shape[1]
    if n <= count:
        return torch.arange(n, device=queries.device)
    chosen = _SAMPLERS[name](queries.float(), keys.float(), count)
    return chosen.sort().values


def _last(queries: Tensor, keys: Tensor, count: int) -> Tensor:  # noqa: ARG001
    n = queries.shape[1]
    return torch.arange(n - count, n, device=queries.device)


def _multiscale(queries: Tensor, keys: Tensor, count: int) -> Tensor:  # noqa: ARG001
    """Share the slots 3:2:1 over the last 4, 32 and 128 queries, evenly spaced in each."""
    n = queries.shape[1]
    chosen: list[int] = []
    for window, quota in zip(WINDOWS, _quotas(count), strict=True):
        size = min(window, n)
        free = [n - size + i for i in range(size) if n - size + i not in chosen]
        chosen += _spread(free, quota)
    newest_first = (i for i in reversed(range(n)) if i not in chosen)
    chosen += [next(newest_first) for _ in range(count - len(chosen))]
    return torch.tensor(chosen, device=queries.device)


def _quotas(count: int) -> list[int]:
    """Split `count` by the window shares; what rounding leaves goes to the nearest windows."""
    total = sum(WINDOW_SHARES)
    quotas = [count * share // total for share in WINDOW_SHARES]
    for index in range(count - sum(quotas)):
        quotas[index % len(quotas)] += 1
    return quotas


def _spread(places: list[int], quota: int) -> list[int]:
    """Cut the places into `quota` equal stretches and take the middle of each."""
    quota = min(quota, len(places))
    return [places[int((i + 0.5) * len(places) / quota)] for i in range(quota)]


def _weighted(queries: Tensor, keys: Tensor, count: int) -> Tensor:
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
    return torch.tensor(chosen, device=queries.device)


def _diverse(queries: Tensor, keys: Tensor, count: int) -> Tensor:  # noqa: ARG001
    """Add the query least like those chosen (cosine), starting from the newest."""
    vectors = torch.nn.functional.normalize(queries.mean(0), dim=-1)
    cosines = vectors @ vectors.T
    chosen = [len(vectors) - 1]
    for _ in range(count - 1):
        nearest = cosines[:, chosen].amax(-1)
        nearest[chosen] = torch.inf
        chosen.append(int(nearest.argmin()))
    return torch.tensor(chosen, device=queries.device)


_SAMPLERS: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "last": _last,
    "multiscale": _multiscale,
    "weighted": _weighted,
    "diverse": _diverse,
}
