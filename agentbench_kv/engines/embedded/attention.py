"""Packed forwards: tokens of many sessions in a single row, and attention over their caches.

Linear layers run over all tokens; attention, plugged into transformers' attention-interface
registry, runs over each session's own cache: prefill chunks one by one, decoding sessions together,
one call per pool of equal slots. Layers that see a window have caches, and so a plan, of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from agentbench_kv.engines.core.attention_sums import add_attention
from agentbench_kv.engines.core.rings import QueryBuffer, RingWrite, as_methods_see
from agentbench_kv.engines.embedded.architecture import LayerPlace
from agentbench_kv.engines.embedded.cache import SessionCache, SharedPrefix
from agentbench_kv.engines.embedded.observer import FedRows, Observer
from agentbench_kv.engines.embedded.quantization import Quantise
from agentbench_kv.engines.embedded.session import EmbeddedSession
from agentbench_kv.engines.embedded.slots import CachePool, SlotCache
from agentbench_kv.engines.embedded.windows import WindowCache
from agentbench_kv.errors import KVBenchError
from agentbench_kv.kernels import RowsBefore, SeenRows, attention
from agentbench_kv.kernels.torch_backend import softmax_beside

ATTENTION_NAME = "kvbench"
SPARSE = 0.5  # share of a range of slots below which each session has a call of its own


@dataclass(frozen=True)
class PrefillRows:
    """A session's rows in a packed forward: `[start, end)` of the packed axis."""

    cache: SessionCache | WindowCache
    start: int
    end: int
    seen: SeenRows
    unseen: int = 0  # first rows of the slot that nobody attends to
    # Tells a memory of a layer's queries: see `SessionMemory.ask`.
    ask: Callable[[int, Tensor], None] | None = None


@dataclass(frozen=True)
class DecodeGroup:
    """Sessions of one pool that feed one token each."""

    pool: CachePool
    rows: slice | Tensor  # of the packed axis; the sessions follow each other by slot
    slots: Tensor  # [n], int64
    places: Tensor  # [n], int64: cache row that each one's token gets
    first: int  # slots the call covers: [first, last)
    last: int
    seen: SeenRows  # of each slot, this token's included
    prefixes: Sequence[SharedPrefix | None]  # of each slot; () if there are none


@dataclass(frozen=True)
class CachePlan:
    """What attention does with one kind of caches in a forward."""

    prefills: list[PrefillRows]
    decodes: list[DecodeGroup]


@dataclass(frozen=True)
class ForwardPlan:
    """What attention needs to know of a packed forward."""

    layers: Sequence[LayerPlace]
    full: CachePlan
    windows: CachePlan | None  # of the layers that have one
    queries: QueryBuffer
    ring_write: RingWrite | None
    observer: Observer | None = None
    quantise: Quantise | None = None  # what is done to new rows


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
    layers: Sequence[LayerPlace],
    observer: Observer | None = None,
    quantise: Quantise | None = None,
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
    write = None
    if ring_rows:
        write = RingWrite(_ids(ring_rows, queries.device), _ids(ring_slots, queries.device))
    full, windows = _full_plan(ordered, rows), _window_plan(ordered, rows)
    plan = ForwardPlan(layers, full, windows, queries, write, observer, quantise)
    return Packed(ordered, tokens, positions, rows, plan)


def _full_plan(sessions: Sequence[EmbeddedSession], rows: Sequence[int]) -> CachePlan:
    """Plan the layers with full attention, whose pools the sessions are in order of."""
    plan = CachePlan([], [])
    start = 0
    for (single, _), members in groupby(
        zip(sessions, rows, strict=True),
        key=lambda item: (item[1] == 1 and not _recalls(item[0]), id(item[0].cache.pool)),
    ):
        group = list(members)
        caches = [session.cache for session, _ in group]
        if single and _is_dense(caches):
            end = start + len(group)
            plan.decodes.append(_decode_group(caches, slice(start, end)))
            start = end
            continue
        for session, n in group:
            found = _prefill_rows(session.cache, start, n, session.rows_unseen)
            plan.prefills.append(replace(found, ask=_ask(session)))
            start += n
    return plan


def _recalls(session: EmbeddedSession) -> bool:
    return session.memory is not None and session.memory.due


def _ask(session: EmbeddedSession) -> Callable[[int, Tensor], None] | None:
    memory, cache, first = session.memory, session.cache, session.next_position
    if memory is None or not memory.due:
        return None

    def ask(layer: int, queries: Tensor) -> None:
        memory.ask(layer, queries, first)
        if not memory.looking:
            keys, values = memory.front(layer)
            cache.keys[layer, :, : memory.rows] = keys.to(cache.shape.dtype)
            cache.values[layer, :, : memory.rows] = values

    return ask


def _window_plan(sessions: Sequence[EmbeddedSession], rows: Sequence[int]) -> CachePlan | None:
    """Plan the layers that see a window: their slots are in another order than the sessions."""
    plan = CachePlan([], [])
    starts = [0, *accumulate(rows)]
    laid = [
        (session.window, start, n)
        for session, start, n in zip(sessions, starts, rows, strict=False)
        if session.window is not None
    ]
    if not laid:
        return None
    single = sorted(
        ((cache, start) for cache, start, n in laid if n == 1),
        key=lambda item: (item[0].pool.capacity, item[0].slot),
    )
    for _, members in groupby(single, key=lambda item: id(item[0].pool)):
        group = list(members)
        caches, packed = [cache for cache, _ in group], [start for _, start in group]
        if _is_dense(caches):
            plan.decodes.append(_decode_group(caches, _ids(packed, caches[0].shape.device)))
        else:
            plan.prefills.extend(_prefill_rows(cache, start, 1) for cache, start in group)
    plan.prefills.extend(_prefill_rows(cache, start, n) for cache, start, n in laid if n > 1)
    return plan


def _is_dense(caches: Sequence[SlotCache]) -> bool:
    """Whether one call over the slots' range wastes less than calls of their own would."""
    covered = caches[-1].slot - caches[0].slot + 1
    return len(caches) >= SPARSE * covered


def _decode_group(
    caches: Sequence[SessionCache] | Sequence[WindowCache], rows: slice | Tensor
) -> DecodeGroup:
    pool: CachePool = caches[0].pool
    device = pool.keys.device
    slots = [cache.slot for cache in caches]
    seen = [cache.rows_with_next for cache in caches]
    first, last = slots[0], slots[-1] + 1
    # A slot nobody decodes in shows its first row: an empty softmax would be NaN.
    ends = [1] * (last - first)
    for slot, end in zip(slots, seen, strict=True):
        ends[slot - first] = end
    ids, places = _ids(slots, device), _ids([cache.next_row for cache in caches], device)
    rows_seen = SeenRows(_ids(ends, device), max(seen), 1)
    prefixes: list[SharedPrefix | None] = []
    if any(map(_prefix, caches)):
        prefixes = [None] * (last - first)
        for cache in caches:
            prefixes[cache.slot - first] = _prefix(cache)
    return DecodeGroup(pool, rows, ids, places, first, last, rows_seen, prefixes)


def _prefill_rows(
    cache: SessionCache | WindowCache, start: int, n: int, unseen: int = 0
) -> PrefillRows:
    rows = cache.rows_with(n) - unseen
    lengths = _ids([rows], cache.shape.device)
    return PrefillRows(cache, start, start + n, SeenRows(lengths, rows, n, cache.window), unseen)


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
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Write the new rows of every session and attend to its cache.

    `query` [1, q_heads, n, head_dim] and `key`, `value` [1, kv_heads, n, head_dim] are post-RoPE;
    `s_aux` [q_heads] are attention sinks. Returns [1, n, q_heads, head_dim].
    """
    layer: int = getattr(module, "layer_idx")  # noqa: B009  modules have no typed attributes
    place, windowed = kvbench.layers[layer]
    q, k, v = query[0], key[0], value[0]
    plan = kvbench.windows if windowed else kvbench.full
    if plan is None:
        raise KVBenchError(f"layer {layer} has a window, its sessions have no cache for one")
    if not windowed:
        _show(kvbench, place, q, k, v, scaling)
        if kvbench.queries.kv_heads > k.shape[0]:
            copies = kvbench.queries.kv_heads // k.shape[0]
            k, v = k.repeat_interleave(copies, 0), v.repeat_interleave(copies, 0)
    if kvbench.quantise is not None:
        k, v = kvbench.quantise(k), kvbench.quantise(v)
    output = torch.empty(q.shape[1], q.shape[0], q.shape[2], dtype=q.dtype, device=q.device)
    for group in plan.decodes:
        rows = group.rows
        output[rows] = _decode(place, group, q[:, rows], k[:, rows], v[:, rows], scaling, s_aux)
    for segment in plan.prefills:
        own = slice(segment.start, segment.end)
        if segment.ask is not None:
            segment.ask(place, q[:, own])
        written = segment.cache.write(place, k[:, own], v[:, own])
        keys, values = (rows[:, segment.unseen :] for rows in written)
        (output[own],) = attention(
            *(q[None, :, own], keys[None], values[None], segment.seen, scaling, s_aux),
            _before(place, [_prefix(segment.cache)]),
        )
        if segment.cache.shape.with_sums:
            sums = segment.cache.pool.sums[segment.cache.slot, place, :, : keys.shape[1]]
            add_attention(sums, as_methods_see(q[:, own], scaling), keys, s_aux)
    return output.unsqueeze(0), None


def _show(plan: ForwardPlan, place: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> None:
    """Give a full layer's new rows to the rings and to who watches."""
    if plan.ring_write is None and plan.observer is None:
        return
    queries = as_methods_see(q, scaling)
    if plan.observer is not None:
        plan.observer.on_attention(place, queries, k, v)
    if plan.ring_write is not None:
        plan.queries.write(place, queries, plan.ring_write)


def _decode(
    layer: int,
    group: DecodeGroup,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    sinks: Tensor | None,
) -> Tensor:
    """One token of n sessions; query [q_heads, n, d] -> [n, q_heads, d]."""
    pool, slots = group.pool, group.slots
    pool.keys[slots, layer, :, group.places] = key.transpose(0, 1)
    pool.values[slots, layer, :, group.places] = value.transpose(0, 1)
    covered = slice(group.first, group.last)
    keys, values = pool.keys[covered, layer], pool.values[covered, layer]
    heads, n, head_dim = query.shape
    rows = query.transpose(0, 1)
    if n < group.last - group.first:
        rows = rows.new_zeros(group.last - group.first, heads, head_dim)
        rows[slots - group.first] = query.transpose(0, 1)
    if pool.shape.with_sums:
        _add_decode_mass(layer, group, rows, keys, scaling, sinks)
    before = _before(layer, group.prefixes)
    out = attention(rows[:, :, None], keys, values, group.seen, scaling, sinks, before)[:, 0]
    return out if n == rows.shape[0] else out[slots - group.first]


def _prefix(cache: SlotCache) -> SharedPrefix | None:
    """Return the rows that come before those in a cache's slot; a window has none."""
    return cache.prefix if isinstance(cache, SessionCache) else None


def _before(layer: int, prefixes: Sequence[SharedPrefix | None]) -> Sequence[RowsBefore | None]:
    """Return the rows of each session's prefix in a layer; () if none has one."""
    distinct = {id(each): each.layer(layer) for each in prefixes if each is not None}
    return [distinct.get(id(each)) for each in prefixes] if distinct else ()


def _add_decode_mass(
    layer: int,
    group: DecodeGroup,
    rows: Tensor,
    keys: Tensor,
    scaling: float,
    sinks: Tensor | None,
) -> None:
    """Add each session's attention, a mean over query groups; rows [slots, q_heads, head_dim]."""
    sums, slots, seen = group.pool.sums, group.slots, group.seen
    sums[slots, layer, :, group.places] = 0.0
    grouped = rows.reshape(rows.shape[0], keys.shape[1], -1, rows.shape[2])
    logits = (grouped * scaling).float() @ keys[:, :, : seen.longest].transpose(2, 3).float()
    logits = logits.masked_fill(~seen.mask, float("-inf"))
    if sinks is None:
        probabilities = logits.softmax(-1)
    else:
        probabilities = softmax_beside(logits, sinks.reshape(keys.shape[1], -1, 1))
    sums[slots, layer, :, : seen.longest] += probabilities.mean(2)[slots - group.first]


def register() -> None:
    AttentionInterface.register(ATTENTION_NAME, session_attention)
