"""Whatever sessions do and however they end, the memory comes back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.util import find_spec

from agentbench_kv.conformance.engines.comparing import error_problem
from agentbench_kv.conformance.engines.driver import Driver
from agentbench_kv.conformance.engines.plans import prompt
from agentbench_kv.conformance.engines.pools import settled
from agentbench_kv.conformance.engines.traces import EngineTrace, Step
from agentbench_kv.conformance.result import CheckResult
from agentbench_kv.errors import CapacityError

SESSIONS = 10
"""Sessions of one example."""
_THREADS = 6
_NAME = "memory comes back"

Example = Sequence[list[Step]]


def check_leaks(driver: Driver, examples: int) -> CheckResult:
    """Open, drive, cancel and close sessions at random; the pool must be as at the engine's start.

    An example has `SESSIONS` sessions. Best with a small pool, so that sessions are dropped too.
    """
    before = driver.pool_at_start
    if before is None:
        return CheckResult(_NAME, True, "the engine does not say what is free", skipped=True)
    if find_spec("hypothesis") is None:
        return CheckResult(_NAME, True, "needs pip install hypothesis", skipped=True)
    traces: list[EngineTrace] = []
    problem = ""

    def play(sessions: Example) -> None:
        nonlocal problem
        # Not again once there is a problem, though hypothesis repeats what failed: a leak stays.
        if not problem:
            with ThreadPoolExecutor(_THREADS) as threads:
                new = list(threads.map(lambda steps: driver.play({"one": steps})["one"], sessions))
            traces.extend(new)
            problem = next(filter(None, map(_unexpected_error, new)), "")
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
    return CheckResult(_NAME, not problem, problem or detail)


class _FoundError(Exception):
    """Ends the search for a problem."""


def _unexpected_error(trace: EngineTrace) -> str:
    return "" if isinstance(trace.error, CapacityError) else error_problem(trace)


def _run_examples(play: Callable[[Example], None], examples: int) -> None:
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import strategies as st

    def step(length: int, max_tokens: int, cancel_after: int | None) -> Step:
        return Step(prompt(length, length), max_tokens, cancel_after=cancel_after)

    cancels = st.none() | st.integers(0, 10)
    steps = st.builds(step, st.integers(1, 250), st.integers(0, 60), cancels)
    sessions = st.lists(st.lists(steps, max_size=4), min_size=SESSIONS, max_size=SESSIONS)
    limits = settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    limits(given(sessions)(lambda example: play(example)))()


def _describe(sessions: Example) -> str:
    """Say an example in a few words: prompt and output lengths, turn by turn."""
    words = [
        "+".join(f"{len(s.prompt)}/{s.max_tokens}" for s in steps) or "0" for steps in sessions
    ]
    return f"{len(sessions)} sessions of {', '.join(words)} tokens"
