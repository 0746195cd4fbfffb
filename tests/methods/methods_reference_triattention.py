"""TriAttention, from methods.md and the facts about the authors' three implementations.

`k` below is the key that was cached: rotated to its position and carrying RoPE's attention factor
a. The authors undo both and multiply by a²; one factor a of that is in the key already.
"""

from __future__ import annotations

import numpy as np
from methods_reference_math import pairs


def raw_scores(settings, statistics, keys, now):
    """One query head: statistics (mean [d/2], size [d/2], frequencies [d/2], a), keys [T, d]."""
    mean, size, frequencies, factor = statistics
    offsets = [2**i for i in range(64) if 2**i <= settings["offset_max"]]
    scores = []
    for key in pairs(keys):
        trig = [trigonometric(mean, frequencies, key, now + o) for o in offsets]
        merged = max(trig) if settings["offset_merge"] == "max" else sum(trig) / len(trig)
        score = merged if settings["trig_term"] == "on" else 0.0
        scores.append(factor * (score + norm_part(settings["norm_term"], mean, size, key)))
    return np.array(scores)


def trigonometric(mean, frequencies, key, time):
    """Σ_f Re(μ_f e^{i w_f t} conj(k_f))."""
    return sum(
        float((m * np.exp(1j * w * time) * np.conj(k)).real)
        for m, w, k in zip(mean, frequencies, key, strict=True)
    )


def norm_part(term, mean, size, key):
    """Σ_f (v_f - |μ_f|)·|k_f|; `mean` leaves |μ| out, `off` all of it."""
    if term == "off":
        return 0.0
    return sum(
        float((v if term == "mean" else v - abs(m)) * abs(k))
        for m, v, k in zip(mean, size, key, strict=True)
    )


def z_generated(row, counted):
    """Mean and population deviation over the counted tokens, deviation at least 1e-6."""
    if not counted.any():
        return row / 1e-6
    return (row - row[counted].mean()) / max(row[counted].std(), 1e-6)


def z_sample(row):
    """Mean and sample deviation over all tokens; a deviation below 1e-8 counts 1."""
    deviation = row.std(ddof=1)
    return (row - row.mean()) / (deviation if deviation >= 1e-8 else 1.0)


def head_scores(settings, statistics, keys, positions, prompt, now):
    """One KV head: statistics of each query head of its group."""
    raw = np.array([raw_scores(settings, each, keys, now) for each in statistics])
    how = settings["normalise"]
    if how == "kv_head":
        return z_sample(raw.max(0))
    if how == "query_head":
        return np.array([z_sample(row) for row in raw]).max(0)
    if how == "generated":
        return np.array([z_generated(row, positions >= prompt) for row in raw]).max(0)
    return raw.max(0)
