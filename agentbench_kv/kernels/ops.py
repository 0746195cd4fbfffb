"""The operations on contiguous caches. Every backend computes exactly these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from agentbench_kv.kernels.dispatch import active_backend
from agentbench_kv.kernels.layout import PagedRows, RowsBefore, SeenRows

GqaMode = Literal["mean_prob", "max_prob", "max_logit", "per_head"]


def ring_write(
    ring: Tensor,  # [slots, heads, head_dim]; may hold rings of many sessions
    rows: Tensor,  # [n, heads, head_dim], cast to the ring's dtype
    slots: Tensor,  # [n], int64, distinct
) -> None:
    """Copy rows into ring slots, in place."""
    active_backend(ring.device).ring_write(ring, rows, slots)


def attention(
    queries: Tensor,  # [sessions, q_heads, n, head_dim]; neighbouring heads share a KV head
    keys: Tensor,  # [sessions, kv_heads, capacity, head_dim]
    values: Tensor,
    seen: SeenRows,
    scaling: float,
    sinks: Tensor | None = None,  # [q_heads]: logits beside the rows' own
    before: Sequence[RowsBefore | None] = (),  # of each session, its first rows; () for none
) -> Tensor:
    """Return softmax(scaling · q·k) · v over the rows that each query sees.

    [sessions, n, q_heads, head_dim], of the queries' dtype; logits and sums are float32. The sinks'
    share of a softmax is left out, so that its rest sums to less than 1.
    """
    backend = active_backend(queries.device)
    return backend.attention(queries, keys, values, seen, scaling, sinks, before)


def attention_mass(
    queries: Tensor,  # [q_heads, n, head_dim]; head `h` reads `h // (q_heads // kv_heads)`
    keys: Tensor,  # [kv_heads, tokens, head_dim]
    *,
    gqa: GqaMode = "mean_prob",
    query_positions: Tensor | None = None,  # [n], int64
    key_positions: Tensor | None = None,  # [kv_heads, tokens], int64
) -> Tensor:
    """Return the mean over queries of softmax(q·k/√d) along the keys [kv_heads, tokens], float32.

    `gqa` says how a group's query heads become one score: mean or maximum of their probabilities,
    or the softmax of the maximum of their raw logits; `per_head` leaves the group apart, [kv_heads,
    group, tokens]. If both positions are given, a query does not see keys at later ones.
    """
    backend = active_backend(keys.device)
    return backend.attention_mass(queries, keys, gqa, query_positions, key_positions)


def select_top(
    scores: Tensor,  # [..., tokens]
    budget: int,
    always: Tensor | None = None,  # [..., tokens], bool: must be taken; at most `budget` per row
    positions: Tensor | None = None,  # [..., tokens], int64: distinct per row, 0 to 2**32 - 1
) -> Tensor:
    """Return the indices of the `budget` highest scores of each row, ascending, int64.

    All of them if there are fewer. Exact; ties go to the lower position, or to the lower index if
    no positions are given; NaN ranks below everything; entries marked in `always` are taken first.
    """
    return active_backend(scores.device).select_top(scores, budget, always, positions)


def compact(
    keys: Tensor,  # [layers, kv_heads, capacity, head_dim]
    values: Tensor,
    positions: Tensor,  # [layers, kv_heads, capacity], int64: original position of each row
    kept: Tensor,  # [layers, kv_heads, budget], int64: rows to keep, ascending and distinct
    length: int,  # rows in use before; those behind are unused
    *,
    extras: Sequence[Tensor] = (),  # [layers, kv_heads, capacity]: whatever else belongs to a row
    sort: bool = False,
) -> int:
    """Move the kept rows of a cache into its first `budget` rows, in place.

    Attention does not depend on the order of cached rows, so only kept rows past the new end move,
    each into the hole an evicted row left (docs/decisions, "compaction fills holes"). `sort` keeps
    the order of `kept` instead, and moves more rows. Returns the rows moved, summed over layers and
    heads.
    """
    caches = (keys, values, positions, *extras)
    return active_backend(kept.device).compact(caches, kept, length, sort)


def rope_rotate(
    keys: Tensor,  # [layers, kv_heads, tokens, head_dim]
    shifts: Tensor,  # broadcastable to [layers, kv_heads, tokens], int64
    frequencies: Tensor,  # [pairs]: radians per position
    *,
    interleaved: bool = False,
) -> None:
    """Move keys that carry RoPE by some positions, in place (Su et al., RoFormer).

    The first `2 * pairs` channels turn; pairs are (x[f], x[f + pairs]), or (x[2f], x[2f + 1]) if
    `interleaved`. Scaled RoPE is scaled through `frequencies`, less its attention factor.
    """
    rows = PagedRows(tuple(keys[:, :, None].unbind()))
    shifts = shifts.expand(keys.shape[:3])[None]
    active_backend(keys.device).rope_rotate(rows, None, None, shifts, frequencies, interleaved)


def aabb(keys: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Return the bounding boxes [kv_heads, blocks, head_dim] of blocks of keys (MemArt, index).

    Lows and highs, float32, of keys [kv_heads, tokens, head_dim] before RoPE; the last block may be
    shorter than `block` tokens.
    """
    return active_backend(keys.device).aabb(keys, block)


def aabb_score(queries: Tensor, lows: Tensor, highs: Tensor) -> Tensor:
    """Return the largest dot product a query can have with a key in each box of `aabb`.

    Queries [q_heads, n, head_dim] give float32 [q_heads, n, blocks].
    """
    return active_backend(queries.device).aabb_score(queries, lows, highs)


def similarity_column_mean(keys: Tensor, threshold: float) -> Tensor:
    """Return how alike each key is to the others, on average (R-KV, redundancy).

    Of keys [kv_heads, tokens, head_dim] by ascending position: cosines of all pairs, zero on the
    diagonal; in every row the last column above the threshold counts 0 (column 0 if there is none,
    as in the authors' code); the mean over rows, float32 [kv_heads, tokens].
    """
    return active_backend(keys.device).similarity_column_mean(keys, threshold)
