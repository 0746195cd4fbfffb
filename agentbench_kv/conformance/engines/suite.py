"""The engine suite: one engine, several methods, two model families.

What `kvbench selftest engine` runs; each part is on an engine that runs or is started for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from agentbench_kv.conformance import CheckResult, guarded
from agentbench_kv.conformance.driver import SessionTrace
from agentbench_kv.conformance.engines.checks import (
    check_cancel,
    check_context_limit,
    check_crowd,
    check_leaks,
    check_restart,
    check_stops,
)
from agentbench_kv.conformance.engines.comparison import (
    accounting_problem,
    check_reference,
    compare,
    kept_problem,
    reason_problem,
    token_problem,
)
from agentbench_kv.conformance.engines.fixture import (
    FAMILIES,
    SMALL_POOL,
    Fixture,
    Sessions,
    crowd,
    long_sessions,
    open_fixture,
)
from agentbench_kv.conformance.engines.forks import (
    check_forced,
    check_forks,
    check_given_crowd,
    check_predicted,
    check_tree,
)
from agentbench_kv.conformance.engines.forms import check_forms
from agentbench_kv.conformance.engines.memories import WAYS, memory_part
from agentbench_kv.conformance.engines.prefixes import SHARING, shared_part
from agentbench_kv.conformance.engines.rewinds import check_rewinds
from agentbench_kv.engines.base import Capability
from agentbench_kv.errors import KVBenchError, UsageError
from agentbench_kv.methods.base import Method
from agentbench_kv.registry import load_engine

METHODS = ("full", "full-constrained", "streamingllm", "snapkv", "rkv", "agentkv")
"""Every engine that compresses runs these."""
OPTIONAL = ("h2o", "triattention", "streamingllm@paper", "agentkv@system", "random@prompt")
"""An engine may refuse these."""
QUICK = ("full-constrained", "streamingllm", "agentkv")
SMALL_CHUNKS: Mapping[str, Mapping[str, str]] = {
    "vllm": {"max-num-batched-tokens": "256"},
    "sglang": {"chunked-prefill-size": "256"},
}
"""Options that make an engine prefill the suite's longest prompts in several chunks."""
_MIN_EVENTS = 5

Results = dict[str, list[CheckResult]]
Part = tuple[str, Callable[[], list[CheckResult]]]


def engine_suite(
    engine: str | Any,
    *,
    methods: Sequence[str] = (),
    families: Sequence[str] = (),
    quick: bool = False,
    engine_args: Mapping[str, str] | None = None,
    device: str = "auto",
    report: Callable[[str, list[CheckResult]], None] = lambda _part, _results: None,
) -> Results:
    """Run every check there is on one engine, in float32, beside a reference on the CPU.

    `engine` is a registered name, or a class with `create(options)`; `methods` are `name` or
    `name@preset`, `families` of `fixture.FAMILIES`: all if empty, a few if `quick`, which also
    means fewer random sessions and no restart. `engine_args` are options of a serving engine's own
    command line, `device` is where it computes; `report` is told every part as soon as it is done.
    Returns part -> its results; a part that raises is one failed result. UsageError or
    PrerequisiteError for an engine, method or family that does not exist, or an engine that cannot
    start here.
    """
    cls = load_engine(engine) if isinstance(engine, str) else engine
    if Capability.TEXT in cls.capabilities or Capability.COMPRESS not in cls.capabilities:
        raise UsageError(
            f"{cls.__name__} has no KV cache that methods can compress, so there is nothing to "
            "check; kvbench ls engines shows who has"
        )
    engine_args = {**SMALL_CHUNKS.get(str(engine), {}), **(engine_args or {})}
    names = methods or (QUICK if quick else (*METHODS, *OPTIONAL))
    results: Results = {}
    for index, family in enumerate(families or (FAMILIES[:1] if quick else FAMILIES)):
        with open_fixture(cls, family, engine_args, device) as fixture:
            parts = _method_parts(fixture, names)
            if index == 0:
                parts += _edge_parts(fixture, names, quick)
            for part, check in parts:
                # An engine that cannot even start raises.
                results[part] = guarded(check, () if results else (KVBenchError,))
                report(part, results[part])
    return results


def _method_parts(fixture: Fixture, names: Sequence[str]) -> list[Part]:
    methods = [fixture.method(name) for name in names]
    return [
        (
            f"{fixture.family}, {method.label}",
            partial(method_part, fixture, method, optional=name in OPTIONAL),
        )
        for name, method in zip(names, methods, strict=True)
    ]


def _edge_parts(fixture: Fixture, names: Sequence[str], quick: bool) -> list[Part]:
    """Return what does not depend on the model, for one method that compresses."""
    able = [method for name in names if (method := fixture.method(name)).compresses]
    if not able:
        return []
    main = next((method for method in able if method.name == "agentkv"), able[-1])
    plain = fixture.method("full-constrained")
    parts: list[Part] = [
        (f"endings, {main.label}", partial(stop_part, fixture, main)),
        *_fork_parts(fixture, names, main, plain),
        *(
            (
                f"tree of forks, {each.label}",
                partial(tree_part, fixture, each, 40 if quick else 200),
            )
            for each in (main, plain)
        ),
        *_shared_parts(fixture, names, main, quick),
        *(
            (f"memory, sets={sets}", partial(memory_part, fixture, sets))
            for sets in (WAYS[:1] if quick else WAYS)
        ),
        (f"small pool, {plain.label}", partial(crowd_part, fixture, plain)),
        (f"small pool, {main.label}", partial(crowd_part, fixture, main)),
        ("leaks", partial(leak_part, fixture, main, examples=4 if quick else 20)),
        ("restart", lambda: check_restart(fixture.driver(main, SMALL_POOL), fixture.network)),
    ]
    return parts[:-1] if quick else parts


def _shared_parts(fixture: Fixture, names: Sequence[str], main: Method, quick: bool) -> list[Part]:
    chosen = [name for name in SHARING if name in names] or [main.name]
    return [
        (f"shared prefix, {name}", partial(shared_part, fixture, name))
        for name in (chosen[:1] if quick else chosen)
    ]


def _fork_parts(fixture: Fixture, names: Sequence[str], main: Method, plain: Method) -> list[Part]:
    """Return forks of methods that keep different things: queries, nothing, sums, turned keys."""
    others = [fixture.method(name) for name in ("h2o", "streamingllm@paper") if name in names]
    # `full` may be a server as shipped, which takes given answers in another way.
    shipped = [fixture.method("full")] if "full" in names else []
    methods = [main, plain, *shipped, *(others if fixture.has(Capability.FORK) else [])]
    return [(f"forks, {each.label}", partial(fork_part, fixture, each)) for each in methods]


def method_part(
    fixture: Fixture, method: Method, *, optional: bool = False, sessions: Sessions | None = None
) -> list[CheckResult]:
    """Check one method: tokens, kept sets and accounting of sessions together and alone.

    An engine may refuse an `optional` method with a UsageError.
    """
    try:
        fixture.check_needs(method)
        driver = fixture.driver(method)
    except UsageError as error:
        if not optional:
            raise
        return [CheckResult("runs", True, str(error), skipped=True)]
    sessions = sessions or long_sessions()
    with fixture.reference(method) as reference:
        expected = reference.play(sessions)
        rewound = check_rewinds(driver, reference)
        held = check_forms(driver, reference, fixture.codec)
    found, alone = driver.play(sessions), driver.play(sessions, together=False)
    return [
        _check_device(fixture.device, driver.engine.info.device),
        compare("tokens are the embedded engine's", expected, found, _output_problem),
        check_reference(fixture.network, found, method.positions),
        compare("kept sets are the embedded engine's", expected, found, kept_problem),
        _check_accounting(method, expected, found),
        _check_recomputed(method, found),
        _check_events(method, found),
        compare("sessions together are as alone", alone, found, _any_problem),
        rewound,
        held,
    ]


def _check_device(asked: str, found: str) -> CheckResult:
    """Check that the rest is about the device that was asked for."""
    gpu = asked.startswith("cuda")
    right = (found != "cpu") == gpu or asked == "auto"
    return CheckResult("computes where it was asked to", right, f"{asked}: {found}")


def _output_problem(expected: SessionTrace, found: SessionTrace) -> str:
    return token_problem(expected, found) or reason_problem(expected, found)


def _any_problem(expected: SessionTrace, found: SessionTrace) -> str:
    problems = (_output_problem, kept_problem, accounting_problem)
    return next(filter(None, (problem(expected, found) for problem in problems)), "")


def _check_accounting(
    method: Method, expected: Mapping[str, SessionTrace], found: Mapping[str, SessionTrace]
) -> CheckResult:
    name = "accounting is the embedded engine's"
    silent = not any(t.stats.prefill_tokens or t.stats.decode_tokens for t in found.values())
    if method.name == "full" and silent:
        why = "the engine as shipped keeps no accounts"
        return CheckResult(name, True, why, skipped=True)
    return compare(name, expected, found, accounting_problem)


def _check_recomputed(method: Method, found: Mapping[str, SessionTrace]) -> CheckResult:
    tokens = sum(trace.stats.recomputed for trace in found.values())
    # As shipped, an engine's prefix cache may keep whole blocks only.
    right = not tokens or method.name == "full"
    return CheckResult("nothing is computed again", right, f"{tokens} tokens")


def _check_events(method: Method, found: Mapping[str, SessionTrace]) -> CheckResult:
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


def fork_part(fixture: Fixture, method: Method) -> list[CheckResult]:
    """Check forks and forced answers, where the engine has them."""
    driver = fixture.driver(method)
    with fixture.reference(method) as reference:
        return [
            *check_forks(driver, reference),
            *check_forced(driver, reference),
            *check_predicted(driver, reference),
        ]


def tree_part(fixture: Fixture, method: Method, steps: int) -> list[CheckResult]:
    """Check a tree of forks, where the engine has forks and forced answers."""
    with fixture.reference(method) as reference:
        return [check_tree(fixture.driver(method, SMALL_POOL), reference, steps)]


def crowd_part(fixture: Fixture, method: Method) -> list[CheckResult]:
    """Check ten sessions at once in a cache that does not hold them."""
    sessions = crowd()
    with fixture.reference(method) as reference:
        expected = reference.play(sessions)
        driver = fixture.driver(method, SMALL_POOL)
        found = driver.play(sessions)
        given = [] if method.compresses else [check_given_crowd(driver, reference)]
    return [check_crowd(fixture.network, method.positions, expected, found), *given]


def leak_part(fixture: Fixture, method: Method, examples: int) -> list[CheckResult]:
    return [check_leaks(fixture.driver(method, SMALL_POOL), examples)]
