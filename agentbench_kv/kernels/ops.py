"""The operations on contiguous caches. Every backend computes exactly these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from agentbench_kv.kernels.dispatch import active_backend
from agentbench_kv.kernels.layout import PagedRows

GqaMode = Literal["mean_prob", "max_prob", "max_logit", "per_head"]


def ring_write(ring: Tensor, rows: Tensor, slots: Tensor) -> None:
    """Copy rows into ring slots, in place.

    Parameters
    ----------
    ring : Tensor [slots, heads, head_dim]
        The buffer; rings of many sessions may lie in it one after the other.
    rows : Tensor [n, heads, head_dim]
        New rows, cast to the ring's dtype.
    slots : Tensor [n], int64
        Target slot of each row; slots are distinct.
    """
    active_backend(ring.device).ring_write(ring, rows, slots)


def attention_mass(
    queries: Tensor,
    keys: Tensor,
    *,
    gqa: GqaMode = "mean_prob",
    query_positions: Tensor | None = None,
    key_positions: Tensor | None = None,
) -> Tensor:
    """Mean over queries of softmax(q·k/√d) along the keys, one score per key.

    Parameters
    ----------
    queries : Tensor [q_heads, n, head_dim]
        Representative queries; query head `h` reads KV head `h // (q_heads // kv_heads)`.
    keys : Tensor [kv_heads, tokens, head_dim]
        Cached keys.
    gqa : str
        How a group's query heads become one score: mean or maximum of their probabilities, or the
        softmax of the maximum of their raw logits; `per_head` leaves the group apart.
    query_positions, key_positions : Tensor [n] and [kv_heads, tokens], int64, optional
        If both are given, a query does not see keys at later positions.

    Returns
    -------
    Tensor [kv_heads, tokens], float32
        With `per_head`: [kv_heads, group, tokens].
    """
    backend = active_backend(keys.device)
    return backend.attention_mass(queries, keys, gqa, query_positions, key_positions)


def select_top(
    scores: Tensor, budget: int, always: Tensor | None = None, positions: Tensor | None = None
) -> Tensor:
    """Return the indices of the `budget` highest scores of each row, ascending.

    Exact; ties go to the lower position, or to the lower index if no positions are given; NaN ranks
    below everything; entries marked in `always` are taken first.

    Parameters
    ----------
    scores : Tensor [..., tokens]
        One score per token.
    budget : int
        How many to take; all of them if there are fewer.
    always : Tensor [..., tokens] of bool, optional
        Entries that must be taken; at most `budget` per row.
    positions : Tensor [..., tokens], int64, optional
        Distinct in every row, from 0 to 2**32 - 1.

    Returns
    -------
    Tensor [..., min(budget, tokens)], int64
    """
    return active_backend(scores.device).select_top(scores, budget, always, positions)


def compact(
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    kept: Tensor,
    length: int,
    *,
    extras: Sequence[Tensor] = (),
    sort: bool = False,
) -> int:
    """Move the kept rows of a cache into its first `kept.shape[-1]` rows, in place.

    Attention does not depend on the order of cached rows, so only kept rows past the new end move,
    each into the hole an evicted row left (docs/decisions, "compaction fills holes").

    Parameters
    ----------
    keys, values : Tensor [layers, kv_heads, capacity, head_dim]
        The cache; rows at or past `length` are unused.
    positions : Tensor [layers, kv_heads, capacity], int64
        Original position of each row; moved along.
    kept : Tensor [layers, kv_heads, budget], int64
        Rows to keep, ascending and distinct.
    length : int
        Rows in use before.
    extras : sequence of Tensor [layers, kv_heads, capacity]
        Whatever else belongs to a row; moved along.
    sort : bool
        Keep the rows in the order of `kept` instead of filling holes; moves more rows.

    Returns
    -------
    int
        Rows moved, summed over layers and heads.
    """
    caches = (keys, values, positions, *extras)
    return active_backend(kept.device).compact(caches, kept, length, sort)


def rope_rotate(
    keys: Tensor, shifts: Tensor, frequencies: Tensor, *, interleaved: bool = False
) -> None:
    """Move keys that carry RoPE by some positions, in place (Su et al., RoFormer).

    Parameters
    ----------
    keys : Tensor [layers, kv_heads, tokens, head_dim]
        Scaled RoPE is scaled through `frequencies`; its attention factor does not change.
    shifts : Tensor, broadcastable to [layers, kv_heads, tokens], int64
        Positions to move by; negative ones move back.
    frequencies : Tensor [pairs]
        Inverse frequencies in radians per position; the first `2 * pairs` channels turn.
    interleaved : bool
        Pairs are (x[2f], x[2f + 1]) instead of (x[f], x[f + pairs]).
    """
    rows = PagedRows(tuple(keys[:, :, None].unbind()))
    shifts = shifts.expand(keys.shape[:3])[None]
    active_backend(keys.device).rope_rotate(rows, None, None, shifts, frequencies, interleaved)


def aabb(keys: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Return the bounding box of the keys in each block of tokens (MemArt, block index).

    Parameters
    ----------
    keys : Tensor [kv_heads, tokens, head_dim]
        Keys before RoPE.
    block : int
        Tokens of a block; the last one may be shorter.

    Returns
    -------
    lows, highs : Tensor [kv_heads, blocks, head_dim], float32
    """
    return active_backend(keys.device).aabb(keys, block)


def aabb_score(queries: Tensor, lows: Tensor, highs: Tensor) -> Tensor:
    """Return the largest dot product a query can have with a key in each box.

    Parameters
    ----------
    queries : Tensor [q_heads, n, head_dim]
    lows, highs : Tensor [kv_heads, blocks, head_dim]
        See `aabb`.

    Returns
    -------
    Tensor [q_heads, n, blocks], float32
    """
    return active_backend(queries.device).aabb_score(queries, lows, highs)


def similarity_column_mean(keys: Tensor, threshold: float) -> Tensor:
    """Return how alike each key is to the others, on average (R-KV, redundancy).

    Cosines of all pairs, zero on the diagonal; in every row the last column above the threshold
    counts 0 (column 0 if there is none, as in the authors' code); the mean over rows.

    Parameters
    ----------
    keys : Tensor [kv_heads, tokens, head_dim]
        By ascending position.
    threshold : float

    Returns
    -------
    Tensor [kv_heads, tokens], float32
    """
    return active_backend(keys.device).similarity_column_mean(keys, threshold)
