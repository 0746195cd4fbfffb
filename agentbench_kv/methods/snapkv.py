"""SnapKV: attention of a short observation window (Li et al., NeurIPS 2024)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d

from agentbench_kv.errors import UsageError
from agentbench_kv.kernels import attention_mass, by_position
from agentbench_kv.methods.base import (
    GQA_MODES,
    Method,
    Queries,
    QueryKind,
    QueryPlan,
    ScoreContext,
)
from agentbench_kv.params import param

POOLS = ("avg", "max", "none")
_AVERAGED = {"kernel": 5, "pool": "avg", "gqa": "mean_prob", "columns": "all"}


@dataclass(frozen=True, kw_only=True)
class SnapKV(Method):
    """Keep the last `window` tokens and the best of the rest by pooled window attention.

    Presets: `rkv` is the form R-KV's authors run as their baseline,
    `kvpress` the one of NVIDIA's kvpress, `original` the authors' own: a kept set per query head,
    so that the cache holds as many heads as there are query heads.
    """

    name: ClassVar[str] = "snapkv"
    summary: ClassVar[str] = "pooled attention of the last tokens' queries"
    source: ClassVar[str] = (
        "Li et al., SnapKV: LLM Knows What You Are Looking for before Generation"
    )
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "rkv": {"window": 32, "kernel": 7, "pool": "max", "gqa": "max_logit", "columns": "past"},
        "kvpress": {"window": 64, **_AVERAGED},
        "original": {"window": 32, **_AVERAGED, "aggregate": "sum", "cache_heads": "query"},
    }
    default_preset: ClassVar[str] = "rkv"
    ordered: ClassVar[bool] = False

    window: int = param(32, "observation window, its tokens always kept", low=1)
    kernel: int = param(7, "pooling width, odd", low=1)
    pool: str = param("max", "pooling of the score along tokens", choices=POOLS)
    gqa: str = param("max_logit", "how a group's query heads are merged", choices=GQA_MODES)
    columns: str = param(
        "past",
        "softmax over the tokens before the window, or over all with a causal window",
        choices=("past", "all"),
    )
    aggregate: str = param("mean", "merging the window's rows", choices=("mean", "sum"))
    cache_heads: str = param(
        "kv", "one kept set per KV head, or per query head", choices=("kv", "query")
    )

    def validate(self) -> None:
        check_kernel(self.kernel)
        super().validate()

    def recent_kept(self, budget: int) -> int:  # noqa: ARG002
        return max(self.window, self.keep_recent)

    @property
    def per_query_head(self) -> bool:
        return self.cache_heads == "query"

    def query_plan(self) -> QueryPlan:
        return QueryPlan(QueryKind.RECENT, self.window)

    def score(self, queries: Queries, keys: Tensor, context: ScoreContext) -> Tensor:
        """Pool the window's attention over earlier tokens; the window itself scores 0.

        Only scores are put into order, which pooling needs; keys stay where they are.
        """
        order = by_position(context.positions[None])[1][0, :, : keys.shape[1] - self.window]
        mass = self._mass(queries, keys, context)
        past = mass.gather(-1, order[:, None].expand(-1, mass.shape[1], -1))
        spread = pooled(past, self.pool, self.kernel)
        merged = spread.amax(1) if self.gqa == "max_prob" else spread.mean(1)
        if self.aggregate == "sum":
            merged = merged * queries.vectors.shape[1]
        return keys.new_zeros(keys.shape[:2], dtype=merged.dtype).scatter_(-1, order, merged)

    def _mass(self, queries: Queries, keys: Tensor, context: ScoreContext) -> Tensor:
        """Return [kv_heads, group, tokens]; the group is 1 when raw logits were merged."""
        sees = queries.positions
        if self.columns == "past":  # every query as if it came before the window
            sees = torch.full_like(sees, context.now - self.window - 1)
        merged = self.gqa == "max_logit"
        mass = attention_mass(
            queries.vectors,
            keys,
            gqa="max_logit" if merged else "per_head",
            query_positions=sees,
            key_positions=context.positions,
        )
        return mass[:, None] if merged else mass


def pooled(mass: Tensor, pool: str, kernel: int) -> Tensor:
    """Pool scores [..., tokens] along tokens: `pool` is one of `POOLS`, `kernel` an odd width."""
    if pool == "avg":
        return avg_pool1d(mass, kernel, stride=1, padding=kernel // 2)
    return mass if pool == "none" else torch.max_pool1d(mass, kernel, 1, kernel // 2)


def check_kernel(kernel: int) -> None:
    """Refuse an even pooling width, which has no middle."""
    if kernel % 2 == 0:
        raise UsageError(f"kernel={kernel}: expected an odd width")
