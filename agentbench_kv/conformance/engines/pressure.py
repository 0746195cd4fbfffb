"""More sessions than the cache holds: they wait, or are computed again and counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import chain
from typing import Any

from agentbench_kv.conformance.engines.comparing import error_problem, kept_problem, token_problem
from agentbench_kv.conformance.engines.exactness import describe_choice, wrong_tokens
from agentbench_kv.conformance.engines.traces import EngineTrace
from agentbench_kv.conformance.result import CheckResult
from agentbench_kv.errors import CapacityError


def check_crowd(
    network: Any,
    positions: str,
    expected: Mapping[str, EngineTrace],
    found: Mapping[str, EngineTrace],
) -> CheckResult:
    """Check sessions of a small pool against those of a large one (`expected`).

    Each must give the same tokens; or count what was computed again and give the masked
    reference's tokens; or be refused as too large, with the same tokens until then.
    """
    name, outcomes = "a small pool changes no session unseen", Counter[str]()
    for session, trace in found.items():
        outcome, problem = _judge(network, positions, expected[session], trace)
        if problem:
            return CheckResult(name, False, f"{session}: {problem}")
        outcomes[outcome] += 1
    recomputed = sum(trace.stats.recomputed for trace in found.values())
    same, again, refused = (outcomes[key] for key in ("same", "again", "refused"))
    detail = f"{same} as in a large pool, {again} computed again ({recomputed} tokens)"
    return CheckResult(name, same + again > 0, f"{detail}, {refused} refused")


def _judge(
    network: Any, positions: str, expected: EngineTrace, found: EngineTrace
) -> tuple[str, str]:
    """Return how a session ended, and what was wrong with it."""
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
    return "again", f"{describe_choice(wrong[0])} after rows were computed again" if wrong else ""
