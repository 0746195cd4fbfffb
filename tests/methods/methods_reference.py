"""Float64 numpy formulation of the methods, written from the specification (methods.md).

Works on positions, never on cache rows. Of a method only its name, budget and parameters are read.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import methods_reference_agentkv as agentkv
import methods_reference_triattention as triattention
import methods_reference_window as window
import numpy as np


@dataclass
class Event:
    """What a method knows when a session is compressed; arrays in any cache order.

    Attributes
    ----------
    layers : list of (keys [H, T, d], positions [H, T], sums [H, T] or None, values [H, T, d])
    queries : list of (vectors [Hq, n, d], positions [n], phases [n]), oldest first
    phases : array [now]
        Of every token seen.
    statistics : (mean [L, Hq, d/2], size [L, Hq, d/2], frequencies [d/2], factor), optional
    covariance : array [L, Hq, d, d], optional
    next_position : int, optional
        RoPE position of the next token, if it is not `now`.
    """

    layers: list
    queries: list
    now: int
    prompt: int = 0
    phases: Any = None
    statistics: Any = None
    covariance: Any = None
    next_position: int | None = None


def select(method, event):
    """Run one event.

    Returns
    -------
    scores : array [layers, kv_heads, T]
        By ascending position, after sharing.
    kept : nested list [layers][kv_heads] of positions
    """
    places = [np.sort(positions, -1) for _, positions, *_ in event.layers]
    scores = np.array(
        [layer_scores(method, event, index) for index in range(len(event.layers))], dtype=float
    )
    keeps = always_kept(method, event.now, event.prompt)
    merged = by_chunk(method, np.broadcast_to(merge(method, scores), scores.shape), places, keeps)
    size = budget(method, event.now)
    kept = [
        [top(where, row, size, keeps) for where, row in zip(*layer, strict=True)]
        for layer in zip(places, merged, strict=True)
    ]
    return merged, kept


def layer_scores(method, event, index):
    """Scores [kv_heads, T] of one layer by ascending position."""
    keys, positions, sums, values = event.layers[index]
    rows = []
    for head in range(keys.shape[0]):
        order = np.argsort(positions[head])
        cached = {
            "keys": keys[head][order].astype(np.float64),
            "positions": positions[head][order],
            "sums": None if sums is None else sums[head][order].astype(np.float64),
            "values": values[head][order].astype(np.float64),
        }
        rows.append(head_scores(method, event, index, head, cached))
    return rows


def head_scores(method, event, index, head, cached):
    """Scores [T] of one KV head."""
    settings, keys, positions = method.settings(), cached["keys"], cached["positions"]
    if method.name == "streamingllm":
        return positions
    if method.name == "oracle":
        return cached["sums"]
    if method.name == "h2o":
        seen = event.now - positions if settings["normalise"] == "seen" else 1
        return cached["sums"] / seen
    if method.name == "triattention":
        time = event.now if event.next_position is None else event.next_position
        own = statistics_of(event, index, head)
        return triattention.head_scores(settings, own, keys, positions, event.prompt, time)
    if method.name == "expected-attention":
        own = statistics_of(event, index, head)
        first = head * len(own)
        spread = event.covariance[index][first : first + len(own)]
        time = event.now if event.next_position is None else event.next_position
        return expected_attention(settings, own, spread, cached, time)
    if method.name == "keydiff":
        lengths = [max(np.sqrt((key**2).sum()), 1e-12) for key in keys]
        mean = sum(key / length for key, length in zip(keys, lengths, strict=True)) / len(keys)
        return [
            -(key @ mean) / (length * max(np.sqrt((mean**2).sum()), 1e-12))
            for key, length in zip(keys, lengths, strict=True)
        ]
    if method.name == "lagkv":
        return lagkv(settings, cached)
    vectors, query_positions, query_phases = event.queries[index]
    group = vectors.shape[0] // event.layers[index][0].shape[0]
    own = vectors[head * group : (head + 1) * group].astype(np.float64)
    if method.name == "tova":
        logits = own[:, -1] @ keys.T / np.sqrt(keys.shape[1])
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        return (weights / weights.sum(-1, keepdims=True)).mean(0)
    if method.name == "agentkv":
        key_phases = np.asarray(event.phases)[positions]
        return agentkv.scores(settings, (own, query_phases), keys, key_phases)
    before = {"snapkv": window.snapkv, "rkv": window.rkv}[method.name]
    past = before(settings, (own, query_positions), keys, positions)
    return np.concatenate([past, np.zeros(settings["window"])])


def expected_attention(settings, own, spread, cached, time):
    """Mean of E[exp(q·k/√d)] over Gaussian query heads; keys turn back instead of queries ahead."""
    rows, sinks = cached["keys"], cached["positions"] < settings["sinks"]
    size = rows.shape[1]
    total = np.zeros(len(rows))
    for (mean, _, frequencies, factor), covariance in zip(own, spread, strict=True):
        turn = np.mean(
            [np.exp(1j * frequencies * (time + ahead)) for ahead in range(settings["ahead"])], 0
        )
        weights = np.zeros(len(rows))
        for number, key in enumerate(rows):
            pairs = (key[: size // 2] + 1j * key[size // 2 :]) * turn.conj() * factor
            back = np.concatenate([pairs.real, pairs.imag])
            logit = back @ np.concatenate([mean.real, mean.imag]) / np.sqrt(size)
            if settings["spread"] == "on":
                logit += back @ covariance @ back / (2 * size)
            weights[number] = -np.inf if sinks[number] else logit
        weights = np.exp(weights - weights.max())
        total += weights / weights.sum() / len(own)
    if settings["values"] == "off":
        return total
    return (total + settings["epsilon"]) * np.sqrt((cached["values"] ** 2).sum(1))


def lagkv(settings, cached):
    """Ranks within stretches, by what stands out against the minimum and maximum of the next."""
    positions, lag = cached["positions"], settings["lag"]
    tokens, first = len(positions), int((positions < settings["sinks"]).sum())
    scores = [1 + i / tokens for i in range(tokens)]
    for start in range(first, tokens - 2 * lag + 1, lag):
        total = np.zeros(lag)
        for rows in (cached["keys"], cached["values"]):
            behind = rows[start + lag : start + 2 * lag]
            width = behind.max(0) - behind.min(0)
            scaled = (rows[start : start + lag] - behind.min(0)) / np.where(width > 0, width, 1)
            spread = scaled.std(1, ddof=1)
            weights = np.exp(spread - spread.max())
            total += weights / weights.sum()
        for i in range(lag):
            before = sum((total[j], j) < (total[i], i) for j in range(lag))
            scores[start + i] = before / lag
    return scores


def by_chunk(method, scores, places, keeps):
    """Scores where every token has the mean of its chunk of logical positions.

    What is kept anyway has no say in it.
    """
    size = method.chunk
    if size == 1:
        return scores
    chunked = np.array(scores)
    for index in np.ndindex(*scores.shape[:2]):
        for start in range(0, int(places[index[0]][index[1]].max()) + 1, size):
            where = places[index[0]][index[1]]
            members = (where >= start) & (where < start + size)
            asked = members & np.array([int(place) not in keeps for place in where], bool)
            if asked.any():
                chunked[index][members] = scores[index][asked].mean()
    return chunked


def statistics_of(event, index, head):
    """Calibration of every query head under one KV head."""
    mean, size, frequencies, factor = event.statistics
    group = mean.shape[1] // event.layers[index][0].shape[0]
    heads = range(head * group, (head + 1) * group)
    return [(mean[index, q], size[index, q], frequencies, factor) for q in heads]


def merge(method, scores):
    """Scores [layers, kv_heads, T] where a kept set is shared."""
    take_max = method.name == "triattention" and method.settings()["aggregate"] == "max"
    if method.kept_set == "per_layer":
        return scores.max(1, keepdims=True) if take_max else scores.mean(1, keepdims=True)
    if method.kept_set == "per_kv_head":
        return scores.max(0, keepdims=True) if take_max else scores.mean(0, keepdims=True)
    if method.kept_set == "shared":
        return scores.max((0, 1)) if take_max else scores.mean(1).sum(0)
    return scores


def budget(method, now):
    """Tokens to keep: a number, or a share of the tokens seen, rounded up."""
    if method.share is None:
        return method.budget
    size = -(-Fraction(str(method.share)) * now // 1)
    return max(1, int(size))


def always_kept(method, now, prompt=0):
    """Positions the specification never evicts; a kept prompt goes before everything else.

    Half of the prompt is the system message, as in the suite's scenes.
    """
    settings, size = method.settings(), budget(method, now)
    recent = max(settings["keep_recent"], settings.get("window", 0), method.name == "tova")
    recent = max(recent, int(settings.get("recent_share", 0) * size))
    first = settings["sinks"]
    if settings.get("keep_prompt") == "on":
        first = min(max(first, prompt), size)
        recent = min(recent, size - first)
    protect = settings.get("protect", "none")
    known = {"none": 0, "prompt": prompt, "system": prompt // 2}
    first = max(first, known[protect] if protect in known else int(protect))
    return {*range(first), *range(now - recent, now)}


def top(positions, scores, size, always):
    """Always-kept positions, then by score, ties to the lower position."""
    ranked = sorted(
        range(len(positions)),
        key=lambda i: (positions[i] not in always, -scores[i], positions[i]),
    )
    return sorted(int(positions[i]) for i in ranked[:size])
