"""The whole method conformance suite: selection, masked-cache equality, replay, sessions.

What `kvbench selftest method` runs; a plug-in's own tests call it the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from agentbench_kv.conformance import CheckResult, guarded
from agentbench_kv.conformance.masked import check_masked_cache
from agentbench_kv.conformance.methods import build_method, check_method
from agentbench_kv.conformance.reference import drive, short_turns, tiny_model
from agentbench_kv.conformance.replay import check_replay, check_sessions
from agentbench_kv.conformance.spans import check_spans
from agentbench_kv.methods.base import Method
from agentbench_kv.methods.spans import SpanMethod

ENGINE_BUDGET = 160
"""Tokens kept where an engine runs: above the prompts of short sessions, below their lengths."""


def method_suite(
    method: str | type[Method] | Method, budget: int | None = None
) -> dict[str, list[CheckResult]]:
    """Run every check there is on one method, on random caches and on tiny random models.

    Parameters
    ----------
    method : str, class or Method
        `name` or `name@preset` of a registered method, a class, or a method already built.
    budget : int, optional
        Tokens to keep; chosen for each part if not given.

    Returns
    -------
    dict
        Part -> its results. A part that raises is one failed result.
    """
    small = build_method(method, budget)
    if isinstance(small, SpanMethod):
        return {"spans": guarded(partial(check_spans, small))}
    parts: dict[str, Callable[[], list[CheckResult]]] = {"selection": partial(check_method, small)}
    if not small.offline:
        large = small
        if budget is None and small.compresses and small.budget is not None:
            large = replace(small, budget=max(small.budget, ENGINE_BUDGET))
        qwen3, llama = (
            tiny_model(f, kv_heads=n, layers=2) for f, n in (("qwen3", 2), ("llama", 1))
        )
        parts["masked cache, qwen3"] = partial(check_masked_cache, large, qwen3)
        parts["masked cache, llama"] = partial(check_masked_cache, large, llama)
        parts["replay"] = partial(_replay, large, qwen3)
        parts["sessions"] = partial(check_sessions, large)
    return {part: guarded(check) for part, check in parts.items()}


def passed(results: dict[str, list[CheckResult]]) -> bool:
    """Return whether every result of a suite is good."""
    return all(result.ok for part in results.values() for result in part)


def _replay(method: Method, model: Any) -> list[CheckResult]:
    often = replace(method, interval=16)
    trace = drive(model, often, {"only": short_turns(int(model.config.vocab_size))})["only"]
    return [check_replay("only", model, often, trace)]
