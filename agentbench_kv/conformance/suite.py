"""The whole method conformance suite: selection, masked-cache equality, replay, sessions.

What `kvbench selftest method` runs; a plug-in's own tests call it the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from agentbench_kv.conformance.masked_cache import check_masked_cache
from agentbench_kv.conformance.masked_reference import tiny_model
from agentbench_kv.conformance.methods import build_method, check_method
from agentbench_kv.conformance.replay import check_replay
from agentbench_kv.conformance.result import CheckResult
from agentbench_kv.conformance.sessions import check_sessions
from agentbench_kv.conformance.spans import check_spans
from agentbench_kv.conformance.tracing import drive, short_turns
from agentbench_kv.methods.base import Method
from agentbench_kv.methods.blocks import SpanMethod

__all__ = ["method_suite", "passed"]

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
        return {"spans": _guarded(partial(check_spans, small))}
    parts: dict[str, Callable[[], list[CheckResult]]] = {"selection": partial(check_method, small)}
    if not small.offline:
        large = _with_room(small) if budget is None else small
        parts["masked cache, qwen3"] = partial(check_masked_cache, large, _model("qwen3", 2))
        parts["masked cache, llama"] = partial(check_masked_cache, large, _model("llama", 1))
        parts["replay"] = partial(_replay, large, _model("qwen3", 2))
        parts["sessions"] = partial(check_sessions, large)
    return {part: _guarded(check) for part, check in parts.items()}


def passed(results: dict[str, list[CheckResult]]) -> bool:
    """Return whether every result of a suite is good."""
    return all(result.ok for part in results.values() for result in part)


def _model(family: str, kv_heads: int) -> Any:
    return tiny_model(family, q_heads=4, kv_heads=kv_heads, layers=2)


def _with_room(method: Method) -> Method:
    """Return a method with a budget that the prompts of short sessions do not fill."""
    if not method.compresses or method.budget is None:
        return method
    return replace(method, budget=max(method.budget, ENGINE_BUDGET))


def _replay(method: Method, model: Any) -> list[CheckResult]:
    often = replace(method, interval=16)
    trace = drive(model, often, {"only": short_turns(int(model.config.vocab_size))})["only"]
    return [check_replay("only", model, often, trace)]


def _guarded(check: Callable[[], list[CheckResult]]) -> list[CheckResult]:
    try:
        return check()
    except Exception as error:  # noqa: BLE001  a plug-in may raise anything
        return [CheckResult("runs to the end", False, f"{type(error).__name__}: {error}")]
