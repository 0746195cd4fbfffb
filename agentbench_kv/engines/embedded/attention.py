"""Attention over session caches, plugged into transformers' attention-interface registry.

One forward packs tokens of many sessions into a single row. Linear layers run over all of them;
attention runs over each session's own cache: prefill chunks one by one, decoding sessions together,
one call per pool of equal slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from agentbench_kv.engines.core.rings import QueryBuffer, RingWrite
from agentbench_kv.engines.embedded.cache import CachePool, SessionCache
from agentbench_kv.engines.embedded.observer import Observer

ATTENTION_NAME = "kvbench"


@dataclass(frozen=True)
class Segment:
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
class StepPlan:
    """What attention needs to know of a packed forward."""

    prefills: list[Segment]
    decodes: list[DecodeGroup]
    queries: QueryBuffer
    ring_write: RingWrite | None
    observer: Observer | None = None


def session_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001  the caches are the mask
    scaling: float,
    kvbench: StepPlan,
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
            segment.cache.add_mass(layer, q[:, rows], end)
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
    """[q_heads, n, d] over [kv_heads, T, d]; the last n cache rows are the queries' own.

    A group's query heads are laid along the query axis, so grouped keys are never repeated.
    """
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
    """Make `attn_implementation="kvbench"` known to transformers."""
    AttentionInterface.register(ATTENTION_NAME, session_attention)
