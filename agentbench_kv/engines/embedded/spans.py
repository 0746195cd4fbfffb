"""Saving, evicting and restoring spans of a session: whole tokens, over all layers and heads.

Rows stay in the order of their RoPE positions, so that a block that comes back to where it was
leaves the cache as if it had never been away. Called on the engine's thread only.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import torch
from torch import Tensor

from agentbench_kv.engines.embedded.cache import SessionCache
from agentbench_kv.engines.embedded.session import EmbeddedSession
from agentbench_kv.errors import UsageError
from agentbench_kv.kernels import rope_rotate
from agentbench_kv.methods.spans import Block, SpanRange


def save_block(session: EmbeddedSession, start: int, end: int) -> Block:
    _check_whole_tokens(session)
    cache = session.cache
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
    _check_whole_tokens(session)
    before = session.cache.length
    kept = (~_marked(session.cache, spans)).nonzero()[:, 0]
    if len(kept) < before:
        session.evict(kept)
    return before - len(kept)


def restore_block(session: EmbeddedSession, block: Block, at: int | None = None) -> None:
    _check_whole_tokens(session)
    cache, before = session.cache, session.cache.length
    if block.end > session.fed or bool(_marked(cache, [(block.start, block.end)]).any()):
        raise UsageError(
            f"cannot restore positions {block.start} to {block.end} of session {session.name}: "
            f"they are in the cache, or past its {session.fed} tokens"
        )
    keys, values, positions = _rows_of(block, cache)
    targets, row = restore_target(session, positions, at)
    if targets != positions and session.frequencies is not None:
        shifts = torch.tensor(targets) - torch.tensor(positions)
        rope_rotate(keys, shifts.to(keys.device), session.frequencies)
    moved = cache.insert(row, keys, values, block.start)
    session.restored_at(block.start, targets)
    session.ledger.restore(block.tokens, moved)
    session.rows_changed(before)


def restore_target(
    session: EmbeddedSession, positions: list[int], at: int | None
) -> tuple[list[int], int]:
    """RoPE positions and first row where tokens saved at RoPE `positions` may return.

    Raises UsageError if they cannot be there.
    """
    end, count = session.cache.length, len(positions)
    if session.packed_frequencies is not None:
        if at not in (None, end):
            raise UsageError("where positions are the cache's, blocks come back at its end")
        return list(range(end, end + count)), end
    targets = positions if at is None else list(range(at, at + count))
    if targets != positions and session.frequencies is None:
        raise UsageError("this model's RoPE changes with the length: its keys cannot be moved")
    taken = [session.rope[label] for label in _labels(session.cache).tolist()]
    row = bisect_left(taken, targets[0])
    if targets[0] < 0 or (row < end and taken[row] <= targets[-1]):
        raise UsageError(f"RoPE positions {targets[0]} to {targets[-1]} are taken")
    return targets, row


def span_attention(
    session: EmbeddedSession, spans: Sequence[SpanRange], layers: Sequence[int], decay: float
) -> list[float]:
    cache = session.cache
    count = cache.shape.layers
    for layer in layers:
        if not -count <= layer < count:
            raise UsageError(f"layer {layer}: the model has {count}")
    labels = _labels(cache)
    queries = session.queries.layer_queries(count)
    seen = queries[0].positions
    if not len(seen) or not len(labels):
        return [0.0] * len(spans)
    hidden = labels[None] > seen[:, None]
    ages = torch.arange(len(seen) - 1, -1, -1, device=seen.device)
    weights = torch.pow(torch.tensor(decay, device=seen.device), ages)
    chosen = layers or range(count)
    mass = torch.stack(
        [_mass(queries[n].vectors, cache.keys[n, :, : cache.length], hidden) for n in chosen]
    ).mean(0)
    each = weights @ mass / weights.sum()
    return [float(each[_marked(cache, [span])].sum()) for span in spans]


def _mass(queries: Tensor, keys: Tensor, hidden: Tensor) -> Tensor:
    """Return probabilities [n, tokens], mean over the query heads of vectors [heads, n, d]."""
    repeated = keys.repeat_interleave(queries.shape[0] // keys.shape[0], 0).float()
    logits = queries.float() @ repeated.transpose(1, 2) * queries.shape[-1] ** -0.5
    # A query whose every key has left sees nothing, not NaN.
    mass: Tensor = logits.masked_fill(hidden, float("-inf")).softmax(-1).nan_to_num(0.0).mean(0)
    return mass


def _check_whole_tokens(session: EmbeddedSession) -> None:
    if session.method.compresses:
        raise UsageError(
            f"method {session.method.label!r} keeps other tokens in every head; "
            "spans can be evicted or saved under methods that keep whole tokens only"
        )


def _labels(cache: SessionCache) -> Tensor:
    """Return the logical position of every row [length]; equal for all layers and heads."""
    return cache.positions[0, 0, : cache.length]


def _marked(cache: SessionCache, spans: Sequence[SpanRange]) -> Tensor:
    """Return which rows lie in any of the spans [length], bool."""
    labels = _labels(cache)
    inside = torch.zeros_like(labels, dtype=torch.bool)
    for start, end in spans:
        inside |= (labels >= start) & (labels < end)
    return inside


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
