"""Saving, evicting and restoring spans of a session: whole tokens, over all layers and heads.

Rows stay in the order of their RoPE positions, so that a block that comes back to where it was
leaves the cache as if it had never been away. Called on the engine's thread only.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import torch
from torch import Tensor

from agentbench_kv.engines.core import rings
from agentbench_kv.engines.embedded.cache import SessionCache
from agentbench_kv.engines.embedded.session import EmbeddedSession
from agentbench_kv.errors import UsageError
from agentbench_kv.kernels import rope_rotate
from agentbench_kv.methods.spans import Block, SpanRange, check_whole_tokens, within


def save_block(session: EmbeddedSession, start: int, end: int) -> Block:
    cache = _cache_of(session)
    rows = _marked(cache, [(start, end)]).nonzero()[:, 0]
    if start >= end or _labels(cache)[rows].tolist() != list(range(start, end)):
        raise UsageError(
            f"cannot save positions {start} to {end} of session {session.name}: "
            f"{len(rows)} of {end - start} are in the cache"
        )
    packed = session.packed_frequencies is not None
    positions: list[int] = rows.tolist() if packed else session.rope[start:end]
    both = torch.stack([cache.keys[:, :, rows], cache.values[:, :, rows]])
    parts = (both.cpu().flatten(), torch.tensor(positions))
    data = torch.cat([part.view(torch.uint8) for part in parts]).numpy()
    return Block(start, end, positions[0], data)


def evict_spans(session: EmbeddedSession, spans: Sequence[SpanRange]) -> int:
    cache = _cache_of(session)
    before = cache.length
    kept = (~_marked(cache, spans)).nonzero()[:, 0]
    if len(kept) < before:
        session.evict(kept)
    return before - len(kept)


def restore_block(session: EmbeddedSession, block: Block, at: int | None = None) -> None:
    cache = _cache_of(session)
    before = cache.length
    if block.end > session.fed or bool(_marked(cache, [(block.start, block.end)]).any()):
        raise UsageError(
            f"cannot restore positions {block.start} to {block.end} of session {session.name}: "
            f"they are in the cache, or past its {session.fed} tokens"
        )
    keys, values, positions = _rows_of(block, cache)
    targets, row = restore_target(session, positions, at)
    if targets != positions:
        shifts = (torch.tensor(targets) - torch.tensor(positions)).to(keys.device)
        rope_rotate(keys, shifts, session.frequencies, interleaved=cache.shape.interleaved)
    moved = cache.insert(row, keys, values, block.start)
    session.restored_at(block.start, targets)
    session.ledger.restore(block.tokens, moved)
    session.rows_changed(before)


def restore_target(
    session: EmbeddedSession, positions: list[int], at: int | None
) -> tuple[list[int], int]:
    """Return RoPE positions and first row where saved tokens may return, or raise UsageError."""
    end, count = session.cache.length, len(positions)
    if session.packed_frequencies is not None:
        if at not in (None, end):
            raise UsageError("where positions are the cache's, blocks come back at its end")
        return list(range(end, end + count)), end
    targets = positions if at is None else list(range(at, at + count))
    taken = [session.rope[label] for label in _labels(session.cache).tolist()]
    row = bisect_left(taken, targets[0])
    if targets[0] < 0 or (row < end and taken[row] <= targets[-1]):
        raise UsageError(f"RoPE positions {targets[0]} to {targets[-1]} are taken")
    return targets, row


def span_attention(
    session: EmbeddedSession, spans: Sequence[SpanRange], layers: Sequence[int], decay: float
) -> list[float]:
    cache = session.cache
    cache.take_in()
    queries = session.queries.layer_queries(cache.shape.layers)
    keys = cache.keys[:, :, : cache.length].unbind()
    return rings.span_attention(queries, keys, _labels(cache), spans, layers, decay)


def _cache_of(session: EmbeddedSession) -> SessionCache:
    """Return the cache of a session whose spans may come and go, with all rows in one slot."""
    check_whole_tokens(session.method)
    session.cache.take_in()
    return session.cache


def _labels(cache: SessionCache) -> Tensor:
    """Return the logical position of every row [length]; equal for all layers and heads."""
    if cache.slot < 0:  # nothing was fed yet
        return torch.zeros(0, dtype=torch.int64, device=cache.shape.device)
    return cache.positions[0, 0, : cache.length]


def _marked(cache: SessionCache, spans: Sequence[SpanRange]) -> Tensor:
    """Return which rows lie in any of the spans [length], bool."""
    return within(_labels(cache), spans)


def _rows_of(block: Block, cache: SessionCache) -> tuple[Tensor, Tensor, list[int]]:
    """Return keys and values [layers, kv_heads, tokens, head_dim] and their RoPE positions."""
    shape, rows = cache.shape, block.tokens * cache.shape.bytes_per_token
    if block.nbytes != rows + block.tokens * torch.int64.itemsize:
        raise UsageError("the block was saved by an engine with another model or dtype")
    raw = torch.from_numpy(block.data)
    both = raw[:rows].view(shape.dtype)
    both = both.reshape(2, shape.layers, shape.kv_heads, block.tokens, shape.head_dim)
    keys, values = both.to(shape.device)
    positions: list[int] = raw[rows:].clone().view(torch.int64).tolist()
    return keys.clone(), values, positions
