"""Forks and forced answers: each session is as one that was never forked, or that decoded."""

from __future__ import annotations

import operator
import random
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count

from agentbench_kv.conformance import CheckResult
from agentbench_kv.conformance.driver import (
    DrivenSession,
    Driver,
    SessionTrace,
    TurnPlan,
    plain_phases,
    settled,
)
from agentbench_kv.conformance.engines.comparison import FIGURES, error_problem
from agentbench_kv.conformance.engines.fixture import VOCAB, prompt
from agentbench_kv.engines.base import Capability, Engine, KVStats, Sampling
from agentbench_kv.errors import KVBenchError
from agentbench_kv.phases import TokenPhases

# So long that the turns behind it find room in the same power of two of rows.
_FIRST = TurnPlan(prompt(300, 21), 60)
_OWN = [TurnPlan(prompt(40, 22), 50), TurnPlan(prompt(9, 23), 45)]
_ASIDE = [TurnPlan(prompt(25, 24), 50), TurnPlan(prompt(1, 25), 45)]
_numbers = count()
_MOST_OPEN, _LONGEST = 4, 300  # sessions of a tree, and tokens of one
_LAST = prompt(8, 26)


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


def check_predicted(driver: Driver, reference: Driver) -> list[CheckResult]:
    """Check what an engine says it would have drawn in place of tokens that nobody would draw."""
    name = "what would have been drawn is the embedded engine's"
    if Capability.FORCE not in driver.engine.info.capabilities:
        return [CheckResult(name, True, "the engine takes no answers", skipped=True)]
    expected, found = (_predicted(each.engine) for each in (reference, driver))
    wrong = sum(map(operator.ne, expected, found))
    problem = f"{wrong} of {len(expected)} are others" if wrong else ""
    if len(found) != len(expected):
        problem = f"{len(found)} tokens, expected {len(expected)}"
    return [CheckResult.unless(problem, name, f"{len(found)} tokens")]


def _predicted(engine: Engine) -> list[int]:
    """Return the model's own best in place of all tokens of a session's random answers."""
    best: list[int] = []
    session = DrivenSession(engine, f"predicted-{next(_numbers)}")
    try:
        for seed, turn in enumerate([_FIRST, *_OWN], start=31):
            session.feed(turn.prompt)
            generation = engine.force(session.name, prompt(turn.max_tokens, seed), predict=True)
            session.read(generation)
            best += generation.best
    finally:
        session.close()
    return best


def check_given_crowd(driver: Driver, reference: Driver) -> CheckResult:
    """Check the same of ten sessions at once in a pool that does not hold them.

    Rows that give way are computed again, with the given tokens that came before; so this is for
    methods that evict nothing.
    """
    name = "what would have been drawn is, in a small pool too"
    if Capability.FORCE not in driver.engine.info.capabilities:
        return CheckResult(name, True, "the engine takes no answers", skipped=True)
    turns = {seed: TurnPlan(prompt(300, seed), 120) for seed in range(41, 51)}
    with ThreadPoolExecutor(len(turns)) as threads:
        found = [*threads.map(partial(_given, driver.engine), turns, turns.values())]
    expected = [_given(reference.engine, seed, turn) for seed, turn in turns.items()]
    wrong = sum(own != wanted for (own, _), (wanted, _) in zip(found, expected, strict=True))
    problem = f"{wrong} of {len(turns)} sessions would have drawn others" if wrong else ""
    again = sum(tokens for _, tokens in found)
    return CheckResult.unless(problem, name, f"{again} tokens computed again")


def _given(engine: Engine, seed: int, turn: TurnPlan) -> tuple[list[int], int]:
    """Return the model's own best in place of a random answer, and the tokens computed again."""
    session = DrivenSession(engine, f"given-{next(_numbers)}")
    try:
        session.feed(turn.prompt)
        generation = engine.force(session.name, prompt(turn.max_tokens, seed + 100), predict=True)
        session.read(generation)
    finally:
        session.close()
    return [*generation.best], session.trace.stats.recomputed


def check_tree(driver: Driver, reference: Driver, steps: int) -> CheckResult:
    """Fork, force, decode, cancel and close at random, in a small pool.

    What is left in the end must be as if never forked, and nothing may stay behind it.
    """
    name = "any tree of forks is exact, and its memory comes back"
    if not {Capability.FORK, Capability.FORCE} <= driver.engine.info.capabilities:
        return CheckResult(
            name, True, "the engine does not fork, or takes no answers", skipped=True
        )
    tree = _Tree(driver)
    try:
        for _ in range(steps):
            tree.step()
        live = {session.name: driver.engine.stats(session.name).live for session in tree.open}
        last = {session.name: tree.answer(session) for session in tree.open}
        turns = {session.name: session.trace for session in tree.open}
    finally:
        tree.close()
    problem = ""
    for number, trace in turns.items():
        found, stats = _replayed(reference, trace)
        same = found == last[number] and stats.live == live[number]
        problem = problem or ("" if same else f"{number}: another answer, or other live tokens")
    wanted = driver.pool_at_start
    left = wanted and settled(driver.engine, wanted)
    if left != wanted:
        problem = problem or f"{left} behind it, {wanted} at the start"
    return CheckResult.unless(
        problem, name, f"{steps} steps, {tree.forks} forks, {tree.events} events"
    )


class _Tree:
    """Sessions and forks of them, of which some are closed, and a few are open at a time."""

    def __init__(self, driver: Driver) -> None:
        self.open: list[DrivenSession] = []
        self.forks = self.events = 0
        self._engine = driver.engine
        self._rng = random.Random(7)

    def step(self) -> None:
        if not self.open:
            self.open.append(DrivenSession(self._engine, self._name()))
            self._force(self.open[0])
        session = self._rng.choice(self.open)
        chosen = self._rng.choice(["fork", "fork", "force", "force", "decode", "cancel", "close"])
        if len(self.open) > _MOST_OPEN or len(session.trace.tokens) > _LONGEST:
            chosen = "close"
        if chosen == "fork":
            self.open.append(session.fork(self._name(), TokenPhases()))
            self.forks += 1
        elif chosen == "force":
            self._force(session)
        elif chosen != "close":
            session.feed(self._ids())
            generation = self._engine.generate(session.name, Sampling(20))
            session.read(generation, 3 if chosen == "cancel" else None)
        # What was cancelled may have to be computed again, with everything in sight.
        if chosen in ("cancel", "close"):
            self.open.remove(session)
            self._close(session)

    def answer(self, session: DrivenSession) -> list[int]:
        """Return what a session says last; no turn of its trace."""
        self._engine.extend(session.name, _LAST, plain_phases(_LAST))
        return list(self._engine.generate(session.name, Sampling(12)))

    def close(self) -> None:
        for session in self.open:
            self._close(session)

    def _close(self, session: DrivenSession) -> None:
        session.close()
        self.events += len(session.trace.stats.events)

    def _force(self, session: DrivenSession) -> None:
        session.feed(self._ids())
        session.read(self._engine.force(session.name, self._ids()))

    def _ids(self) -> list[int]:
        return [self._rng.randrange(VOCAB) for _ in range(self._rng.randrange(1, 40))]

    def _name(self) -> str:
        return f"tree-{next(_numbers)}"


def _replayed(reference: Driver, trace: SessionTrace) -> tuple[list[int], KVStats]:
    """Give a session's turns to one that was never forked; return its last answer and account."""
    session, at = DrivenSession(reference.engine, f"leaf-{next(_numbers)}"), 0
    decoded = set(trace.decoded_at)
    for answer in trace.turns:
        start = at
        while at not in decoded and at < len(trace.tokens):
            at += 1
        session.feed(trace.tokens[start:at])
        if answer:
            session.read(reference.engine.force(session.name, answer))
        at += len(answer)
    stats = reference.engine.stats(session.name)
    session.feed(_LAST)
    said = list(reference.engine.generate(session.name, Sampling(12)))
    session.close()
    return said, stats


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
