"""Forks and forced answers: each session is as one that was never forked, or that decoded."""

from __future__ import annotations

from itertools import count

from agentbench_kv.conformance import CheckResult
from agentbench_kv.conformance.driver import DrivenSession, Driver, SessionTrace, TurnPlan
from agentbench_kv.conformance.engines.comparison import FIGURES, error_problem
from agentbench_kv.conformance.engines.fixture import prompt
from agentbench_kv.engines.base import Capability, KVStats, Sampling
from agentbench_kv.errors import KVBenchError
from agentbench_kv.phases import TokenPhases

# So long that the turns behind it find room in the same power of two of rows.
_FIRST = TurnPlan(prompt(300, 21), 60)
_OWN = [TurnPlan(prompt(40, 22), 50), TurnPlan(prompt(9, 23), 45)]
_ASIDE = [TurnPlan(prompt(25, 24), 50), TurnPlan(prompt(1, 25), 45)]
_numbers = count()


def check_forks(driver: Driver, reference: Driver) -> list[CheckResult]:
    """Check both sides of a fork, each going on behind the other, against sessions of their own."""
    name = "both sides of a fork are as if never forked"
    if Capability.FORK not in driver.engine.info.capabilities:
        return [CheckResult(name, True, "the engine does not fork", skipped=True)]
    alone = reference.play({"own": [_FIRST, *_OWN], "aside": [_FIRST, *_ASIDE]})
    number = next(_numbers)
    main = DrivenSession(driver.engine, f"forked-{number}")
    sessions = [main]
    try:
        main.read(main.start(_FIRST, _greedy(_FIRST)))
        before = driver.engine.stats(main.name)
        try:
            sessions.append(main.fork(f"fork-{number}", TokenPhases()))
        except KVBenchError as error:  # not with this method
            return [CheckResult(name, True, str(error), skipped=True)]
        live = driver.engine.stats(sessions[1].name).live
        for turns in zip(_OWN, _ASIDE, strict=True):
            for session, turn in zip(sessions, turns, strict=True):
                session.read(session.start(turn, _greedy(turn)))
    finally:
        for session in sessions:
            session.close()
    own, aside = main.trace, sessions[1].trace
    problem = "" if live == before.live else f"a fork of {before.live} live tokens has {live}"
    problem = problem or _problem(alone["own"], own, own.stats)
    problem = problem or _problem(alone["aside"], aside, before.followed_by(aside.stats))
    events = len(own.stats.events) + len(aside.stats.events)
    return [CheckResult.unless(problem, name, f"{events} events, {before.live} shared tokens")]


def check_forced(driver: Driver, reference: Driver) -> list[CheckResult]:
    """Check that answers which are given are as if they had been decoded."""
    name = "a forced answer is as a decode of its tokens"
    if Capability.FORCE not in driver.engine.info.capabilities:
        return [CheckResult(name, True, "the engine takes no answers", skipped=True)]
    turns = [_FIRST, *_OWN]
    expected = reference.play({"free": turns})["free"]
    if expected.error is not None:
        return [CheckResult(name, False, error_problem(expected))]
    session = DrivenSession(driver.engine, f"forced-{next(_numbers)}")
    try:
        for turn, answer in zip(turns[:-1], expected.turns, strict=False):
            session.feed(turn.prompt)
            session.read(driver.engine.force(session.name, answer))
        session.read(session.start(turns[-1], _greedy(turns[-1])))
    finally:
        session.close()
    problem = _problem(expected, session.trace, session.trace.stats)
    return [CheckResult.unless(problem, name, f"{len(session.trace.stats.events)} events")]


def _greedy(turn: TurnPlan) -> Sampling:
    return Sampling(turn.max_tokens)


def _problem(expected: SessionTrace, found: SessionTrace, stats: KVStats) -> str:
    if expected.turns != found.turns:
        turn = next(n for n, pair in enumerate(zip(expected.turns, found.turns, strict=True))
                    if pair[0] != pair[1])  # fmt: skip
        return f"turn {turn}: other tokens"
    wrong = [
        f"{figure} {getattr(stats, figure)}, expected {getattr(expected.stats, figure)}"
        for figure in FIGURES
        if getattr(stats, figure) != getattr(expected.stats, figure)
    ]
    events, wanted = (
        [(each.logical, each.live_before, each.live_after) for each in of.events]
        for of in (stats, expected.stats)
    )
    return "; ".join(wrong) or ("" if events == wanted else f"events {events}, expected {wanted}")
