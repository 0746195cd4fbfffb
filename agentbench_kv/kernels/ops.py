"""The four operations, with their contracts. Every backend computes exactly these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from agentbench_kv.kernels.dispatch import active_backend

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
    active_backend().ring_write(ring, rows, slots)


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
    return active_backend().attention_mass(queries, keys, gqa, query_positions, key_positions)


def select_top(scores: Tensor, budget: int, always: Tensor | None = None) -> Tensor:
    """Return the indices of the `budget` highest scores of each row, ascending.

    Exact; ties go to the lower index; NaN ranks below everything; entries marked in `always` are
    taken first.

    Parameters
    ----------
    scores : Tensor [..., tokens]
        One score per token.
    budget : int
        How many to take; all of them if there are fewer.
    always : Tensor [..., tokens] of bool, optional
        Entries that must be taken; at most `budget` per row.

    Returns
    -------
    Tensor [..., min(budget, tokens)], int64
    """
    return active_backend().select_top(scores, budget, always)


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
    return active_backend().compact((keys, values, positions, *extras), kept, length, sort)
