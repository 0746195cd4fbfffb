"""SnapKV and R-KV, from methods.md: scores of the tokens before the observation window."""

from __future__ import annotations

import numpy as np
from methods_reference_math import logits_of, pool, softmax


def snapkv(settings, queries, keys, key_positions):
    """One KV head: queries (vectors [G, W, d], positions [W]), keys [T, d] -> scores [T - W]."""
    vectors, query_positions = queries
    past = len(keys) - settings["window"]
    if settings["columns"] == "past":
        logits = logits_of(vectors, keys[:past])
    else:
        later = key_positions[None, None, :] > query_positions[None, :, None]
        logits = np.where(later, -np.inf, logits_of(vectors, keys))
    if settings["gqa"] == "max_logit":
        logits = logits.max(0, keepdims=True)
    rows = softmax(logits)[:, :, :past]
    merged = rows.sum(1) if settings["aggregate"] == "sum" else rows.mean(1)
    heads = np.array([pool(head, settings["pool"], settings["kernel"]) for head in merged])
    return heads.max(0) if settings["gqa"] == "max_prob" else heads.mean(0)


def rkv(settings, queries, keys, key_positions):
    """λ·I - (1 - λ)·R over the tokens before the window."""
    importance = snapkv(settings, queries, keys, key_positions)
    repeated = redundancy(keys, settings["threshold"])[: len(importance)]
    return settings["lam"] * importance - (1 - settings["lam"]) * repeated


def redundancy(keys, threshold=0.5):
    """softmax_j of the mean over rows i of C_ij, one entry of every row set to 0."""
    tokens = len(keys)
    units = [key / (np.sqrt((key * key).sum()) + 1e-8) for key in keys]
    cosines = np.zeros((tokens, tokens))
    for i in range(tokens):
        for j in range(tokens):
            cosines[i, j] = 0.0 if i == j else units[i] @ units[j]
    for i in range(tokens):
        exempted = 0
        for j in range(tokens):
            if cosines[i, j] > threshold:
                exempted = j
        cosines[i, exempted] = 0.0
    return softmax(np.array([cosines[:, j].sum() / tokens for j in range(tokens)]))
