"""Whatever sessions do and however they end, the memory comes back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from agentbench_kv.conformance.engines.comparing import error_problem
from agentbench_kv.conformance.engines.driver import Rig
from agentbench_kv.conformance.engines.plans import prompt
from agentbench_kv.conformance.engines.pools import settled
from agentbench_kv.conformance.engines.traces import EngineTrace, Step
from agentbench_kv.conformance.result import CheckResult
from agentbench_kv.errors import CapacityError

__all__ = ["check_leaks"]

SESSIONS = 10
"""Sessions of one example."""
_THREADS = 6
_NAME = "memory comes back"

Life = list[Step]


def check_leaks(rig: Rig, examples: int) -> CheckResult:
    """Open, drive, cancel and close sessions at random; the pool must be as at the engine's start.

    Parameters
    ----------
    rig : Rig
        Best with a small pool, so that sessions are dropped too.
    examples : int
        Of `SESSIONS` sessions each.
    """
    before = rig.pool_at_start
    if before is None:
        return CheckResult(_NAME, True, "the engine does not say what is free", skipped=True)
    if find_spec("hypothesis") is None:
        return CheckResult(_NAME, True, "needs pip install hypothesis", skipped=True)
    tally = _Tally(before)
    with suppress(_FoundError):
        _run_examples(lambda lives: tally.play(rig, lives), examples)
    detail = f"{tally.sessions} sessions, {tally.refused} refused, {tally.events} events"
    return CheckResult(_NAME, not tally.problem, tally.problem or detail)


class _FoundError(Exception):
    """Ends the search for a problem."""


@dataclass
class _Tally:
    before: dict[str, Any]
    sessions: int = 0
    refused: int = 0
    events: int = 0
    problem: str = ""

    def play(self, rig: Rig, lives: Sequence[Life]) -> None:
        """Play one example and look for a problem, unless one was found: a leak stays."""
        if not self.problem:
            with ThreadPoolExecutor(_THREADS) as threads:
                traces = list(threads.map(lambda life: rig.play({"life": life})["life"], lives))
            self._count(traces)
            after = settled(rig.engine, self.before)
            if after != self.before:
                self.problem = f"{after} after {_told(lives)}, {self.before} at the start"
        if self.problem:
            raise _FoundError

    def _count(self, traces: Sequence[EngineTrace]) -> None:
        self.sessions += len(traces)
        self.events += sum(len(trace.stats.events) for trace in traces)
        self.refused += sum(isinstance(trace.error, CapacityError) for trace in traces)
        odd = [t for t in traces if t.error and not isinstance(t.error, CapacityError)]
        self.problem = error_problem(odd[0]) if odd else ""


def _run_examples(play: Callable[[list[Life]], None], examples: int) -> None:
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import strategies as st

    steps = st.builds(
        _step, st.integers(1, 250), st.integers(0, 60), st.none() | st.integers(0, 10)
    )
    lives = st.lists(st.lists(steps, min_size=0, max_size=4), min_size=SESSIONS, max_size=SESSIONS)

    @settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(lives)
    def run(each: list[Life]) -> None:
        play(each)

    run()


def _step(length: int, out: int, cancel_after: int | None) -> Step:
    return Step(prompt(length, length), out, cancel_after=cancel_after)


def _told(lives: Sequence[Life]) -> str:
    """Say an example in a few words: prompt and output lengths, turn by turn."""
    words = ["+".join(f"{len(s.prompt)}/{s.max_tokens}" for s in life) or "0" for life in lives]
    return f"{len(lives)} sessions of {', '.join(words)} tokens"
