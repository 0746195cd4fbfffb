"""The operations of `kernels.ops` on paged caches, over many sessions and layers at once.

What serving engines hold: rows in blocks, found through a table [sessions, blocks], int32.
`kernels.layout.PagedRows` describes any of their memory layouts. `lengths` [sessions], int64, says
how many rows are in use.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from agentbench_kv.kernels.dispatch import active_backend
from agentbench_kv.kernels.layout import PagedRows, check_blocks
from agentbench_kv.kernels.ops import GqaMode


def compact(
    tensors: Sequence[PagedRows],  # keys, values, positions and whatever else moves along
    table: Tensor,
    kept: Tensor,  # [sessions, layers, kv_heads, budget], int64: ascending and distinct rows
    lengths: Tensor,
    *,
    counts: Tensor | None = None,  # [sessions], int64: how many entries of `kept` count
    sort: bool = False,
    check: bool = True,
) -> Tensor:
    """Move the kept rows of every session to its first rows, in place; return the rows moved.

    The number, int64, is on the device of the cache; reading it waits for a GPU. `sort` keeps the
    order of `kept` instead of filling holes, and moves more rows. `check` refuses blocks in use
    twice (ValueError), and waits for a GPU; engines that own their blocks may skip it.
    """
    if check:
        check_blocks(table, lengths, tensors[0].block_size)
    return active_backend(kept.device).compact_paged(tensors, table, kept, counts, sort)


def attention_mass(
    queries: Tensor,  # [sessions, layers, q_heads, n, head_dim]
    keys: PagedRows,
    table: Tensor,
    lengths: Tensor,
    *,
    longest: int,  # the largest of `lengths`, given so that a GPU need not be waited for
    gqa: GqaMode = "mean_prob",
    query_positions: Tensor | None = None,  # [sessions, n], int64
    key_positions: PagedRows | None = None,  # of int64
    valid: Tensor | None = None,  # [sessions, n], bool
) -> Tensor:
    """Return the mean attention every cached key gets [sessions, layers, kv_heads, longest].

    float32, 0 past a session's length; with `per_head`: [..., kv_heads, group, longest]. Positions
    are those of `ops.attention_mass`. Queries that are not `valid`, in empty ring slots, give no
    mass and do not count in the mean.
    """
    backend = active_backend(queries.device)
    return backend.attention_mass_paged(
        queries, keys, table, lengths, longest, gqa, query_positions, key_positions, valid
    )


def rope_rotate(
    keys: PagedRows,
    table: Tensor,
    lengths: Tensor,
    shifts: Tensor,  # [sessions, layers, kv_heads, longest], int64; may be expanded
    frequencies: Tensor,
    *,
    interleaved: bool = False,
) -> None:
    """Move the keys of every session, which carry RoPE, by some positions, in place."""
    backend = active_backend(shifts.device)
    backend.rope_rotate(keys, table, lengths, shifts, frequencies, interleaved)
