"""Packed forwards: tokens of many sessions in a single row, and attention over their caches.

Linear layers run over all tokens; attention, plugged into transformers' attention-interface
registry, runs over each session's own cache: prefill chunks one by one, decoding sessions together,
one call per pool of equal slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from agentbench_kv.engines.core.rings import QueryBuffer, RingWrite, add_attention
from agentbench_kv.engines.embedded.cache import CachePool, SessionCache
from agentbench_kv.engines.embedded.observer import FedRows, Observer
from agentbench_kv.engines.embedded.session import EmbeddedSession

ATTENTION_NAME = "kvbench"
SPARSE = 0.5  # share of a range of slots below which each session has a call of its own


@dataclass(frozen=True)
class PrefillRows:
    """A session's rows in a packed forward: `[start, end)` of the packed axis."""

    cache: SessionCache
    start: int
    end: int


@dataclass(frozen=True)
class DecodeGroup:
    """Sessions of one pool that feed one token each."""

    pool: CachePool
    start: int  # first packed row; the sessions follow each other by slot
    slots: Tensor  # [n], int64
    lengths: Tensor  # [n], int64: rows of each before this token
    first: int  # slots the call covers: [first, last)
    last: int
    tokens: int  # rows of the longest session, this token included
    mask: Tensor  # [last - first, 1, 1, tokens]: 0 where a slot has a row, -inf elsewhere


@dataclass(frozen=True)
class ForwardPlan:
    """What attention needs to know of a packed forward."""

    prefills: list[PrefillRows]
    decodes: list[DecodeGroup]
    queries: QueryBuffer
    ring_write: RingWrite | None
    observer: Observer | None = None


@dataclass(frozen=True)
class Packed:
    """A forward's input, session after session."""

    sessions: list[EmbeddedSession]
    tokens: list[int]
    positions: list[int]  # of RoPE
    rows: list[int]  # tokens each session feeds
    plan: ForwardPlan


def pack(
    sessions: Sequence[EmbeddedSession],
    queries: QueryBuffer,
    observer: Observer | None = None,
) -> Packed:
    """Lay the chunks of all sessions one after the other and plan their attention.

    Decoding sessions come first, ordered by pool and slot, so that each pool's are neighbours.
    """
    ordered = sorted(
        sessions, key=lambda s: (len(s.chunk) > 1, s.cache.pool.capacity, s.cache.slot)
    )
    tokens: list[int] = []
    positions: list[int] = []
    rows: list[int] = []
    ring_rows: list[int] = []
    ring_slots: list[int] = []
    for session in ordered:
        taken, (stored, slots) = session.chunk, session.kept_queries
        ring_rows += [len(tokens) + row for row in stored]
        ring_slots += slots
        positions += range(session.next_position, session.next_position + len(taken))
        ids = [token for token, _ in taken]
        if observer is not None:
            labels = [int(phase) for _, phase in taken]
            own = [session.fed + i in session.generated for i in range(len(ids))]
            observer.on_rows(FedRows(session.name, session.fed, ids, labels, own))
        tokens += ids
        rows.append(len(taken))
    prefills, decodes = _attention_plan(ordered, rows)
    write = None
    if ring_rows:
        write = RingWrite(_ids(ring_rows, queries.device), _ids(ring_slots, queries.device))
    plan = ForwardPlan(prefills, decodes, queries, write, observer)
    return Packed(ordered, tokens, positions, rows, plan)


def _attention_plan(
    sessions: Sequence[EmbeddedSession], rows: Sequence[int]
) -> tuple[list[PrefillRows], list[DecodeGroup]]:
    prefills: list[PrefillRows] = []
    decodes: list[DecodeGroup] = []
    start = 0
    for (single, _), members in groupby(
        zip(sessions, rows, strict=True), key=lambda item: (item[1] == 1, id(item[0].cache.pool))
    ):
        group = list(members)
        neighbours = [session for session, _ in group]
        if single and _is_dense(neighbours):
            decodes.append(_decode_group(neighbours, start))
            start += len(group)
            continue
        for session, n in group:
            prefills.append(PrefillRows(session.cache, start, start + n))
            start += n
    return prefills, decodes


def _is_dense(sessions: Sequence[EmbeddedSession]) -> bool:
    """Whether one call over the slots' range wastes less than calls of their own would."""
    covered = sessions[-1].cache.slot - sessions[0].cache.slot + 1
    return len(sessions) >= SPARSE * covered


def _decode_group(sessions: Sequence[EmbeddedSession], start: int) -> DecodeGroup:
    pool: CachePool = sessions[0].cache.pool
    device = pool.keys.device
    slots = [session.cache.slot for session in sessions]
    lengths = [session.cache.length for session in sessions]
    first, last, tokens = slots[0], slots[-1] + 1, max(lengths) + 1
    # A slot nobody decodes in shows its first row: an empty softmax would be NaN.
    ends = [1] * (last - first)
    for slot, length in zip(slots, lengths, strict=True):
        ends[slot - first] = length + 1
    hidden = torch.arange(tokens, device=device) >= _ids(ends, device)[:, None]
    mask = torch.zeros(hidden.shape, dtype=pool.keys.dtype, device=device)
    mask.masked_fill_(hidden, float("-inf"))
    ids, rows = _ids(slots, device), _ids(lengths, device)
    return DecodeGroup(pool, start, ids, rows, first, last, tokens, mask[:, None, None])


def _ids(values: list[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


def session_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001  the caches are the mask
    scaling: float,
    kvbench: ForwardPlan,
    **_: Any,
) -> tuple[Tensor, None]:
    """Write the new rows of every session and attend to its cache.

    `query` [1, q_heads, n, head_dim] and `key`, `value` [1, kv_heads, n, head_dim] are post-RoPE;
    returns [1, n, q_heads, head_dim].
    """
    layer: int = getattr(module, "layer_idx")  # noqa: B009  modules have no typed attributes
    q, k, v = query[0], key[0], value[0]
    if kvbench.observer is not None:
        kvbench.observer.on_attention(layer, q, k, v)
    if kvbench.ring_write is not None:
        kvbench.queries.write(layer, q, kvbench.ring_write)
    if kvbench.queries.kv_heads > k.shape[0]:
        copies = kvbench.queries.kv_heads // k.shape[0]
        k, v = k.repeat_interleave(copies, 0), v.repeat_interleave(copies, 0)
    output = torch.empty(q.shape[1], q.shape[0], q.shape[2], dtype=q.dtype, device=q.device)
    for group in kvbench.decodes:
        rows = slice(group.start, group.start + len(group.slots))
        output[rows] = _decode(layer, group, q[:, rows], k[:, rows], v[:, rows], scaling)
    for segment in kvbench.prefills:
        rows = slice(segment.start, segment.end)
        end = segment.cache.write(layer, k[:, rows], v[:, rows])
        keys = segment.cache.keys[layer, :, :end]
        values = segment.cache.values[layer, :, :end]
        output[rows] = _prefill(q[:, rows], keys, values, scaling).transpose(0, 1)
        if segment.cache.shape.with_sums:
            sums = segment.cache.pool.sums[segment.cache.slot, layer, :, :end]
            add_attention(sums, q[:, rows], keys)
    return output.unsqueeze(0), None


def _decode(
    layer: int, group: DecodeGroup, query: Tensor, key: Tensor, value: Tensor, scaling: float
) -> Tensor:
    """One token of n sessions; query [q_heads, n, d] -> [n, q_heads, d]."""
    pool, slots = group.pool, group.slots
    pool.keys[slots, layer, :, group.lengths] = key.transpose(0, 1)
    pool.values[slots, layer, :, group.lengths] = value.transpose(0, 1)
    covered = slice(group.first, group.last)
    keys = pool.keys[covered, layer, :, : group.tokens]
    values = pool.values[covered, layer, :, : group.tokens]
    heads, n, head_dim = query.shape
    rows = query.transpose(0, 1)
    if n < group.last - group.first:
        rows = rows.new_zeros(group.last - group.first, heads, head_dim)
        rows[slots - group.first] = query.transpose(0, 1)
    grouped = rows.reshape(rows.shape[0], keys.shape[1], -1, head_dim)
    if pool.shape.with_sums:
        _add_decode_mass(layer, group, grouped, keys, scaling)
    out = scaled_dot_product_attention(
        grouped, keys, values, attn_mask=group.mask, scale=scaling
    ).reshape(rows.shape[0], heads, head_dim)
    return out if n == rows.shape[0] else out[slots - group.first]


def _add_decode_mass(
    layer: int, group: DecodeGroup, grouped: Tensor, keys: Tensor, scaling: float
) -> None:
    """Add each session's attention, mean over query groups [slots, kv_heads, group, d]."""
    sums, slots = group.pool.sums, group.slots
    sums[slots, layer, :, group.lengths] = 0.0
    logits = (grouped * scaling).float() @ keys.transpose(-1, -2).float() + group.mask.float()
    mass = logits.softmax(-1).mean(2)
    sums[slots, layer, :, : group.tokens] += mass[slots - group.first]


def _prefill(query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    """[q_heads, n, d] over [kv_heads, T, d]; the last n cache rows are the queries' own."""
    # A group's query heads are laid along the query axis, so grouped keys are never repeated.
    heads, n, head_dim = query.shape
    kv_heads, tokens, _ = keys.shape
    grouped = query.reshape(1, kv_heads, heads // kv_heads * n, head_dim)
    mask = torch.ones(n, tokens, dtype=torch.bool, device=query.device).tril(tokens - n)
    mask = mask.repeat(heads // kv_heads, 1)
    out = scaled_dot_product_attention(
        grouped, keys.unsqueeze(0), values.unsqueeze(0), attn_mask=mask, scale=scaling
    )
    return out.reshape(heads, n, head_dim)


def register() -> None:
    AttentionInterface.register(ATTENTION_NAME, session_attention)
