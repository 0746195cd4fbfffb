"""The engine conformance suite: one engine, several methods, two model families."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from agentbench_kv.conformance.engines.bench import Bench, Subject, open_bench
from agentbench_kv.conformance.engines.models import FAMILIES
from agentbench_kv.conformance.engines.parts import (
    crowd_part,
    ending_part,
    leak_part,
    method_part,
    restart_part,
)
from agentbench_kv.conformance.result import CheckResult
from agentbench_kv.engines.base import Capability
from agentbench_kv.errors import KVBenchError, UsageError
from agentbench_kv.methods.base import Method
from agentbench_kv.registry import load_engine

__all__ = ["METHODS", "OPTIONAL", "QUICK", "engine_suite"]

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
    _refuse(cls)
    subject = Subject(cls, {**SMALL_CHUNKS.get(str(engine), {}), **(engine_args or {})})
    names = methods or (QUICK if quick else (*METHODS, *OPTIONAL))
    results: Results = {}
    for index, family in enumerate(families or (FAMILIES[:1] if quick else FAMILIES)):
        with open_bench(subject, family) as bench:
            found = _method_parts(bench, names)
            if index == 0:
                found += _edge_parts(bench, names, quick)
            for part, check in found:
                results[part] = _guarded(check, first=not results)
                report(part, results[part])
    return results


def _refuse(cls: Any) -> None:
    if Capability.TEXT in cls.capabilities or Capability.COMPRESS not in cls.capabilities:
        raise UsageError(
            f"{cls.__name__} has no KV cache that methods can compress, so there is nothing to "
            "check; kvbench ls engines shows who has"
        )


def _method_parts(bench: Bench, names: Sequence[str]) -> list[Part]:
    built = [(name, bench.method(name)) for name in names]
    return [
        (
            f"{bench.family}, {method.label}",
            partial(method_part, bench, method, optional=name in OPTIONAL),
        )
        for name, method in built
    ]


def _edge_parts(bench: Bench, names: Sequence[str], quick: bool) -> list[Part]:
    """Return what does not depend on the model, for one method that compresses."""
    able = [method for name in names if (method := bench.method(name)).compresses]
    if not able:
        return []
    main, plain = _main(able), bench.method("full-constrained")
    parts: list[Part] = [
        (f"endings, {main.label}", partial(ending_part, bench, main)),
        (f"small pool, {plain.label}", partial(crowd_part, bench, plain)),
        (f"small pool, {main.label}", partial(crowd_part, bench, main)),
        ("leaks", partial(leak_part, bench, main, examples=4 if quick else 20)),
    ]
    return parts if quick else [*parts, ("restart", partial(restart_part, bench, main))]


def _main(able: Sequence[Method]) -> Method:
    return next((method for method in able if method.name == "agentkv"), able[-1])


def _guarded(check: Callable[[], list[CheckResult]], *, first: bool) -> list[CheckResult]:
    """Run a part; an engine that cannot even start is the caller's to hear of."""
    try:
        return check()
    except Exception as error:
        if first and isinstance(error, KVBenchError):
            raise
        return [CheckResult("runs to the end", False, f"{type(error).__name__}: {error}")]
