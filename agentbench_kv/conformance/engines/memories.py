"""Sessions with a memory: what comes back, answers and accounts are the embedded engine's."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count

from agentbench_kv.conformance import CheckResult
from agentbench_kv.conformance.driver import DrivenSession, SessionTrace, TurnPlan
from agentbench_kv.conformance.engines.comparison import (
    accounting_problem,
    check_reference,
    compare,
    token_problem,
)
from agentbench_kv.conformance.engines.fixture import Fixture, prompt
from agentbench_kv.engines.base import Capability, Engine, Sampling
from agentbench_kv.errors import UsageError
from agentbench_kv.methods.base import Method
from agentbench_kv.phases import TokenPhases
from agentbench_kv.registry import make_method

WAYS = ("layer", "shared")
"""Of choosing what comes back: `sets` of MemArt."""
# Past sessions fill no whole number of blocks; one prompt is longer than a prefill chunk.
_PAST = [prompt(length, 300 + length) for length in (61, 130, 44)]
_TURNS = [TurnPlan(prompt(30, 310), 25), TurnPlan(prompt(1, 311), 9), TurnPlan(prompt(52, 312), 20)]
_LONG = TurnPlan(prompt(700, 313), 12)
_SETTINGS = {"topk": "7", "block": "8"}
_numbers = count()


@dataclass
class _Recalled:
    """Traces of sessions by name, and which rows came back to each prompt [layers, rows]."""

    traces: dict[str, SessionTrace] = field(default_factory=dict)
    rows: dict[str, list[list[list[int]]]] = field(default_factory=dict)


def memory_part(fixture: Fixture, sets: str) -> list[CheckResult]:
    """Check sessions behind a memory, where the engine has banks."""
    name = "a memory's rows are the embedded engine's"
    if not fixture.has(Capability.MEMORY_BLOCKS):
        return [CheckResult(name, True, "the engine has no memory banks", skipped=True)]
    method = make_method("memart", None, {**_SETTINGS, "sets": sets})
    try:
        driver = fixture.driver(method)
    except UsageError as error:  # not in this way
        return [CheckResult(name, True, str(error), skipped=True)]
    with fixture.reference(method) as reference:
        expected = _played(reference.engine)
    found = _played(driver.engine)
    return [
        CheckResult.unless(_rows_problem(expected, found), name, f"{len(found.rows)} sessions"),
        compare("answers behind it, too", expected.traces, found.traces, token_problem),
        compare("and the accounts", expected.traces, found.traces, _account_problem),
        _check_appended(driver.engine),
        _check_whole(fixture, make_method("memart", None, {"block": "8", "sets": sets})),
    ]


def _account_problem(expected: SessionTrace, found: SessionTrace) -> str:
    pairs = {
        name: (getattr(expected.stats, name), getattr(found.stats, name))
        for name in ("restored", "recomputed")
    }
    wrong = [f"{name} {got}, expected {want}" for name, (want, got) in pairs.items() if want != got]
    return accounting_problem(expected, found) or "; ".join(wrong)


def _rows_problem(expected: _Recalled, found: _Recalled) -> str:
    for name, prompts in expected.rows.items():
        for number, (want, got) in enumerate(zip(prompts, found.rows[name], strict=True)):
            if want != got:
                return f"{name}: other rows come back to prompt {number}"
    return ""


def _check_appended(engine: Engine) -> CheckResult:
    """Check that turns which are memorised as they end are as all of them at once."""
    name, ends = "turn by turn is as at once", []
    for by_turns in (False, True):
        bank = f"bank-{next(_numbers)}"
        _remember(engine, bank, _PAST[0])
        told, rows = _attached(engine, bank), 0
        for turn in _TURNS:
            _play(told, turn)
            if by_turns:
                rows += engine.memorise(told.name, bank, start=rows)
        if not by_turns:
            rows = engine.memorise(told.name, bank)
        _play(told, _LONG)  # which has these rows anyway
        asked = _attached(engine, bank)
        _play(asked, _TURNS[2])
        found = (rows, told.trace.turns, asked.trace.turns)
        ends.append((*found, *(engine.recalled(each.name).tolist() for each in (told, asked))))
        for session in (told, asked):
            session.close()
        engine.forget(bank)
    own = max(map(max, ends[1][3]))
    problem = "" if ends[0] == ends[1] else "other rows, or another answer behind them"
    if own >= len(_PAST[0]):
        problem = problem or "a session's own rows come back to it"
    return CheckResult.unless(problem, name, f"{ends[0][0]} rows of {len(_TURNS)} turns")


def _check_whole(fixture: Fixture, method: Method) -> CheckResult:
    """Check that all rows of one past session are as if the session itself went on."""
    driver, (past, question) = fixture.driver(method), (_PAST[1], _TURNS[0])
    bank = f"bank-{next(_numbers)}"
    _remember(driver.engine, bank, past)
    session = _attached(driver.engine, bank)
    _play(session, question)
    session.close()
    driver.engine.forget(bank)
    trace = SessionTrace()
    trace.add(past, decoded=False)
    trace.add(question.prompt, decoded=False)
    trace.add(session.trace.turns[0], decoded=True)
    result = check_reference(fixture.network, {"all of it": trace})
    return CheckResult("with all rows it is the whole context", result.ok, result.detail)


def _played(engine: Engine) -> _Recalled:
    """Ask behind three past sessions: in turns, in a fork after the first, and at length."""
    found, bank = _Recalled(), f"bank-{next(_numbers)}"
    for past in _PAST:
        _remember(engine, bank, past)
    asked, long = _attached(engine, bank), _attached(engine, bank)
    sessions = {"asked": asked, "long": long}
    _note(found, "asked", asked, _TURNS[0])
    if Capability.FORK in engine.info.capabilities:
        aside = asked.fork(f"{asked.name}-aside", TokenPhases())
        sessions["aside"] = aside
        _note(found, "aside", aside, _TURNS[2])
    for turn in _TURNS[1:]:
        _note(found, "asked", asked, turn)
    _note(found, "long", long, _LONG)
    for name, session in sessions.items():
        session.close()
        found.traces[name] = session.trace
    engine.forget(bank)
    return found


def _note(found: _Recalled, name: str, session: DrivenSession, turn: TurnPlan) -> None:
    _play(session, turn)
    found.rows.setdefault(name, []).append(session.engine.recalled(session.name).tolist())


def _play(session: DrivenSession, turn: TurnPlan) -> None:
    session.read(session.start(turn, Sampling(max_tokens=turn.max_tokens)))
    session.trace.after.append(session.engine.stats(session.name))


def _attached(engine: Engine, bank: str) -> DrivenSession:
    session = DrivenSession(engine, f"remembers-{next(_numbers)}")
    engine.attach(session.name, bank)
    return session


def _remember(engine: Engine, bank: str, past: tuple[int, ...]) -> None:
    session = DrivenSession(engine, f"past-{next(_numbers)}")
    _play(session, TurnPlan(past, 1))
    engine.memorise(session.name, bank, len(past))
    session.close()
