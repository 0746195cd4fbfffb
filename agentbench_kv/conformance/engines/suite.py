"""The whole engine suite: one engine, several methods, two model families."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from agentbench_kv.conformance.engines.bench import Fixture, open_fixture
from agentbench_kv.conformance.engines.models import FAMILIES
from agentbench_kv.conformance.engines.parts import (
    crowd_part,
    leak_part,
    method_part,
    restart_part,
    stop_part,
)
from agentbench_kv.conformance.result import CheckResult, guarded
from agentbench_kv.engines.base import Capability
from agentbench_kv.errors import KVBenchError, UsageError
from agentbench_kv.registry import load_engine

METHODS = ("full", "full-constrained", "streamingllm", "snapkv", "rkv", "agentkv")
"""Every engine that compresses runs these."""
OPTIONAL = ("h2o", "triattention", "streamingllm@paper")
"""An engine may refuse these."""
QUICK = ("full-constrained", "streamingllm", "agentkv")

SMALL_CHUNKS: Mapping[str, Mapping[str, str]] = {
    "vllm": {"max-num-batched-tokens": "256"},
    "sglang": {"chunked-prefill-size": "256"},
}
"""Options that make an engine prefill the suite's longest prompts in several chunks."""

Results = dict[str, list[CheckResult]]
Part = tuple[str, Callable[[], list[CheckResult]]]


def engine_suite(
    engine: str | Any,
    *,
    methods: Sequence[str] = (),
    families: Sequence[str] = (),
    quick: bool = False,
    engine_args: Mapping[str, str] | None = None,
    report: Callable[[str, list[CheckResult]], None] = lambda _part, _results: None,
) -> Results:
    """Run every check there is on one engine, in float32 on the CPU.

    Parameters
    ----------
    engine : str or engine class
        A registered name, or a class with `create(options)`.
    methods : sequence of str
        `name` or `name@preset`; all if empty, a few if `quick`.
    families : sequence of str
        Of `models.FAMILIES`; all if empty, the first if `quick`.
    quick : bool
        Fewer random sessions, no restart.
    engine_args : mapping, optional
        Options of a serving engine's own command line.
    report : callable
        Told every part as soon as it is done.

    Returns
    -------
    dict
        Part -> its results. A part that raises is one failed result.

    Raises
    ------
    UsageError, PrerequisiteError
        For an engine, method or family that does not exist, or an engine that cannot start here.
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
        with open_fixture(cls, family, engine_args) as fixture:
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
        (f"small pool, {plain.label}", partial(crowd_part, fixture, plain)),
        (f"small pool, {main.label}", partial(crowd_part, fixture, main)),
        ("leaks", partial(leak_part, fixture, main, examples=4 if quick else 20)),
    ]
    return parts if quick else [*parts, ("restart", partial(restart_part, fixture, main))]
