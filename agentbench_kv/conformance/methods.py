"""Properties every KV-cache method must have: the method conformance suite, without an engine.

`sessions` and `masked_cache` hold the part that needs one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from agentbench_kv.conformance.result import CheckResult
from agentbench_kv.conformance.selection_checks import CHECKS, calibrated
from agentbench_kv.errors import UsageError
from agentbench_kv.methods.base import Method
from agentbench_kv.registry import make_method


def check_method(
    method: str | type[Method] | Method, budget: int | None = None, seeds: Sequence[int] = (0, 1, 2)
) -> list[CheckResult]:
    """Check the properties of one method, on a random cache per seed.

    The method is as `build_method` takes it, `name` or `name@preset` if it is registered.
    """
    built = calibrated(build_method(method, budget))
    if not built.compresses:
        return [CheckResult("does not compress", True)]
    results = [_run(name, partial(check, built)) for name, check in _SETTINGS_CHECKS.items()]
    for name, check in CHECKS.items():
        found = (_run(name, partial(check, built, seed)) for seed in seeds)
        results.append(next((r for r in found if not r.ok), CheckResult(name, True)))
    return results


def build_method(
    method: str | type[Method] | Method,
    budget: int | None = None,
    *,
    preset: str = "",
    settings: Mapping[str, Any] | None = None,
) -> Method:
    """Return a method with a budget: the given one, or a little above what it always keeps.

    A method already built is returned as it is; `preset` is for a class; `settings` are parameters
    by name, as `--set` takes them.
    """
    if isinstance(method, Method):
        return method
    make = (
        partial(make_method, method) if isinstance(method, str) else partial(method.create, preset)
    )
    if budget is not None:
        return make(budget, settings)
    probe = make(1 << 20, settings)
    if not probe.compresses:
        return make(None, settings)
    budget = 16
    while budget < probe.sinks + probe.recent_kept(budget) + 16:
        budget += 1
    return replace(probe, budget=budget)


def _run(name: str, check: Callable[[], str]) -> CheckResult:
    """Turn a check (empty text = holds) into a result; an exception is a failure."""
    try:
        problem = check()
    except Exception as error:  # noqa: BLE001  a plug-in may raise anything
        problem = f"{type(error).__name__}: {error}"
    return CheckResult(name, not problem, problem)


def _refuses(method: Method, **changes: object) -> str:
    arguments = {"budget": method.budget, "settings": method.settings(), **changes}
    try:
        type(method).create(method.preset, **arguments)  # type: ignore[arg-type]
    except UsageError as error:
        return "" if str(error).strip() and "\n" not in str(error) else "message is not one line"
    return f"{changes} is accepted, expected a UsageError"


def _refuses_bad_budgets(method: Method) -> str:
    always = method.sinks + method.recent_kept(1)
    wrong = (None, 0, -1, "0%", "101%", "many", always)
    return next(filter(None, (_refuses(method, budget=b) for b in wrong)), "")


def _refuses_bad_settings(method: Method) -> str:
    cases = ({"no_such_parameter": "1"}, {"interval": "0"}, {"interval": "x"}, {"trigger": "never"})
    return next(filter(None, (_refuses(method, settings=case) for case in cases)), "")


def _repeats_from_settings(method: Method) -> str:
    again = type(method).create(method.preset, method.budget, method.settings())
    return "" if again == method else f"create(settings()) gives {again}, expected {method}"


def _takes_shares(method: Method) -> str:
    """Take a share of the length too, never below what is always kept."""
    share = type(method).create(method.preset, "25%", method.settings())
    for now in (1, 400, 4001):
        size, least = share.budget_at(now), share.sinks + share.recent_kept(share.budget_at(now))
        if size < -(-now // 4) or size <= least:
            return f"25% of {now} tokens: a budget of {size}, {least} of them always kept"
    return ""


_SETTINGS_CHECKS: dict[str, Callable[[Method], str]] = {
    "refuses bad budgets": _refuses_bad_budgets,
    "refuses bad settings": _refuses_bad_settings,
    "its settings rebuild it": _repeats_from_settings,
    "takes a share of the length as a budget": _takes_shares,
}
