"""A generation ends where it should, and the session goes on exactly from there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentbench_kv.conformance.engines.comparing import (
    accounting_problem,
    error_problem,
    reason_problem,
    token_problem,
)
from agentbench_kv.conformance.engines.driver import Rig, stop_matcher
from agentbench_kv.conformance.engines.exactness import check_reference
from agentbench_kv.conformance.engines.plans import prompt
from agentbench_kv.conformance.engines.traces import EngineTrace, Step
from agentbench_kv.conformance.result import CheckResult
from agentbench_kv.engines.base import FinishReason
from agentbench_kv.errors import ContextLimitError
from agentbench_kv.phases import TokenCodec, TokenPhases

__all__ = ["check_cancel", "check_context_limit", "check_endings"]

_OPENING = 120
_ON = Step(prompt(40, 7), 45)
_EARLIEST = 3
"""A stop is looked for behind so many tokens, so that ending at once is not right."""


@dataclass(frozen=True)
class _Ending:
    """A way to end a generation: what is asked, how many tokens it must give, and why it ends."""

    name: str
    step: Step
    tokens: int
    reason: FinishReason


def check_endings(rig: Rig, reference: Rig, network: Any, codec: TokenCodec) -> list[CheckResult]:
    """Check stop ids, stop texts, functions and lengths against the embedded engine."""
    endings = _endings(reference, codec)
    steps = {ending.name: [ending.step, _ON] for ending in endings}
    expected, found = reference.play(steps), rig.play(steps)
    positions = rig.method.positions
    exact = check_reference(network, found, positions)
    return [
        *(_check_ending(each, expected[each.name], found[each.name]) for each in endings),
        replace(exact, name="goes on exactly behind every ending"),
    ]


def _check_ending(ending: _Ending, expected: EngineTrace, found: EngineTrace) -> CheckResult:
    name = f"{ending.name} ends at its token"
    if found.error is not None:
        return CheckResult(name, False, error_problem(found))
    got, why = len(found.turns[0]), found.reasons[0]
    text = _outcome_problem(ending.step, expected, found)
    if (got, why) != (ending.tokens, ending.reason):
        text = f"{got} tokens and {why}, expected {ending.tokens} and {ending.reason}"
    return CheckResult(name, not text, text or f"after {got} tokens")


def _outcome_problem(step: Step, expected: EngineTrace, found: EngineTrace) -> str:
    if step.own_stop and found.stats.recomputed:
        # The engine had run ahead of the function, so it had to start over: the reference decides
        # what comes after.
        first = expected.turns[0] == found.turns[0]
        return "" if first else "other tokens before the stop"
    problem = token_problem(expected, found) or reason_problem(expected, found)
    return problem or (accounting_problem(expected, found) if not step.own_stop else "")


def _endings(reference: Rig, codec: TokenCodec) -> list[_Ending]:
    """Find endings in what the model says freely."""
    for seed in range(50):
        opening = Step(prompt(_OPENING, 500 + seed), 60)
        free = reference.play({"free": [opening]})["free"].turns[0]
        text, at_text = _stop_text(codec, free)
        fresh = [i for i in range(_EARLIEST, len(free)) if free[i] not in free[:i]]
        if text and fresh:
            stop_id = frozenset({free[fresh[0]]})
            with_text = replace(opening, stop_text=text)
            stop = FinishReason.STOP
            return [
                _Ending("a stop id", replace(opening, stop_ids=stop_id), fresh[0] + 1, stop),
                _Ending("a stop text", with_text, at_text, stop),
                _Ending("a stop function", replace(with_text, own_stop=True), at_text, stop),
                _Ending("max_tokens", replace(opening, max_tokens=7), 7, FinishReason.LENGTH),
                _Ending("a single token", replace(opening, max_tokens=1), 1, FinishReason.LENGTH),
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


def check_cancel(rig: Rig, reference: Rig, network: Any) -> list[CheckResult]:
    """Check that a cancelled generation leaves a session whose log is exact."""
    opening = Step(prompt(300, 8), 400)
    free = reference.play({"free": [replace(opening, max_tokens=60)]})["free"].turns[0]
    steps = {
        f"after {n} tokens": [replace(opening, cancel_after=n), replace(_ON, cancel_after=5), _ON]
        for n in (0, 1, 6, 40)
    }
    found = rig.play(steps)
    problem = next(
        (f"{name}: {text}" for name, t in found.items() if (text := _cancelled_wrong(free, t))), ""
    )
    exact = check_reference(network, found, rig.method.positions)
    return [
        CheckResult("cancel ends a generation", not problem, problem or f"{len(found)} sessions"),
        replace(exact, name="goes on exactly after a cancel"),
    ]


def _cancelled_wrong(free: list[int], trace: EngineTrace) -> str:
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


def check_context_limit(rig: Rig, reference: Rig) -> list[CheckResult]:
    """Check that a session ends at the model's last position and is not let past it."""
    limit = rig.engine.info.context_limit
    refusal = _refusal(rig, limit)
    steps = {"full": [Step(prompt(limit - 30, 9), 10), Step(prompt(10, 10), 400)]}
    expected, found = reference.play(steps)["full"], rig.play(steps)["full"]
    problem = error_problem(found) or token_problem(expected, found)
    problem = problem or reason_problem(expected, found)
    if not problem and len(found.tokens) != limit:
        problem = f"ended after {len(found.tokens)} tokens of {limit}"
    return [
        CheckResult("too long a prompt is refused", not refusal, refusal),
        CheckResult("ends at the last position", not problem, problem or f"{limit} tokens"),
    ]


def _refusal(rig: Rig, limit: int) -> str:
    engine = rig.engine
    engine.open("too-long", TokenPhases())
    label = TokenPhases().label
    tokens = prompt(limit, 11)
    try:
        engine.extend("too-long", tokens, [label(token) for token in tokens])
    except ContextLimitError:
        return ""
    finally:
        engine.close("too-long")
    return f"{limit} tokens are taken, of which the model can read {limit - 1} and write none"
