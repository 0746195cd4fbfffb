"""A generation ends where it should, and the session continues exactly from there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from agentbench_kv.conformance.engines.comparing import (
    accounting_problem,
    error_problem,
    reason_problem,
    token_problem,
)
from agentbench_kv.conformance.engines.driver import Driver, stop_matcher
from agentbench_kv.conformance.engines.exactness import check_reference
from agentbench_kv.conformance.engines.plans import prompt
from agentbench_kv.conformance.engines.traces import EngineTrace, Step
from agentbench_kv.conformance.result import CheckResult
from agentbench_kv.conformance.tracing import Trace, feed
from agentbench_kv.engines.base import FinishReason
from agentbench_kv.errors import ContextLimitError
from agentbench_kv.phases import TokenCodec, TokenPhases

_NEXT_STEP = Step(prompt(40, 7), 45)
_EARLIEST = 3
"""Stops are looked for after this many tokens, so that ending at once is not right."""


class _Stop(NamedTuple):
    """A way to end a generation: what is asked, how many tokens it must give, and why it ends."""

    name: str
    step: Step
    tokens: int
    reason: FinishReason


def check_stops(
    driver: Driver, reference: Driver, network: Any, codec: TokenCodec
) -> list[CheckResult]:
    """Check stop ids, stop texts, functions and lengths against the embedded engine."""
    stops = _find_stops(reference, codec)
    steps = {stop.name: [stop.step, _NEXT_STEP] for stop in stops}
    expected, found = reference.play(steps), driver.play(steps)
    exact = check_reference(network, found, driver.method.positions)
    return [
        *(_check_stop(stop, expected[stop.name], found[stop.name]) for stop in stops),
        replace(exact, name="goes on exactly behind every ending"),
    ]


def _check_stop(stop: _Stop, expected: EngineTrace, found: EngineTrace) -> CheckResult:
    name = f"{stop.name} ends at its token"
    if found.error is not None:
        return CheckResult(name, False, error_problem(found))
    tokens, reason = len(found.turns[0]), found.reasons[0]
    if (tokens, reason) != (stop.tokens, stop.reason):
        problem = f"{tokens} tokens and {reason}, expected {stop.tokens} and {stop.reason}"
    elif stop.step.own_stop and found.stats.recomputed:
        # The engine had run ahead of the function, so it had to start over: the reference decides
        # what comes after.
        same = expected.turns[0] == found.turns[0]
        problem = "" if same else "other tokens before the stop"
    else:
        problem = token_problem(expected, found) or reason_problem(expected, found)
        if not stop.step.own_stop:
            problem = problem or accounting_problem(expected, found)
    return CheckResult(name, not problem, problem or f"after {tokens} tokens")


def _find_stops(reference: Driver, codec: TokenCodec) -> list[_Stop]:
    """Find stops in what the model says freely."""
    for seed in range(50):
        opening = Step(prompt(120, 500 + seed), 60)
        free = reference.play({"free": [opening]})["free"].turns[0]
        text, at_text = _stop_text(codec, free)
        fresh = [i for i in range(_EARLIEST, len(free)) if free[i] not in free[:i]]
        if text and fresh:
            stop_id = replace(opening, stop_ids=frozenset({free[fresh[0]]}))
            with_text = replace(opening, stop_text=text)
            stop, length = FinishReason.STOP, FinishReason.LENGTH
            return [
                _Stop("a stop id", stop_id, fresh[0] + 1, stop),
                _Stop("a stop text", with_text, at_text, stop),
                _Stop("a stop function", replace(with_text, own_stop=True), at_text, stop),
                _Stop("max_tokens", replace(opening, max_tokens=7), 7, length),
                _Stop("a single token", replace(opening, max_tokens=1), 1, length),
            ]
    raise RuntimeError("the tiny model says nothing a stop text could match; change its seed")


def _stop_text(codec: TokenCodec, tokens: Sequence[int]) -> tuple[str, int]:
    """Return a text that ends late in `tokens`, and how many tokens there are up to its end."""
    for first in range(_EARLIEST, len(tokens) - 2):
        for width in (2, 1):
            text = codec.decode(tokens[first : first + width])
            if not text.isascii() or not text.isprintable() or len(text) > 24 or "<|" in text:
                continue
            matcher = stop_matcher(codec, text)
            end = next((i + 1 for i, token in enumerate(tokens) if matcher(token)), 0)
            if end == first + width:
                return text, end
    return "", 0


def check_cancel(driver: Driver, reference: Driver, network: Any) -> list[CheckResult]:
    """Check that a cancelled generation leaves a session whose log is exact."""
    opening = Step(prompt(300, 8), 400)
    free = reference.play({"free": [replace(opening, max_tokens=60)]})["free"].turns[0]
    steps = {
        f"after {n} tokens": [
            replace(opening, cancel_after=n),
            replace(_NEXT_STEP, cancel_after=5),
            _NEXT_STEP,
        ]
        for n in (0, 1, 6, 40)
    }
    found = driver.play(steps)
    problems = (
        f"{name}: {text}" for name, t in found.items() if (text := _cancel_problem(free, t))
    )
    problem = next(problems, "")
    exact = check_reference(network, found, driver.method.positions)
    return [
        CheckResult("cancel ends a generation", not problem, problem or f"{len(found)} sessions"),
        replace(exact, name="goes on exactly after a cancel"),
    ]


def _cancel_problem(free: list[int], trace: EngineTrace) -> str:
    if trace.error is not None:
        return error_problem(trace)
    first = trace.turns[0]
    if trace.reasons[0] is not FinishReason.CANCELLED:
        return f"ended by {trace.reasons[0]} after {len(first)} tokens"
    if first[: len(free)] != free[: len(first)]:
        return "other tokens than without the cancel"
    if trace.stats.logical != len(trace.tokens):
        return f"{trace.stats.logical} tokens in the accounting, {len(trace.tokens)} in the log"
    return ""


def check_context_limit(driver: Driver, reference: Driver) -> list[CheckResult]:
    """Check that a session ends at the model's last position and is not let past it."""
    limit = driver.engine.info.context_limit
    refusal = _refusal_problem(driver, limit)
    steps = {"full": [Step(prompt(limit - 30, 9), 10), Step(prompt(10, 10), 400)]}
    expected, found = reference.play(steps)["full"], driver.play(steps)["full"]
    problem = error_problem(found) or token_problem(expected, found)
    problem = problem or reason_problem(expected, found)
    if not problem and len(found.tokens) != limit:
        problem = f"ended after {len(found.tokens)} tokens of {limit}"
    return [
        CheckResult("too long a prompt is refused", not refusal, refusal),
        CheckResult("ends at the last position", not problem, problem or f"{limit} tokens"),
    ]


def _refusal_problem(driver: Driver, limit: int) -> str:
    driver.engine.open("too-long", TokenPhases())
    try:
        feed(driver.engine, "too-long", prompt(limit, 11), Trace())
    except ContextLimitError:
        return ""
    finally:
        driver.engine.close("too-long")
    return f"{limit} tokens are taken, of which the model can read {limit - 1} and write none"
