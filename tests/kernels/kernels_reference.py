"""The operations in float64 numpy, written from their definitions, and how far one may be off."""

from __future__ import annotations

import numpy as np
import torch

MASS_RTOL = 3e-5
"""Of attention masses. Products of halves are exact in float32 and every dtype is summed in
float32, so that fp32, fp16 and bf16 share it: a logit near 10 is off by some 1e-6, and so is its
exponential, relatively; the rest is the order of the sums."""

MASS_ATOL = 1e-9
"""Of attention masses: below e^-20, exponentials may lose digits that no choice depends on."""

ROTATION_RTOL = {torch.float32: 5e-7, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
"""Of a rotated pair's length: one unit in the last place of the dtype, which is one rounding (half
a unit), and as much again where float32 arithmetic moves a value over the middle between two."""

SUM_RTOL = 1e-5
"""Of float32 sums of up to 256 products, relative to the sum of their magnitudes."""

COSINE_ATOL = 2e-6
"""Of means of float32 cosines; thresholds lie at least `COSINE_GAP` from every cosine."""

COSINE_GAP = 5e-6


def doubles(tensor):
    """Return a tensor's values as float64 numpy."""
    return tensor.detach().cpu().double().numpy()


def attention(queries, keys, values, scaling, window=None, sinks=None):
    """Queries [q_heads, n, d] over rows [kv_heads, rows, d], the last n their own."""
    heads, n, _ = queries.shape
    group, rows = heads // keys.shape[0], keys.shape[1]
    logits = np.einsum("hnd,hrd->hnr", queries, keys.repeat(group, 0)) * scaling
    at, own = np.arange(rows), np.arange(rows - n, rows)[:, None]
    seen = (at <= own) & (at > own - (window or rows))
    logits = np.where(seen, logits, -np.inf)
    top = logits.max(-1, keepdims=True)
    beside = 0.0 if sinks is None else np.exp(sinks[:, None, None] - top)
    weights = np.exp(logits - top)
    weights /= weights.sum(-1, keepdims=True) + beside
    return np.einsum("hnr,hrd->nhd", weights, values.repeat(group, 0))


def attention_mass(queries, keys, gqa, query_positions=None, key_positions=None, valid=None):
    """Queries [q_heads, n, d] on keys [kv_heads, tokens, d], all float64."""
    kv_heads, tokens, dim = keys.shape
    if valid is not None:
        queries = queries[:, valid]
        query_positions = None if query_positions is None else query_positions[valid]
    n = queries.shape[1]
    grouped = queries.reshape(kv_heads, len(queries) // kv_heads, n, dim)
    logits = np.einsum("hgnd,htd->hgnt", grouped, keys) / np.sqrt(dim)
    if query_positions is not None and key_positions is not None:
        hidden = key_positions[:, None, :] > query_positions[None, :, None]
        logits = np.where(hidden[:, None], -np.inf, logits)
    if gqa == "max_logit":
        logits = logits.max(1, keepdims=True)
    mass = _softmax(logits).sum(2) / max(n, 1) if tokens else np.zeros((*logits.shape[:2], 0))
    if gqa == "per_head":
        return mass
    return mass.max(1) if gqa == "max_prob" else mass.mean(1)


def _softmax(logits):
    """Along the last axis; 0 everywhere where all is minus infinity."""
    top = logits.max(-1, keepdims=True)
    weights = np.exp(logits - np.where(np.isneginf(top), 0, top))
    total = weights.sum(-1, keepdims=True)
    return weights / np.where(total == 0, 1, total)


def select_top(scores, budget, always=None, positions=None):
    """Sort every row by (always, NaN last, score, position or index)."""
    scores = np.asarray(scores)
    flat = scores.reshape(-1, scores.shape[-1]).astype(np.float64)
    marks = np.zeros(flat.shape, bool) if always is None else np.asarray(always).reshape(flat.shape)
    taken = min(budget, flat.shape[1])
    index = np.broadcast_to(np.arange(flat.shape[1]), flat.shape)
    places = index if positions is None else np.asarray(positions).reshape(flat.shape)
    rows = []
    for row, mark, place in zip(flat, marks, places, strict=True):
        missing = np.isnan(row)
        order = np.lexsort((place, -np.where(missing, 0, row), missing, ~mark))
        rows.append(np.sort(order[:taken]))
    return np.array(rows, dtype=np.int64).reshape(*scores.shape[:-1], taken)


def to_bfloat16(values):
    """Round float64 values to 8 significant bits, halves to even; float64 again."""
    _, exponent = np.frexp(values)
    unit = np.exp2(np.maximum(exponent - 8.0, -133.0))
    rounded = np.round(values / unit) * unit
    largest = float(torch.finfo(torch.bfloat16).max)
    return np.where(np.abs(rounded) > largest, np.copysign(np.inf, values), rounded)


def to_dtype(values, dtype):
    """Cast float64 values that a float32 holds to a narrower dtype; float64 again."""
    if dtype == torch.bfloat16:
        return to_bfloat16(values)
    narrow = np.float16 if dtype == torch.float16 else np.float32
    with np.errstate(over="ignore"):
        return values.astype(narrow).astype(np.float64)


def rope_rotate(keys, shifts, frequencies, interleaved=False):
    """Multiply pairs, as complex numbers, by e^(i * shift * frequency)."""
    pairs = len(frequencies)
    first = slice(0, 2 * pairs, 2) if interleaved else slice(0, pairs)
    second = slice(1, 2 * pairs, 2) if interleaved else slice(pairs, 2 * pairs)
    turned = (keys[..., first] + 1j * keys[..., second]) * np.exp(
        1j * shifts[..., None] * np.asarray(frequencies, np.float64)
    )
    out = keys.copy()
    out[..., first], out[..., second] = turned.real, turned.imag
    return out


def pair_lengths(keys, pairs, interleaved=False):
    """Return, for every channel, the length of the pair it belongs to; its size, if in none."""
    lengths = np.abs(keys)
    first = slice(0, 2 * pairs, 2) if interleaved else slice(0, pairs)
    second = slice(1, 2 * pairs, 2) if interleaved else slice(pairs, 2 * pairs)
    lengths[..., first] = lengths[..., second] = np.hypot(keys[..., first], keys[..., second])
    return lengths


def aabb(keys, block):
    """Minimum and maximum of every channel in each block of keys [kv_heads, tokens, d]."""
    starts = range(0, keys.shape[1], block)
    blocks = [keys[:, start : start + block] for start in starts]
    return (
        np.stack([each.min(1) for each in blocks], 1),
        np.stack([each.max(1) for each in blocks], 1),
    )


def aabb_score(queries, lows, highs):
    """Return the best corner's dot product, and the sum of its terms' magnitudes."""
    group = len(queries) // len(lows)
    lows, highs = np.repeat(lows, group, 0), np.repeat(highs, group, 0)
    best = np.maximum(queries[:, :, None] * lows[:, None], queries[:, :, None] * highs[:, None])
    return best.sum(-1), np.abs(best).sum(-1)


def cosines(keys):
    """Cosines of all pairs of keys [tokens, d], zero on the diagonal."""
    units = keys / (np.linalg.norm(keys, axis=-1, keepdims=True) + 1e-8)
    every = units @ units.T
    np.fill_diagonal(every, 0)
    return every


def similarity_column_mean(keys, threshold):
    """Mean of every column of the cosines, after one column of every row was set to 0."""
    means = []
    for head in keys:
        every = cosines(head)
        for row in every:
            above = np.flatnonzero(row > threshold)
            row[above[-1] if len(above) else 0] = 0
        means.append(every.mean(0))
    return np.stack(means)


def clear_threshold(keys, share):
    """Return a threshold above about `share` of the cosines that lies far from all of them."""
    every = np.sort(np.unique(np.concatenate([cosines(head).ravel() for head in keys])))
    place = int(share * (len(every) - 2))
    near = slice(max(0, place - 200), place + 200)
    gaps = np.diff(every)[near]
    widest = int(gaps.argmax())
    assert gaps[widest] > 2 * COSINE_GAP
    return float(every[near][widest] + gaps[widest] / 2)
