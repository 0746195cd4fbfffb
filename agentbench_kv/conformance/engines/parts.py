"""The parts of the suite, each on an engine that is running or is started for it."""

from __future__ import annotations

from collections.abc import Mapping

from agentbench_kv.conformance.engines import plans
from agentbench_kv.conformance.engines.bench import Fixture
from agentbench_kv.conformance.engines.comparing import (
    accounting_problem,
    compare,
    kept_problem,
    reason_problem,
    token_problem,
)
from agentbench_kv.conformance.engines.endings import (
    check_cancel,
    check_context_limit,
    check_stops,
)
from agentbench_kv.conformance.engines.exactness import check_reference
from agentbench_kv.conformance.engines.leaks import check_leaks
from agentbench_kv.conformance.engines.pressure import check_crowd
from agentbench_kv.conformance.engines.restart import check_restart
from agentbench_kv.conformance.engines.traces import EngineTrace
from agentbench_kv.conformance.result import CheckResult
from agentbench_kv.errors import UsageError
from agentbench_kv.methods.base import Method

_MIN_EVENTS = 5


def method_part(
    fixture: Fixture,
    method: Method,
    *,
    optional: bool = False,
    sessions: plans.Sessions | None = None,
) -> list[CheckResult]:
    """Check one method: tokens, kept sets and accounting of sessions together and alone.

    An engine may refuse an `optional` method with a UsageError.
    """
    try:
        driver = fixture.driver(method)
    except UsageError as error:
        if not optional:
            raise
        return [CheckResult("runs", True, str(error), skipped=True)]
    sessions = sessions or plans.long_sessions()
    with fixture.reference(method) as reference:
        expected = reference.play(sessions)
    found, alone = driver.play(sessions), driver.play(sessions, together=False)
    return [
        compare("tokens are the embedded engine's", expected, found, _output_problem),
        check_reference(fixture.network, found, method.positions),
        compare("kept sets are the embedded engine's", expected, found, kept_problem),
        _check_accounting(method, expected, found),
        _check_recomputed(method, found),
        _check_events(method, found),
        compare("sessions together are as alone", alone, found, _any_problem),
    ]


def _output_problem(expected: EngineTrace, found: EngineTrace) -> str:
    return token_problem(expected, found) or reason_problem(expected, found)


def _any_problem(expected: EngineTrace, found: EngineTrace) -> str:
    problems = (_output_problem, kept_problem, accounting_problem)
    return next(filter(None, (problem(expected, found) for problem in problems)), "")


def _check_accounting(
    method: Method, expected: Mapping[str, EngineTrace], found: Mapping[str, EngineTrace]
) -> CheckResult:
    name = "accounting is the embedded engine's"
    silent = not any(t.stats.prefill_tokens or t.stats.decode_tokens for t in found.values())
    if method.name == "full" and silent:
        why = "the engine as shipped keeps no accounts"
        return CheckResult(name, True, why, skipped=True)
    return compare(name, expected, found, accounting_problem)


def _check_recomputed(method: Method, found: Mapping[str, EngineTrace]) -> CheckResult:
    tokens = sum(trace.stats.recomputed for trace in found.values())
    # As shipped, an engine's prefix cache may keep whole blocks only.
    right = not tokens or method.name == "full"
    return CheckResult("nothing is computed again", right, f"{tokens} tokens")


def _check_events(method: Method, found: Mapping[str, EngineTrace]) -> CheckResult:
    """Check that the comparison was about something."""
    events = max(len(trace.stats.events) for trace in found.values())
    if method.compresses:
        detail = f"{events} in one session, at least {_MIN_EVENTS} expected"
        return CheckResult("events happen", events >= _MIN_EVENTS, detail)
    return CheckResult("no events happen", events == 0, f"{events} in one session")


def stop_part(fixture: Fixture, method: Method) -> list[CheckResult]:
    """Check stops, cancelling and the last position."""
    driver = fixture.driver(method)
    with fixture.reference(method) as reference:
        return [
            *check_stops(driver, reference, fixture.network, fixture.codec),
            *check_cancel(driver, reference, fixture.network),
            *check_context_limit(driver, reference),
        ]


def crowd_part(fixture: Fixture, method: Method) -> list[CheckResult]:
    """Check ten sessions at once in a cache that does not hold them."""
    sessions = plans.crowd()
    with fixture.reference(method) as reference:
        expected = reference.play(sessions)
    found = fixture.driver(method, plans.SMALL_POOL).play(sessions)
    return [check_crowd(fixture.network, method.positions, expected, found)]


def leak_part(fixture: Fixture, method: Method, examples: int) -> list[CheckResult]:
    return [check_leaks(fixture.driver(method, plans.SMALL_POOL), examples)]


def restart_part(fixture: Fixture, method: Method) -> list[CheckResult]:
    return check_restart(fixture.driver(method, plans.SMALL_POOL), fixture.network)
