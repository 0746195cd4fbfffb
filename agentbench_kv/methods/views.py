"""What a method is given at an event and what it returns."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from torch import Tensor


class QueryKind(StrEnum):
    """What an engine keeps of past queries for a method."""

    NONE = "none"
    RECENT = "recent"  # the last queries
    PER_PHASE = "per_phase"  # the last queries of each phase
    SUMS = "sums"  # no queries, but the attention every cached row has got so far
    FUTURE = "future"  # the attention it will get after the event, which only a capture knows


@dataclass(frozen=True)
class QueryPlan:
    """The queries a method wants kept: `size` of them (per phase for `PER_PHASE`)."""

    kind: QueryKind = QueryKind.NONE
    size: int = 0


@dataclass(frozen=True)
class Queries:
    """Kept queries of one layer, post-RoPE."""

    vectors: Tensor  # [q_heads, n, head_dim]
    positions: Tensor  # [n], int64
    phases: Tensor  # [n], int64


@dataclass(frozen=True)
class LayerView:
    """The live rows of one layer of one session's cache, in cache order."""

    keys: Tensor  # [kv_heads, tokens, head_dim], post-RoPE at their original positions
    values: Tensor  # [kv_heads, tokens, head_dim]
    positions: Tensor  # [kv_heads, tokens], int64: original ones; may differ between heads
    # [kv_heads, tokens], float32: attention probability every row has got since it was written,
    # summed over all queries that saw it, mean over the group's query heads; given for plans of
    # kind `SUMS`. For plans of kind `FUTURE`, the same over all later queries.
    sums: Tensor | None = None


def in_order(vectors: Tensor, order: Tensor | None) -> Tensor:
    """Return vectors [kv_heads, tokens, head_dim] in an order [kv_heads, tokens]; None: as is."""
    if order is None:
        return vectors
    return vectors.gather(1, order[..., None].expand(-1, -1, vectors.shape[-1]))


@dataclass(frozen=True)
class ScoreContext:
    """What `score` may know besides queries and keys."""

    positions: Tensor  # [kv_heads, tokens], int64: original ones; ascending if `ordered`
    cached: LayerView  # the layer's rows in cache order
    now: int  # logical length: tokens ever seen
    budget: int  # tokens to keep at this event
    layer: int
    order: Tensor | None = None  # [kv_heads, tokens], int64: cache row of every key; None: as is
    sums: Tensor | None = None  # [kv_heads, tokens], float32, see `LayerView`
    prompt: int = 0  # tokens of the session's first prefill
    # RoPE position of the next token: `now`, or the rows held where positions are the cache's.
    next_position: int = 0
    seen_phases: Tensor | None = None  # [now], int64: phase of every token ever seen

    @cached_property
    def phases(self) -> Tensor | None:
        """Phase of every key's token [kv_heads, tokens], int64; None if phases are not known."""
        return None if self.seen_phases is None else self.seen_phases[self.positions]

    @cached_property
    def values(self) -> Tensor:
        """Values [kv_heads, tokens, head_dim] in the order of the keys; sorted when asked for."""
        return in_order(self.cached.values, self.order)


@dataclass(frozen=True)
class Selection:
    """The outcome of one event."""

    kept: Tensor  # [layers, kv_heads, budget], int64: cache rows to keep, ascending
    # [layers, kv_heads, tokens], float32: scores after `kept_set` merging; NaN where always kept.
    values: Tensor
    # Of `values`, [layers, kv_heads, tokens], int64, if they come in cache order; else None, and
    # they come by ascending position.
    positions: Tensor | None = None

    @cached_property
    def scores(self) -> Tensor:
        """`values` by ascending position."""
        if self.positions is None:
            return self.values
        return self.values.gather(-1, self.positions.argsort(-1))
