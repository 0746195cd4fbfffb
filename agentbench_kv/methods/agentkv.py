"""AgentKV: representatives from every agentic phase (Liu et al., Imperial College London)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from agentbench_kv.errors import UsageError
from agentbench_kv.kernels import attention_mass
from agentbench_kv.kernels.ops import GqaMode
from agentbench_kv.methods.base import (
    GQA_MODES,
    PHASE_NAMES,
    Method,
    Phase,
    Queries,
    QueryKind,
    QueryPlan,
    ScoreContext,
)
from agentbench_kv.methods.samplers import HISTORY, SAMPLERS, sample
from agentbench_kv.params import param


@dataclass(frozen=True, kw_only=True)
class AgentKV(Method):
    """Score keys by their mean attention from the last queries of each phase.

    `A_i = 1/|Q| Σ_{q∈Q} softmax(q·K/√d)_i`, Q the union of four rings of `representatives / 4`
    queries, one per phase; the top `budget` tokens stay (paper, section 3.2). `@paper` protects no
    recent token; the default keeps the last 8, so that the newest tokens cannot vanish.
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

    sampler: str = param("last", "which queries of a phase represent it", choices=SAMPLERS)

    def validate(self) -> None:
        if self.representatives % len(Phase):
            raise UsageError(
                f"representatives={self.representatives}: expected a multiple of {len(Phase)}"
            )
        super().validate()

    def query_plan(self) -> QueryPlan:
        # As long as the sampler looks back.
        return QueryPlan(QueryKind.PER_PHASE, max(self._each, HISTORY[self.sampler]))

    @property
    def _each(self) -> int:
        return self.representatives // len(Phase)

    def score(self, queries: Queries, keys: Tensor, context: ScoreContext) -> Tensor:
        chosen = self._representatives(queries, keys, context)
        return attention_mass(chosen, keys, gqa=cast("GqaMode", self.gqa))

    def _representatives(self, queries: Queries, keys: Tensor, context: ScoreContext) -> Tensor:
        """Return [q_heads, n, head_dim]; n is at most `representatives`."""
        if self.sampler == "last" and self.drop_phase == "none":
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
