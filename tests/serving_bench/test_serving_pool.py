"""The most that sessions take up of an engine's memory, while something is measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from agentbench_kv.conformance.driver import TraceRecorder, in_memory_engine, plain_phases
from agentbench_kv.conformance.reference import tiny_model
from agentbench_kv.engines.base import EngineOptions, Sampling
from agentbench_kv.engines.core.block_engine import BlockEngine
from agentbench_kv.engines.embedded.engine import EmbeddedEngine
from agentbench_kv.engines.embedded.slots import SMALLEST
from agentbench_kv.engines.serving.engine import ServingEngine
from agentbench_kv.errors import KVBenchError
from agentbench_kv.phases import TokenPhases
from agentbench_kv.registry import make_method
from agentbench_kv.serving_bench.pool import PoolWatch


def engine_that_says(answers: list[Any]) -> Any:
    """An engine that gives these answers, raises those that are errors, and then says nothing."""

    def peak() -> int | None:
        answer = answers.pop(0) if answers else None
        if isinstance(answer, Exception):
            raise answer
        return answer

    return SimpleNamespace(pool_peak=peak, drop_prefixes=lambda: None, restarts=0)


def waited(until: Callable[[], bool]) -> None:
    for _ in range(2000):
        if until():
            return
        time.sleep(0.005)
    pytest.fail("nothing happened")


def test_the_most_is_kept_and_what_came_before_is_not() -> None:
    said = [90, 10, 30, 20]
    with PoolWatch(engine_that_says(said), every_s=0.001) as watch:
        watch.begin()
        waited(lambda: not said)
    assert watch.peak == 30


def test_an_engine_is_asked_at_the_end_too() -> None:
    said = [90, 40]
    with PoolWatch(engine_that_says(said), every_s=60) as watch:
        watch.begin()
        assert said == [40]
    assert watch.peak == 40


def test_a_server_that_is_gone_for_a_while_is_asked_again() -> None:
    said = [0, 10, KVBenchError("gone"), OSError("gone"), 30]
    with PoolWatch(engine_that_says(said), every_s=0.001) as watch:
        watch.begin()
        waited(lambda: not said)
    assert watch.peak == 30


def test_a_measurement_that_never_began_has_no_peak() -> None:
    with PoolWatch(engine_that_says([90, 40])) as watch:
        pass
    assert watch.peak is None


def test_a_cache_that_was_not_emptied_is_told() -> None:
    def keep() -> None:
        raise KVBenchError("it kept\nits cache")

    engine = SimpleNamespace(pool_peak=lambda: None, drop_prefixes=keep, restarts=0)
    with PoolWatch(engine, every_s=60) as watch:  # type: ignore[arg-type]
        watch.begin()
    assert (watch.kept, watch.restarts) == ("it kept its cache", 0)


@pytest.mark.parametrize("managed", [False, True], ids=["an engine", "below a method of spans"])
def test_what_an_engine_says_since_the_warm_up_is_counted(
    monkeypatch: pytest.MonkeyPatch, managed: bool
) -> None:
    """EVOKE's engine is around another, whose restarts, pool and prefixes nobody asked for."""
    below: Any = ServingEngine.__new__(ServingEngine)
    below._backend = SimpleNamespace(restarts=1)  # in the warm-up
    dropped: list[Any] = []
    monkeypatch.setattr(ServingEngine, "pool_peak", lambda _: 70)
    monkeypatch.setattr(ServingEngine, "pool", lambda _: {"max_live_tokens": 9})
    monkeypatch.setattr(ServingEngine, "drop_prefixes", lambda own: dropped.append(own))
    engine = below
    if managed:
        engine = BlockEngine.__new__(BlockEngine)
        engine.below = below
    with PoolWatch(engine, every_s=60) as watch:
        watch.begin()
        below._backend.restarts = 3
    assert (watch.restarts, watch.peak, dropped) == (2, 70, [below])
    assert engine.pool() == {"max_live_tokens": 9}


def test_prefixes_of_measurements_before_are_dropped_first() -> None:
    kept = [1]
    own: Any = {"pool_peak": lambda: 10 * len(kept), "drop_prefixes": kept.clear, "restarts": 0}
    with PoolWatch(SimpleNamespace(**own), every_s=60) as watch:  # type: ignore[arg-type]
        watch.begin()
    assert watch.peak is None


@pytest.mark.parametrize("engine", [None, engine_that_says([]), engine_that_says([0, 0, 0])])
def test_what_is_not_known_is_none(engine: Any) -> None:
    with PoolWatch(engine, every_s=0.001) as watch:
        watch.begin()
    assert watch.peak is None


def test_the_embedded_engine_counts_slots_that_sessions_use() -> None:
    engine = in_memory_engine(tiny_model(), make_method("full", None), TraceRecorder())
    try:
        assert engine.pool_peak() == 0
        for name, tokens in (("a", 10), ("b", SMALLEST + 1)):
            engine.open(name, TokenPhases())
            ids = [1 + n % 60 for n in range(tokens)]
            engine.extend(name, ids, plain_phases(ids))
            list(engine.generate(name, Sampling(max_tokens=1)))
        size = engine.bytes_per_token
        engine.close("b")
        waited(lambda: engine._scheduler.pools.used == SMALLEST * size)  # it is gone by now
        assert engine.pool_peak() == (SMALLEST + 2 * SMALLEST) * size
        waited(lambda: engine.pool_peak() == SMALLEST * size)
    finally:
        engine.shutdown()


def test_rows_of_a_simulated_precision_take_up_what_nobody_knows() -> None:
    options = EngineOptions("in-memory", make_method("full", None), device="cpu", kv_dtype="int8")
    engine = EmbeddedEngine.create(options, model=tiny_model())
    assert engine.pool_peak() is None
    engine.shutdown()
