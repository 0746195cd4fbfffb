"""More sessions than the cache holds: they wait, or are computed again and counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import chain
from typing import Any

from agentbench_kv.conformance.engines.comparing import (
    error_problem,
    kept_problem,
    token_problem,
)
from agentbench_kv.conformance.engines.exactness import logit_gap, wrong_tokens
from agentbench_kv.conformance.engines.traces import EngineTrace
from agentbench_kv.conformance.result import CheckResult
from agentbench_kv.errors import CapacityError

__all__ = ["check_crowd"]


def check_crowd(
    network: Any,
    positions: str,
    expected: Mapping[str, EngineTrace],
    found: Mapping[str, EngineTrace],
) -> CheckResult:
    """Check sessions of a small pool against those of a large one.

    Each must give the same tokens; or count what was computed again and give the masked
    reference's tokens; or be refused as too large, with the same tokens until then.

    Parameters
    ----------
    network : transformers causal LM
    positions : str
        The method's.
    expected, found : mapping of session to trace
        In the large and in the small pool.
    """
    name, ends = "a small pool changes no session unseen", Counter[str]()
    for session, trace in found.items():
        end, problem = _judge(network, positions, expected[session], trace)
        if problem:
            return CheckResult(name, False, f"{session}: {problem}")
        ends[end] += 1
    again = sum(trace.stats.recomputed for trace in found.values())
    detail = f"{ends['same']} as in a large pool, {ends['again']} computed again ({again} tokens)"
    finished = ends["same"] + ends["again"]
    return CheckResult(name, finished > 0, f"{detail}, {ends['refused']} refused")


def _judge(
    network: Any, positions: str, expected: EngineTrace, found: EngineTrace
) -> tuple[str, str]:
    """Return how a session went, and what was wrong with it."""
    if isinstance(found.error, CapacityError):
        done = list(chain.from_iterable(found.turns))
        same = list(chain.from_iterable(expected.turns))[: len(done)] == done
        return "refused", "" if same else "other tokens before it was refused"
    if found.error is not None:
        return "", error_problem(found)
    if not found.stats.recomputed:
        problem = token_problem(expected, found) or kept_problem(expected, found)
        return "same", problem and f"{problem}, and nothing was counted as computed again"
    if not found.stats.restarts:
        return "", f"{found.stats.recomputed} tokens computed again, KVStats.restarts has none"
    if found.kept_missing:
        return "", found.kept_missing
    wrong = wrong_tokens(network, found, positions)
    return "again", f"{logit_gap(wrong[0])} after rows were computed again" if wrong else ""
