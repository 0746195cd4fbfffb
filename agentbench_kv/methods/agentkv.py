"""AgentKV: representatives from every agentic phase (Liu et al., Imperial College London)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from agentbench_kv.errors import UsageError
from agentbench_kv.kernels import attention_mass
from agentbench_kv.kernels.ops import GqaMode
from agentbench_kv.methods.base import (
    CLOSINGS,
    GQA_MODES,
    PHASE_NAMES,
    Method,
    Phase,
    Queries,
    QueryKind,
    QueryPlan,
    ScoreContext,
)
from agentbench_kv.methods.snapkv import POOLS, check_kernel, pooled
from agentbench_kv.params import param

SAMPLERS = ("last", "multiscale", "weighted", "diverse")
# The converse ablation: as many queries, or no others, chosen without regard to phases.
PHASELESS = ("recent", "shuffled", "own")
# Queries per phase that a sampler chooses from; 0 means no more than it takes.
HISTORY = {"last": 0, "multiscale": 128, "weighted": 64, "diverse": 128}
WINDOWS = (4, 32, 128)
WINDOW_SHARES = (3, 2, 1)
STRETCH = 64  # tokens in a row that `shuffled` gives one label
SHUFFLED_REACH = 24  # queries it looks back on, over representatives: a label is rarely absent
WEIGHTING = 8  # last queries that weigh the keys in `weighted`


@dataclass(frozen=True, kw_only=True)
class AgentKV(Method):
    """Score keys by their mean attention from the last queries of each phase.

    `A_i = 1/|Q| Σ_{q∈Q} softmax(q·K/√d)_i`, Q the union of four rings of `representatives / 4`
    queries, one per phase; the top `budget` tokens stay (paper, section 3.2). `@paper` protects no
    recent token; the default keeps the last 8, so that the newest tokens cannot vanish.

    Three samplers ask what the phases are worth. `recent` takes the last `representatives` queries
    of any phase; `shuffled` fills four rings by labels drawn at random for stretches of 64 tokens,
    so that they reach as far back; `own` empties all rings but that of the phase under way.
    Swapping two rings would change nothing: all four are one set.
    """

    name: ClassVar[str] = "agentkv"
    summary: ClassVar[str] = "mean attention of recent queries from each phase"
    source: ClassVar[str] = "Liu et al., AgentKV: Phase-Aware KV Eviction for Agentic LLMs"
    ordered: ClassVar[bool] = False
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "default": {"keep_recent": 8},
        "paper": {"keep_recent": 0},
    }
    default_preset: ClassVar[str] = "default"

    representatives: int = param(32, "queries kept in all, a multiple of 4", low=4)
    gqa: str = param("mean_prob", "how a group's query heads are merged", choices=GQA_MODES)
    drop_phase: str = param(
        "none", "ablation: phase whose queries are not used", choices=("none", *PHASE_NAMES)
    )
    sampler: str = param(
        "last", "which queries of a phase represent it", choices=(*SAMPLERS, *PHASELESS)
    )
    closing: str = param(
        "own",
        "phase of a closing marker: of what it closes, or of what follows",
        choices=CLOSINGS,
        rare=True,
    )
    pool: str = param(
        "none", "ablation: pooling of the score along tokens", choices=POOLS, rare=True
    )
    kernel: int = param(7, "pooling width, odd", low=1, rare=True)

    def validate(self) -> None:
        if self.representatives % len(Phase):
            raise UsageError(
                f"representatives={self.representatives}: expected a multiple of {len(Phase)}"
            )
        if self.sampler in PHASELESS and self.drop_phase != "none":
            raise UsageError(f"sampler={self.sampler} knows no phase to drop: leave drop_phase out")
        check_kernel(self.kernel)
        super().validate()

    def query_plan(self) -> QueryPlan:
        if self.sampler == "recent":
            return QueryPlan(QueryKind.RECENT, self.representatives)
        if self.sampler == "shuffled":
            return QueryPlan(QueryKind.RECENT, self.representatives * SHUFFLED_REACH)
        # As long as the sampler looks back.
        return QueryPlan(QueryKind.PER_PHASE, max(self._each, HISTORY.get(self.sampler, 0)))

    @property
    def closing_markers(self) -> str:
        return self.closing

    @property
    def _each(self) -> int:
        return self.representatives // len(Phase)

    def score(self, queries: Queries, keys: Tensor, context: ScoreContext) -> Tensor:
        chosen = self._representatives(queries, keys, context)
        mass = attention_mass(chosen, keys, gqa=cast("GqaMode", self.gqa))
        return mass if self.pool == "none" else self._spread(mass, context.positions.argsort(-1))

    def _spread(self, mass: Tensor, order: Tensor) -> Tensor:
        """Pool every token's score with its neighbours' among those cached."""
        spread = pooled(mass.gather(-1, order), self.pool, self.kernel)
        return torch.empty_like(mass).scatter_(-1, order, spread)

    def _representatives(self, queries: Queries, keys: Tensor, context: ScoreContext) -> Tensor:
        """Return [q_heads, n, head_dim]; n is at most `representatives`."""
        if self.sampler == "own":
            newest = queries.phases[queries.positions.argmax()]
            return queries.vectors[:, queries.phases == newest]
        if self.sampler == "shuffled":
            return queries.vectors[:, in_random_rings(queries.positions, self._each)]
        if self.sampler == "recent" or (self.sampler == "last" and self.drop_phase == "none"):
            return queries.vectors
        dropped = (*PHASE_NAMES, "none").index(self.drop_phase)
        if self.sampler == "last":
            return queries.vectors[:, queries.phases != dropped]
        chosen = [
            self._of_phase(queries.vectors[:, queries.phases == phase], keys, context, phase)
            for phase in map(int, Phase)
            if phase != dropped
        ]
        return torch.cat(chosen, 1)

    def _of_phase(self, vectors: Tensor, keys: Tensor, context: ScoreContext, phase: int) -> Tensor:
        """Let the sampler choose per KV head among a phase's queries [q_heads, n, head_dim]."""
        heads, n, head_dim = vectors.shape
        grouped = vectors.reshape(keys.shape[0], heads // keys.shape[0], n, head_dim)
        taken = []
        for head, group in enumerate(grouped):
            own = keys[head]
            if context.phases is not None:
                own = own[context.phases[head] == phase]
            taken.append(group[:, sample(self.sampler, group, own, self._each)])
        return torch.cat(taken)


def in_random_rings(positions: Tensor, each: int) -> Tensor:
    """Mark the last `each` of every label, drawn once a stretch, of ascending positions [n]."""
    # Multiplicative hashing, twice: after one round neighbours are spaced evenly.
    mixed = (positions // STRETCH + 1) * 2654435761 % (1 << 32)
    mixed = (mixed ^ mixed >> 16) * 2246822519 % (1 << 32)
    own = torch.nn.functional.one_hot(mixed >> 30, len(Phase)).bool()
    newer = own.flip(0).cumsum(0).flip(0)
    return (own & (newer <= each)).any(-1)


def sample(name: str, queries: Tensor, keys: Tensor, count: int) -> Tensor:
    """Choose at most `count` representatives of one phase; return their indices, ascending.

    The samplers are those of AgentKV, appendix C.3. `queries` [group, n, head_dim] are the phase's
    under one KV head, oldest first; `keys` [tokens, head_dim] are what that head has cached.
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
