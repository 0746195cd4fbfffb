"""Small numpy pieces the formulations share, all in float64."""

from __future__ import annotations

import numpy as np


def softmax(logits):
    """Along the last axis; -inf entries get zero."""
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def logits_of(queries, keys):
    """[G, n, d] and [T, d] -> [G, n, T]."""
    return queries @ keys.T / np.sqrt(keys.shape[-1])


def average_pool(row, kernel):
    """Stride 1, zero padding counted in the mean."""
    padded = np.pad(row, kernel // 2)
    return np.array([padded[i : i + kernel].sum() / kernel for i in range(len(row))])


def maximum_pool(row, kernel):
    """Stride 1, padding never wins."""
    half = kernel // 2
    return np.array([row[max(0, i - half) : i + half + 1].max() for i in range(len(row))])


def pool(row, how, kernel):
    """Pool by name; `none` leaves the row alone."""
    if how == "none":
        return row
    return maximum_pool(row, kernel) if how == "max" else average_pool(row, kernel)


def pairs(vectors):
    """RoPE pairs as complex numbers: z[f] = x[f] + i·x[f + d/2]."""
    half = vectors.shape[-1] // 2
    return vectors[..., :half] + 1j * vectors[..., half:]


def turned(vectors, angles):
    """Rotate every pair by its angle; angles [..., d/2]."""
    spun = pairs(vectors) * np.exp(1j * angles)
    return np.concatenate([spun.real, spun.imag], -1)
