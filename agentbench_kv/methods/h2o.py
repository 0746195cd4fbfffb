"""H2O: heavy hitters by accumulated attention (Zhang et al., NeurIPS 2023)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from agentbench_kv.errors import KVBenchError
from agentbench_kv.methods.base import Method, Queries, QueryKind, QueryPlan, ScoreContext
from agentbench_kv.params import param


@dataclass(frozen=True, kw_only=True)
class H2O(Method):
    """Keep the last half of the budget and the tokens that have got the most attention so far.

    Sums run over every query of the session, prefilled or decoded, mean over the group; an evicted
    token forgets its sum. `@kvpress` is ObservedAttention of NVIDIA's kvpress: the mean over the
    queries that could see a token, and no recent tokens.
    """

    name: ClassVar[str] = "h2o"
    summary: ClassVar[str] = "accumulated attention + recent half"
    source: ClassVar[str] = "Zhang et al., H2O: Heavy-Hitter Oracle for Efficient Inference of LLMs"
    ordered: ClassVar[bool] = False
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "sums": {},
        "kvpress": {"recent_share": 0.0, "normalise": "seen"},
    }
    default_preset: ClassVar[str] = "sums"

    recent_share: float = param(0.5, "share of the budget kept for the last tokens", low=0, high=1)
    normalise: str = param(
        "none", "sums, or means over the queries that could see the token", choices=("none", "seen")
    )

    def recent_kept(self, budget: int) -> int:
        return max(int(budget * self.recent_share), self.keep_recent)

    def query_plan(self) -> QueryPlan:
        return QueryPlan(QueryKind.SUMS)

    def score(self, queries: Queries, keys: Tensor, context: ScoreContext) -> Tensor:  # noqa: ARG002
        if context.sums is None:
            raise KVBenchError("h2o was run without sums of attention")
        if self.normalise == "none":
            return context.sums
        return context.sums / (context.now - context.positions).clamp(min=1)
