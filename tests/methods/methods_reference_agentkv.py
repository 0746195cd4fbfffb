"""AgentKV and its samplers, from methods.md and the paper's appendix C.3.

What the paper leaves open: slots that do not divide 3:2:1 are rounded down, one more each to the
nearest windows first; evenly spaced are the middles of equal stretches of what a window has left;
slots without a query left in their window go to the newest; a group's query heads choose together,
by their mean vector; without a cached key of the phase `weighted` takes the last queries.
"""

from __future__ import annotations

import numpy as np
from methods_reference_math import logits_of, pool, softmax

PHASES = ("think", "act", "tool", "others")


def scores(settings, queries, keys, key_phases):
    """Mean attention from the representatives of all phases; one KV head.

    queries: (vectors [G, n, d], phases [n]) oldest first; keys [T, d]; key_phases [T].
    """
    vectors, phases = queries
    each = settings["representatives"] // 4
    chosen = []
    if settings["sampler"] in ("recent", "own"):
        # Of the last queries all, or those of the newest one's phase.
        chosen = [vectors if settings["sampler"] == "recent" else vectors[:, phases == phases[-1]]]
    for phase, name in enumerate(PHASES):
        if name == settings["drop_phase"] or settings["sampler"] in ("recent", "own"):
            continue
        own = vectors[:, phases == phase]
        picks = pick(settings["sampler"], own, keys[key_phases == phase], each)
        chosen.append(own[:, picks])
    plain = attention(settings, np.concatenate(chosen, 1), keys)
    # Keys come by ascending position here.
    return pool(plain, settings.get("pool", "none"), settings.get("kernel", 7))


def attention(settings, vectors, keys):
    """Mean attention from queries [G, n, d]."""
    logits = logits_of(vectors, keys)
    if logits.shape[1] == 0:
        return np.zeros(len(keys))
    if settings["gqa"] == "max_logit":
        return softmax(logits.max(0)).mean(0)
    heads = softmax(logits).mean(1)
    return heads.max(0) if settings["gqa"] == "max_prob" else heads.mean(0)


def pick(sampler, queries, keys, count):
    """Indices of the representatives of one phase. queries [G, n, d] oldest first, keys [m, d]."""
    n = queries.shape[1]
    if n <= count:
        return list(range(n))
    if sampler == "last" or (sampler == "weighted" and len(keys) == 0):
        return list(range(n - count, n))
    if sampler == "multiscale":
        return sorted(multiscale(n, count))
    mean = queries.mean(0)
    chosen = weighted(mean, keys, count) if sampler == "weighted" else diverse(mean, count)
    return sorted(chosen)


def multiscale(n, count):
    """Slots 3:2:1 over the last 4, 32 and 128."""
    quotas = [count // 2, count // 3, count // 6]
    for i in range(count - sum(quotas)):
        quotas[i] += 1
    chosen = []
    for window, quota in zip((4, 32, 128), quotas, strict=True):
        free = [i for i in range(max(0, n - window), n) if i not in chosen]
        slots = min(quota, len(free))
        chosen += [free[(2 * slot + 1) * len(free) // (2 * slots)] for slot in range(slots)]
    for i in range(n - 1, -1, -1):
        if len(chosen) < count and i not in chosen:
            chosen.append(i)
    return chosen


def weighted(queries, keys, count):
    """Greedy: most of Σ_i w_i · max_{a chosen} q_a·k_i, w_i from the last 8, over the last 64."""
    weights = [sum(float(q @ k) for q in queries[-8:]) for k in keys]
    chosen = []
    while len(chosen) < count:
        best = None
        for candidate in range(max(0, len(queries) - 64), len(queries)):
            if candidate in chosen:
                continue
            anchors = [*chosen, candidate]
            reached = (queries[anchors] @ keys.T).max(0)
            gain = float(np.dot(weights, reached))
            if best is None or gain > best[0]:
                best = (gain, candidate)
        chosen.append(best[1])
    return chosen


def diverse(queries, count):
    """Farthest point in cosine distance, from the newest query on."""
    units = queries / np.linalg.norm(queries, axis=-1, keepdims=True)
    chosen = [len(queries) - 1]
    while len(chosen) < count:
        rest = [i for i in range(len(queries)) if i not in chosen]
        similarity = [max(float(units[i] @ units[j]) for j in chosen) for i in rest]
        chosen.append(rest[int(np.argmin(similarity))])
    return chosen
