"""What a method is given at an event and what it returns."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from torch import Tensor


class QueryKind(StrEnum):
    """What an engine keeps of past queries for a method.

    `none`: nothing; `recent`: the last queries; `per_phase`: the last queries of each phase;
    `sums`: no queries, but the attention every cached row has got so far; `future`: the attention
    it will get after the event, which only a capture knows.
    """

    NONE = "none"
    RECENT = "recent"
    PER_PHASE = "per_phase"
    SUMS = "sums"
    FUTURE = "future"


@dataclass(frozen=True)
class QueryPlan:
    """The queries a method wants kept: `size` of them (per phase for `PER_PHASE`)."""

    kind: QueryKind = QueryKind.NONE
    size: int = 0


@dataclass(frozen=True)
class Queries:
    """Kept queries of one layer, post-RoPE.

    Attributes
    ----------
    vectors : Tensor [q_heads, n, head_dim]
    positions, phases : Tensor [n], int64
    """

    vectors: Tensor
    positions: Tensor
    phases: Tensor


@dataclass(frozen=True)
class LayerView:
    """The live rows of one layer of one session's cache, in cache order.

    Attributes
    ----------
    keys, values : Tensor [kv_heads, tokens, head_dim]
        Keys are post-RoPE at their original positions.
    positions : Tensor [kv_heads, tokens], int64
        Original position of every row; may differ between heads.
    sums : Tensor [kv_heads, tokens], float32, optional
        Attention probability every row has got since it was written, summed over all queries that
        saw it, mean over the group's query heads; given for plans of kind `SUMS`. For plans of kind
        `FUTURE`, the same over all later queries.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    sums: Tensor | None = None


def in_order(vectors: Tensor, order: Tensor | None) -> Tensor:
    """Return vectors [kv_heads, tokens, head_dim] in an order [kv_heads, tokens]; None: as is."""
    if order is None:
        return vectors
    return vectors.gather(1, order[..., None].expand(-1, -1, vectors.shape[-1]))


@dataclass(frozen=True)
class ScoreContext:
    """What `score` may know besides queries and keys.

    Attributes
    ----------
    positions : Tensor [kv_heads, tokens], int64
        Original positions; ascending unless the method sets `ordered = False`.
    cached : LayerView
        The layer's rows as they lie in the cache.
    order : Tensor [kv_heads, tokens], int64, or None
        The cache row of every key; None if keys come in cache order.
    sums : Tensor [kv_heads, tokens], float32, or None
        See `LayerView`.
    now : int
        Logical length: tokens ever seen.
    budget : int
        Tokens to keep at this event.
    layer : int
    prompt : int
        Tokens of the session's first prefill.
    next_position : int
        RoPE position of the next token: `now`, or the rows held where positions are the cache's.
    seen_phases : Tensor [now], int64, or None
        Phase of every token ever seen.
    """

    positions: Tensor
    cached: LayerView
    now: int
    budget: int
    layer: int
    order: Tensor | None = None
    sums: Tensor | None = None
    prompt: int = 0
    next_position: int = 0
    seen_phases: Tensor | None = None

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
    """The outcome of one event.

    Attributes
    ----------
    kept : Tensor [layers, kv_heads, budget], int64
        Cache rows to keep, ascending.
    values : Tensor [layers, kv_heads, tokens], float32
        Scores after `kept_set` merging; NaN where always kept.
    positions : Tensor [layers, kv_heads, tokens], int64, optional
        Of `values`, if they come in cache order; otherwise they come by ascending position.
    """

    kept: Tensor
    values: Tensor
    positions: Tensor | None = None

    @cached_property
    def scores(self) -> Tensor:
        """`values` by ascending position."""
        if self.positions is None:
            return self.values
        return self.values.gather(-1, self.positions.argsort(-1))
