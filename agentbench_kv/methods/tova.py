"""TOVA: what the last token attends to (Oren et al., EMNLP 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from agentbench_kv.kernels import attention_mass
from agentbench_kv.methods.base import (
    KEPT_SETS,
    Method,
    Queries,
    QueryKind,
    QueryPlan,
    ScoreContext,
)
from agentbench_kv.params import param


@dataclass(frozen=True, kw_only=True)
class TOVA(Method):
    """Score keys by the last token's attention, mean over all query heads: one set per layer.

    The last token itself is always kept, as in kvpress (TOVAPress).
    """

    name: ClassVar[str] = "tova"
    summary: ClassVar[str] = "attention of the last token, one set per layer"
    source: ClassVar[str] = "Oren et al., Transformers are Multi-State RNNs"
    ordered: ClassVar[bool] = False

    kept_set: str = param("per_layer", "who shares a kept set", choices=KEPT_SETS)

    def recent_kept(self, budget: int) -> int:  # noqa: ARG002
        return max(1, self.keep_recent)

    def query_plan(self) -> QueryPlan:
        return QueryPlan(QueryKind.RECENT, 1)

    def score(self, queries: Queries, keys: Tensor, context: ScoreContext) -> Tensor:  # noqa: ARG002
        return attention_mass(queries.vectors, keys)
