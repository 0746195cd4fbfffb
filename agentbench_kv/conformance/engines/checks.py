"""The edges of an engine: where generations end, small pools, leaks, and a killed backend."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from itertools import chain
from typing import Any, NamedTuple

from agentbench_kv.conformance import CheckResult
from agentbench_kv.conformance.driver import (
    DrivenSession,
    Driver,
    SessionTrace,
    TurnPlan,
    settled,
    stop_matcher,
)
from agentbench_kv.conformance.engines.comparison import (
    accounting_problem,
    check_reference,
    error_problem,
    kept_problem,
    reason_problem,
    token_problem,
    wrong_tokens,
)
from agentbench_kv.conformance.engines.fixture import prompt
from agentbench_kv.engines.base import FinishReason
from agentbench_kv.errors import CapacityError, ContextLimitError
from agentbench_kv.phases import TokenCodec

SESSIONS = 10
"""Sessions of one example of `check_leaks`."""
_THREADS = 6
_EARLIEST = 3
"""Stops are looked for after this many tokens, so that ending at once is not right."""
_NEXT_TURN = TurnPlan(prompt(40, 7), 45)

Example = Sequence[list[TurnPlan]]


class _Stop(NamedTuple):
    """A way to end a generation: what is asked, how many tokens it must give, and why it ends."""

    name: str
    turn: TurnPlan
    tokens: int
    reason: FinishReason


def check_stops(
    driver: Driver, reference: Driver, network: Any, codec: TokenCodec
) -> list[CheckResult]:
    """Check stop ids, stop texts, functions and lengths against the embedded engine."""
    stops = _find_stops(reference, codec)
    sessions = {stop.name: [stop.turn, _NEXT_TURN] for stop in stops}
    expected, found = reference.play(sessions), driver.play(sessions)
    exact = check_reference(network, found, driver.method.positions)
    return [
        *(_check_stop(stop, expected[stop.name], found[stop.name]) for stop in stops),
        replace(exact, name="goes on exactly behind every ending"),
    ]


def _check_stop(stop: _Stop, expected: SessionTrace, found: SessionTrace) -> CheckResult:
    name = f"{stop.name} ends at its token"
    if found.error is not None:
        return CheckResult(name, False, error_problem(found))
    tokens, reason = len(found.turns[0]), found.reasons[0]
    if (tokens, reason) != (stop.tokens, stop.reason):
        problem = f"{tokens} tokens and {reason}, expected {stop.tokens} and {stop.reason}"
    elif stop.turn.own_stop and found.stats.recomputed:
        # The engine had run ahead of the function, so it had to start over: the reference decides
        # what comes after.
        same = expected.turns[0] == found.turns[0]
        problem = "" if same else "other tokens before the stop"
    else:
        problem = token_problem(expected, found) or reason_problem(expected, found)
        if not stop.turn.own_stop:
            problem = problem or accounting_problem(expected, found)
    return CheckResult.unless(problem, name, f"after {tokens} tokens")


def _find_stops(reference: Driver, codec: TokenCodec) -> list[_Stop]:
    """Find stops in what the model says freely."""
    for seed in range(50):
        opening = TurnPlan(prompt(120, 500 + seed), 60)
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
    opening = TurnPlan(prompt(300, 8), 400)
    free = reference.play({"free": [replace(opening, max_tokens=60)]})["free"].turns[0]
    later = [replace(_NEXT_TURN, cancel_after=5), _NEXT_TURN]
    counts = (0, 1, 6, 40)
    steps = {f"after {n} tokens": [replace(opening, cancel_after=n), *later] for n in counts}
    found = driver.play(steps)
    problems = (
        f"{name}: {text}" for name, t in found.items() if (text := _cancel_problem(free, t))
    )
    problem = next(problems, "")
    exact = check_reference(network, found, driver.method.positions)
    return [
        CheckResult.unless(problem, "cancel ends a generation", f"{len(found)} sessions"),
        replace(exact, name="goes on exactly after a cancel"),
    ]


def _cancel_problem(free: list[int], trace: SessionTrace) -> str:
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
    steps = {"full": [TurnPlan(prompt(limit - 30, 9), 10), TurnPlan(prompt(10, 10), 400)]}
    expected, found = reference.play(steps)["full"], driver.play(steps)["full"]
    problem = error_problem(found) or token_problem(expected, found)
    problem = problem or reason_problem(expected, found)
    if not problem and len(found.tokens) != limit:
        problem = f"ended after {len(found.tokens)} tokens of {limit}"
    return [
        CheckResult.unless(refusal, "too long a prompt is refused"),
        CheckResult.unless(problem, "ends at the last position", f"{limit} tokens"),
    ]


def _refusal_problem(driver: Driver, limit: int) -> str:
    session = DrivenSession(driver.engine, "too-long")
    try:
        session.feed(prompt(limit, 11))
    except ContextLimitError:
        return ""
    finally:
        session.close()
    return f"{limit} tokens are taken, of which the model can read {limit - 1} and write none"


def check_leaks(driver: Driver, examples: int) -> CheckResult:
    """Open, drive, cancel and close sessions at random; the pool must be as at the engine's start.

    An example has `SESSIONS` sessions. Best with a small pool, so that sessions are dropped too.
    """
    name, before = "memory comes back", driver.pool_at_start
    if before is None:
        return CheckResult(name, True, "the engine does not say what is free", skipped=True)
    if find_spec("hypothesis") is None:
        return CheckResult(name, True, "needs pip install hypothesis", skipped=True)
    traces: list[SessionTrace] = []
    problem = ""

    def play(sessions: Example) -> None:
        nonlocal problem
        # Not again once there is a problem, though hypothesis repeats what failed: a leak stays.
        if not problem:
            with ThreadPoolExecutor(_THREADS) as threads:
                new = list(threads.map(lambda steps: driver.play({"one": steps})["one"], sessions))
            traces.extend(new)
            failed = (trace for trace in new if not isinstance(trace.error, CapacityError))
            problem = next(filter(None, map(error_problem, failed)), "")
            after = settled(driver.engine, before)
            if after != before:
                problem = f"{after} after {_describe(sessions)}, {before} at the start"
        if problem:
            raise _FoundError

    with suppress(_FoundError):
        _run_examples(play, examples)
    refused = sum(isinstance(trace.error, CapacityError) for trace in traces)
    events = sum(len(trace.stats.events) for trace in traces)
    detail = f"{len(traces)} sessions, {refused} refused, {events} events"
    return CheckResult.unless(problem, name, detail)


class _FoundError(Exception):
    """Ends the search for a problem."""


def _run_examples(play: Callable[[Example], None], examples: int) -> None:
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import strategies as st

    turns = st.builds(
        TurnPlan,
        st.integers(1, 250).map(lambda length: prompt(length, length)),
        st.integers(0, 60),
        cancel_after=st.none() | st.integers(0, 10),
    )
    sessions = st.lists(st.lists(turns, max_size=4), min_size=SESSIONS, max_size=SESSIONS)
    limits = settings(max_examples=examples, derandomize=True, deadline=None, database=None)
    limits = settings(limits, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    limits(given(sessions)(lambda example: play(example)))()


def _describe(sessions: Example) -> str:
    """Say an example in a few words: prompt and output lengths, turn by turn."""
    words = ["+".join(f"{len(t.prompt)}/{t.max_tokens}" for t in one) or "0" for one in sessions]
    return f"{len(sessions)} sessions of {', '.join(words)} tokens"


def check_crowd(
    network: Any,
    positions: str,
    expected: Mapping[str, SessionTrace],
    found: Mapping[str, SessionTrace],
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
    network: Any, positions: str, expected: SessionTrace, found: SessionTrace
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
    return "again", f"{wrong[0]} after rows were computed again" if wrong else ""


def check_restart(driver: Driver, network: Any) -> list[CheckResult]:
    """Kill the engine's process between two turns; the session must continue, and say so."""
    name, pid = "a killed backend's sessions go on", getattr(driver.engine, "backend_pid", None)
    if pid is None:
        return [CheckResult(name, True, "the engine runs in this process", skipped=True)]
    turns = [TurnPlan(prompt(150, 12), 45), TurnPlan(prompt(40, 13), 45)]
    traces = driver.play({"killed": turns}, between=lambda: os.kill(pid, signal.SIGKILL))
    recomputed = traces["killed"].stats.recomputed
    problem = error_problem(traces["killed"])
    problem = problem or ("" if recomputed else "nothing is counted as recomputed")
    result = CheckResult.unless(problem, name, f"{recomputed} tokens computed again")
    if problem:
        return [result]
    exact = check_reference(network, traces, driver.method.positions)
    return [result, replace(exact, name="goes on exactly after a restart")]
