"""Float64 numpy formulation of the methods, written from the specification (methods.md).

Works on positions, never on cache rows: a head's cache is a dict from position to key row.
"""

from __future__ import annotations

import numpy as np


def softmax(logits):
    """Row-wise softmax; -inf columns get zero."""
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def logits_of(queries, keys):
    """[G, n, d] and [T, d] -> [G, n, T]."""
    return queries @ keys.T / np.sqrt(keys.shape[-1])


def agentkv(queries, phases, keys, *, gqa="mean_prob", drop_phase=None):
    """Mean attention of the union of the rings; one group. queries [G, n, d], keys [T, d]."""
    if drop_phase is not None:
        queries = queries[:, phases != drop_phase]
    logits = logits_of(queries, keys)
    if gqa == "max_logit":
        return softmax(logits.max(0)).mean(0)
    heads = softmax(logits).mean(1)
    return heads.max(0) if gqa == "max_prob" else heads.mean(0)


def average_pool(row, kernel):
    """Stride 1, zero padding counted in the mean."""
    padded = np.pad(row, kernel // 2)
    return np.array([padded[i : i + kernel].sum() / kernel for i in range(len(row))])


def maximum_pool(row, kernel):
    """Stride 1, padding never wins."""
    half = kernel // 2
    return np.array([row[max(0, i - half) : i + half + 1].max() for i in range(len(row))])


def snapkv_rkv(queries, keys, *, window=32, kernel=7):
    """Max over the group of raw logits, softmax over the tokens before the window, max pool."""
    past = keys[: len(keys) - window]
    logits = logits_of(queries, past).max(0)
    return maximum_pool(softmax(logits).mean(0), kernel)


def snapkv_kvpress(queries, query_positions, keys, key_positions, *, window=64, kernel=5):
    """Causal softmax over all, window columns dropped, pool per head, mean over the group."""
    logits = logits_of(queries, keys)
    logits = np.where(
        key_positions[None, None, :] > query_positions[None, :, None], -np.inf, logits
    )
    heads = softmax(logits)[:, :, : len(keys) - window].mean(1)
    return np.mean([average_pool(head, kernel) for head in heads], axis=0)


def top(positions, scores, budget, always):
    """Always-kept positions, then by score, ties to the lower position."""
    ranked = sorted(
        range(len(positions)),
        key=lambda i: (positions[i] not in always, -scores[i], positions[i]),
    )
    return sorted(int(positions[i]) for i in ranked[:budget])


def head_scores(method, queries, keys):
    """Scores of one KV head of one layer by the method's settings; `keys` by ascending position.

    Parameters
    ----------
    method : object
        Only its name and settings are read.
    queries : tuple of arrays
        vectors [G, n, d], positions [n], phases [n].
    keys : tuple of arrays
        positions [T] ascending, rows [T, d].
    """
    vectors, query_positions, phases = queries
    positions, rows = keys
    settings = method.settings()
    if method.name == "streamingllm":
        return positions.astype(float)
    if method.name == "agentkv":
        names = ("think", "act", "tool", "others")
        dropped = settings["drop_phase"]
        index = None if dropped == "none" else names.index(dropped)
        return agentkv(vectors, phases, rows, gqa=settings["gqa"], drop_phase=index)
    window, kernel = settings["window"], settings["kernel"]
    if settings["columns"] == "past":
        scores = snapkv_rkv(vectors, rows, window=window, kernel=kernel)
    else:
        scores = snapkv_kvpress(
            vectors, query_positions, rows, positions, window=window, kernel=kernel
        )
    return np.concatenate([scores, np.zeros(window)])


def always_kept(method, now):
    """Positions the specification never evicts."""
    settings = method.settings()
    recent = max(settings["keep_recent"], settings.get("window", 0))
    return {*range(settings["sinks"]), *range(now - recent, now)}


def select(method, layers, queries, now):
    """Run one event. `layers`: per layer (keys [H, T, d], positions [H, T]) in any cache order.

    Returns
    -------
    scores : array [layers, kv_heads, T]
        By ascending position, after sharing.
    kept : nested list [layers][kv_heads] of positions
    """
    places, scores = [], []
    for (keys, positions), (vectors, query_positions, phases) in zip(layers, queries, strict=True):
        group = vectors.shape[0] // keys.shape[0]
        for head in range(keys.shape[0]):
            order = np.argsort(positions[head])
            own = vectors[head * group : (head + 1) * group].astype(np.float64)
            ordered = positions[head][order], keys[head][order].astype(np.float64)
            places.append(ordered[0])
            scores.append(head_scores(method, (own, query_positions, phases), ordered))
    heads = layers[0][0].shape[0]
    merged = np.array(scores).reshape(len(layers), heads, -1)
    if method.kept_set == "per_kv_head":
        merged = np.broadcast_to(merged.mean(0, keepdims=True), merged.shape)
    if method.kept_set == "shared":
        merged = np.broadcast_to(merged.mean(1).sum(0), merged.shape)
    always = always_kept(method, now)
    kept = [
        top(where, row, method.budget, always)
        for where, row in zip(places, merged.reshape(len(places), -1), strict=True)
    ]
    return merged, [kept[i : i + heads] for i in range(0, len(kept), heads)]
