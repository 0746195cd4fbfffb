"""Sessions like those of coding agents, from published statistics of 610 of them.

The source is "Serving Agentic Workloads at Scale with vLLM x Mooncake" (vLLM's blog, 6 May 2026) on
traces of Codex with GPT-5.4 on SWE-bench Pro, and the card of the data set they were published as
(`Inferact/codex_swebenchpro_traces`). Each constant says whether it is published, fitted to what is
published, or assumed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from agentbench_kv.serving_bench.jobs import TraceCall, TraceSession

PUBLISHED = {
    "calls, median": 30,
    "calls, 90 %": 57,
    "first prompt, median": 12_278,
    "last prompt, median": 80_000,
    "growth of the context a call, mean": 2_242,
    "prompt : output": 131,
    "prefix hits": 0.942,
    "gap, median, s": 5.2,
    "gap, 99 %, s": 81.4,
}
# Lognormal through the two published quantiles; its mean is 34 (published: 33).
_CALLS = (math.log(30), math.log(57 / 30) / 1.2816)
_MOST_CALLS = 200  # published: the longest trace
_FIRST = (math.log(12_278), 0.1)  # the median is published, how far they spread is assumed
_GAP = (math.log(5.2), math.log(81.4 / 5.2) / 2.3263)  # through the two published quantiles
# What all sessions begin with. Fitted: a cache that holds nothing else had 1.7 % hits (published).
_SHARED = 1024
# Means of an answer and of what comes after it. Fitted: together the published growth, and 131:1.
_OUTPUT, _NEW = 450, 1792
_SPREAD = 1.0  # sigma of both, lognormal: assumed; published: some hundreds to some thousands
# Fitted: with so many later calls that find none of their history in a cache, hits are 94.2 %.
# Assumed: that what was lost was lost whole, and at random.
_LOST = 0.025


def agent_sessions(count: int, seed: int = 0) -> list[TraceSession]:
    """Return sessions; the same seed gives the same, and more of them go on with the same."""
    return [_session(number, np.random.default_rng([seed, number])) for number in range(count)]


def _session(number: int, draw: np.random.Generator) -> TraceSession:
    size = min(max(round(float(draw.lognormal(*_CALLS))), 1), _MOST_CALLS)
    first = max(round(float(draw.lognormal(*_FIRST))), _SHARED + 1)
    outputs, new = _lengths(draw, _OUTPUT), _lengths(draw, _NEW)
    calls = [TraceCall(first, next(outputs))]
    for _ in range(size - 1):
        gap = round(float(draw.lognormal(*_GAP)), 3)
        lost = bool(draw.random() < _LOST)
        calls.append(TraceCall(next(new), next(outputs), gap, fresh=lost))
    return TraceSession(f"agent {number}", calls, shared=[("system and tools", _SHARED)])


def _lengths(draw: np.random.Generator, mean: float) -> Iterator[int]:
    location = math.log(mean) - _SPREAD**2 / 2
    while True:
        yield max(round(float(draw.lognormal(location, _SPREAD))), 1)
