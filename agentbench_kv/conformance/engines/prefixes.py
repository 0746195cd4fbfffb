"""Sessions that share a system message's rows: each is as one that computed its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from agentbench_kv.conformance import CheckResult
from agentbench_kv.conformance.driver import Driver, SessionTrace, TurnPlan, calibrated_for
from agentbench_kv.conformance.engines.checks import check_crowd
from agentbench_kv.conformance.engines.comparison import (
    accounting_problem,
    compare,
    kept_problem,
    token_problem,
)
from agentbench_kv.conformance.engines.fixture import (
    INTERVAL,
    SMALL_POOL,
    Fixture,
    Sessions,
    prompt,
)
from agentbench_kv.engines.base import Capability
from agentbench_kv.errors import UsageError
from agentbench_kv.methods.base import Method
from agentbench_kv.registry import make_method

SHARING = ("agentkv", "h2o", "full-constrained")
"""They keep different things of a prefix: queries, sums, nothing."""
_SYSTEM, _BUDGET = 150, 320  # half of h2o's budget are recent tokens


def shared_part(fixture: Fixture, name: str) -> list[CheckResult]:
    """Check a method whose sessions share their system message, where the engine has that."""
    if not fixture.has(Capability.SHARE_PREFIX):
        told = "the engine shares no prefixes"
        return [CheckResult("a shared prefix changes nothing", True, told, skipped=True)]
    own = _method(fixture, name)
    shared = replace(own, prefix="shared")
    try:
        driver = fixture.driver(shared)
    except UsageError as error:
        return [CheckResult("a shared prefix changes nothing", True, str(error), skipped=True)]
    with fixture.reference(own) as reference:
        return [*_check_shared(driver, reference), _check_small_pool(fixture, shared, reference)]


def _method(fixture: Fixture, name: str) -> Method:
    if not make_method(name, 1 << 20).compresses:
        return make_method(name, None)
    settings = {"interval": INTERVAL, "protect": "system", "trigger": "prefill+every"}
    return calibrated_for(fixture.network, make_method(name, _BUDGET, settings))


def _check_shared(driver: Driver, reference: Driver) -> list[CheckResult]:
    sessions = _sessions(5, 220)
    expected = reference.play(sessions)
    found, alone = driver.play(sessions), driver.play(sessions, together=False)
    events = sum(len(trace.stats.events) for trace in found.values())
    happened = bool(events) or not driver.method.compresses
    return [
        compare("a shared prefix changes no token", expected, found, token_problem),
        compare("nor what is kept", expected, found, kept_problem),
        compare("nor the account", expected, found, accounting_problem),
        compare("one after the other it is the same", found, alone, token_problem),
        CheckResult("events happen behind it", happened, f"{events} in {len(found)} sessions"),
        _check_once({**found, **{f"{name}, later": trace for name, trace in alone.items()}}),
    ]


def _check_once(found: Mapping[str, SessionTrace]) -> CheckResult:
    """Check that one session computed the prefix, and all others found it."""
    stats = [trace.stats for trace in found.values()]
    computed = sum(not each.cached_tokens for each in stats)
    shared = {each.shared for each in stats}
    # Sums of attention change with every forward: a session may copy its rows from the start.
    right = computed == 1 and len(shared) == 1 and max(shared) <= _SYSTEM
    detail = f"computed by {computed} of {len(stats)} sessions, {sorted(shared)} rows shared"
    return CheckResult("it is computed once", right, detail)


def _check_small_pool(fixture: Fixture, method: Method, reference: Driver) -> CheckResult:
    sessions = _sessions(10, 380)
    expected = reference.play(sessions)
    found = fixture.driver(method, SMALL_POOL).play(sessions)
    return check_crowd(fixture.network, method.positions, expected, found)


def _sessions(count: int, own: int) -> Sessions:
    system = prompt(_SYSTEM, 31)
    return {
        f"shares-{i}": [
            TurnPlan((*system, *prompt(own + i, 40 + i)), 40, system=_SYSTEM),
            TurnPlan(prompt(50, 60 + i), 40),
        ]
        for i in range(count)
    }
