"""Float64 numpy formulations of what `analysis` computes, written from the definitions.

Everything here is by brute force over whole matrices: no blocks, no running sums.
"""

from __future__ import annotations

import numpy as np


def softmax(logits):
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def attention(q, k, query_positions, key_positions):
    """Causal probabilities [q_heads, n, tokens] of one layer; a key may be hidden per KV head."""
    q, k = q.astype(np.float64), k.astype(np.float64)
    group = q.shape[0] // k.shape[0]
    out = []
    for head, queries in enumerate(q):
        logits = queries @ k[head // group].T / np.sqrt(q.shape[-1])
        places = np.broadcast_to(key_positions, k.shape[:2])[head // group]
        hidden = places[None, :] > query_positions[:, None]
        out.append(softmax(np.where(hidden, -np.inf, logits)))
    return np.array(out)


def group_mean(per_query_head, kv_heads):
    """[q_heads, ...] -> [kv_heads, ...]."""
    return per_query_head.reshape(kv_heads, -1, *per_query_head.shape[1:]).mean(1)


def past_sums(q, k, positions, now):
    """Attention [kv_heads, tokens before now] got from every query before `now`."""
    past = positions < now
    probs = attention(q[:, past], k[:, past], positions[past], positions[past])
    return group_mean(probs.sum(1), k.shape[0])


def utility(q, k, positions, now):
    """Future attention U [kv_heads, tokens before now] in the full trajectory."""
    probs = attention(q, k, positions, positions)
    future = positions >= now
    return group_mean(probs[:, future].sum(1), k.shape[0])[:, positions < now]


def ring_rows(phases, now, size):
    """Rows of the last `size` tokens of each phase among the first `now`, ascending."""
    rows = [np.flatnonzero(phases[:now] == phase)[-size:] for phase in range(4)]
    return np.sort(np.concatenate(rows))


def top(scores, budget):
    """Rows of the highest scores, ties to the lower row, ascending."""
    return np.sort(np.lexsort((np.arange(len(scores)), -scores))[:budget])


def mean_attention(queries, keys):
    """AgentKV's score [tokens] of one KV head: queries [group, n, d], no mask."""
    logits = queries.astype(np.float64) @ keys.astype(np.float64).T / np.sqrt(keys.shape[-1])
    return softmax(logits).mean(1).mean(0)


def snapkv_rkv(queries, keys, window, kernel=7):
    """SnapKV's score [tokens] as R-KV's authors compute it; the window itself scores 0."""
    past = keys[: len(keys) - window].astype(np.float64)
    logits = (queries.astype(np.float64) @ past.T / np.sqrt(keys.shape[-1])).max(0)
    mass = softmax(logits).mean(0)
    half = kernel // 2
    pooled = [mass[max(0, i - half) : i + half + 1].max() for i in range(len(mass))]
    return np.r_[pooled, np.zeros(window)]


def method_scores(name, phases, size):
    """A function (queries [G, t, d], keys [t, d]) -> (scores [t], always kept [t]) of a method.

    Queries and keys are those of the first t tokens of a session; `size` is queries per phase for
    `agentkv`, the window for `snapkv`, first tokens for `streamingllm`.
    """

    def agentkv(queries, keys, rows):
        now = queries.shape[1]
        scores = mean_attention(queries[:, ring_rows(phases, now, size)], keys)
        return scores, np.zeros(len(rows), bool)

    def snapkv(queries, keys, rows):
        now = queries.shape[1]
        return snapkv_rkv(queries[:, now - size :], keys, size), rows >= now - size

    def streamingllm(_queries, _keys, rows):
        return rows.astype(float), rows < size

    return {"agentkv": agentkv, "snapkv": snapkv, "streamingllm": streamingllm}[name]


def replayed(score, q, k, points, budget):
    """Kept rows [kv_heads][budget] after each event, each event on what the last one left.

    q [q_heads, T, d], k [kv_heads, T, d] of one layer; rows are positions.
    """
    group = q.shape[0] // k.shape[0]
    history = []
    for head in range(k.shape[0]):
        queries, live, start, events = q[head * group : (head + 1) * group], [], 0, []
        for now in points:
            live = np.array([*live, *range(start, now)], dtype=int)
            start = now
            scores, always = score(queries[:, :now], k[head, live], live)
            live = live[top(np.where(always, np.inf, scores), budget)]
            events.append(live.tolist())
        history.append(events)
    return [[events[i] for events in history] for i in range(len(points))]


def replayed_h2o(q, k, points, budget):
    """As `replayed` for H2O: one query after the other, over the rows that are live for it."""
    group = q.shape[0] // k.shape[0]
    history = []
    for head in range(k.shape[0]):
        queries, sums, events = q[head * group : (head + 1) * group], {}, []
        for now in range(points[-1] + 1):
            if now in points:
                recent = [row for row in sums if row >= now - budget // 2]
                others = sorted(set(sums) - set(recent), key=lambda row: (-sums[row], row))
                kept = sorted(recent + others[: budget - len(recent)])
                sums = {row: sums[row] for row in kept}
                events.append(kept)
            sums[now] = 0.0
            live = np.array(sorted(sums))
            probs = attention(queries[:, [now]], k[[head]][:, live], np.array([now]), live)
            for row, mass in zip(live, probs.mean(0)[0], strict=True):
                sums[row] += mass
        history.append(events)
    return [[events[i] for events in history] for i in range(len(points))]


def basis(rows, k):
    """Leading right singular vectors [d, k] of centred rows."""
    rows = rows.astype(np.float64)
    _, _, directions = np.linalg.svd(rows - rows.mean(0), full_matrices=False)
    return directions[:k].T


def runs(phases):
    """(phase, start, end) of maximal runs."""
    found, start = [], 0
    for i in range(1, len(phases) + 1):
        if i == len(phases) or phases[i] != phases[start]:
            found.append((int(phases[start]), start, i))
            start = i
    return found
