"""The oracle: what attention will really go to. For diagnostics on captures only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from agentbench_kv.errors import PrerequisiteError
from agentbench_kv.methods.base import Method, Queries, QueryKind, QueryPlan, ScoreContext


@dataclass(frozen=True, kw_only=True)
class Oracle(Method):
    """Rank by the attention a token gets from all later queries with a full cache.

    `U_i = Σ_{j > now} softmax(q_j·K_{≤j}/√d)_i`, mean over the group (AgentKV, appendix C.1).
    """

    name: ClassVar[str] = "oracle"
    summary: ClassVar[str] = "realised future attention, offline only"
    source: ClassVar[str] = "Liu et al., AgentKV, appendix C.1 (max-overall-utility)"
    ordered: ClassVar[bool] = False
    offline: ClassVar[bool] = True

    def query_plan(self) -> QueryPlan:
        return QueryPlan(QueryKind.FUTURE)

    def score(self, queries: Queries, keys: Tensor, context: ScoreContext) -> Tensor:  # noqa: ARG002
        if context.sums is None:
            raise PrerequisiteError("oracle needs a capture that goes on after the event")
        return context.sums
