"""Packing chunks of many sessions into one forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from agentbench_kv.engines.embedded.attention import DecodeGroup, Segment, StepPlan
from agentbench_kv.engines.embedded.observer import Observer
from agentbench_kv.engines.embedded.pool import CachePool
from agentbench_kv.engines.embedded.session import EmbeddedSession
from agentbench_kv.engines.queries import QueryBuffer, RingWrite

SPARSE = 0.5  # share of a range of slots below which each session has a call of its own


@dataclass(frozen=True)
class Packed:
    """A forward's input, session after session."""

    sessions: list[EmbeddedSession]
    tokens: list[int]
    positions: list[int]  # of RoPE
    rows: list[int]  # tokens each session feeds
    plan: StepPlan


def pack(
    sessions: Sequence[EmbeddedSession],
    chunk: int,
    queries: QueryBuffer,
    observer: Observer | None = None,
) -> Packed:
    """Take a chunk of pending tokens from every session and plan their attention.

    Decoding sessions come first, ordered by pool and slot, so that each pool's are neighbours.
    """
    for session in sessions:
        session.cache.reserve(min(chunk, len(session.pending)))
    ordered = sorted(
        sessions, key=lambda s: (len(s.pending) > 1, s.cache.pool.capacity, s.cache.slot)
    )
    tokens: list[int] = []
    positions: list[int] = []
    rows: list[int] = []
    ring_rows: list[int] = []
    ring_slots: list[int] = []
    for session in ordered:
        taken = session.take(chunk)
        stored, slots = session.queries.place([p for _, p in taken], session.fed, len(tokens))
        ring_rows += stored
        ring_slots += slots
        positions += range(session.next_position, session.next_position + len(taken))
        ids = [token for token, _ in taken]
        if observer is not None:
            labels = [int(phase) for _, phase in taken]
            own = [session.fed + i in session.generated for i in range(len(ids))]
            observer.on_rows(session.name, ids, labels, own, session.fed)
        tokens += ids
        rows.append(len(taken))
    prefills, decodes = _attention_plan(ordered, rows)
    write = None
    if ring_rows:
        write = RingWrite(_ids(ring_rows, queries.device), _ids(ring_slots, queries.device))
    plan = StepPlan(prefills, decodes, queries, write, observer)
    return Packed(ordered, tokens, positions, rows, plan)


def _attention_plan(
    sessions: Sequence[EmbeddedSession], rows: Sequence[int]
) -> tuple[list[Segment], list[DecodeGroup]]:
    prefills: list[Segment] = []
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
            prefills.append(Segment(session.cache, start, start + n))
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
