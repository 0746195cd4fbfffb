"""The scheduler's ledger against the embedded engine's own accounting."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentbench_kv.conformance.reference import tiny_model
from agentbench_kv.engines.base import EngineOptions, KVStats, Sampling
from agentbench_kv.engines.core.session import SessionLedger
from agentbench_kv.engines.embedded.engine import EmbeddedEngine
from agentbench_kv.methods.base import Method
from agentbench_kv.phases import TokenPhases
from agentbench_kv.registry import make_method

Turns = list[tuple[int, int]]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model(layers=1)


def embedded_stats(model: Any, method: Method, turns: Turns) -> tuple[KVStats, int]:
    options = EngineOptions(model="in-memory", method=method, device="cpu", max_live_tokens=10**6)
    engine = EmbeddedEngine.create(options, model=model)
    try:
        engine.open("s", TokenPhases())
        for prompt, decode in turns:
            ids = [index % 60 for index in range(prompt)]
            engine.extend("s", ids, [TokenPhases().label(token) for token in ids])
            list(engine.generate("s", Sampling(max_tokens=decode)))
        return engine.close("s"), engine.bytes_per_token
    finally:
        engine.shutdown()


def ledger_stats(method: Method, turns: Turns, bytes_per_token: int) -> KVStats:
    ledger = SessionLedger(method, bytes_per_token)
    carried = 0
    for prompt, decode in turns:
        ledger.begin_turn(prompt)
        ledger.forward(prompt + carried)
        ledger.sampled()
        for _ in range(decode - 1):
            ledger.forward(1)
            ledger.sampled()
        ledger.end_turn()
        carried = 1
    return ledger.snapshot()


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    turns=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 30)), min_size=1, max_size=4),
    budget=st.integers(8, 40),
    interval=st.integers(1, 20),
    trigger=st.sampled_from(["every", "slack", "turn", "prefill+every"]),
)
def test_events_and_figures_are_the_embedded_engines(
    model: Any, turns: Turns, budget: int, interval: int, trigger: str
) -> None:
    settings = {"interval": interval, "trigger": trigger}
    method = make_method("streamingllm", budget, settings)
    expected, size = embedded_stats(model, method, turns)
    got = ledger_stats(method, turns, size)
    assert [(e.decoded, e.logical, e.live_before, e.live_after) for e in got.events] == [
        (e.decoded, e.logical, e.live_before, e.live_after) for e in expected.events
    ]
    # One token more is known than fed, and only a worker knows the rows that moved.
    aside = {"events", "rows_moved", "logical"}
    assert {k: v for k, v in vars(got).items() if k not in aside} == {
        k: v for k, v in vars(expected).items() if k not in aside
    }
    assert got.logical == expected.logical - 1


def test_lost_rows_are_counted_and_events_start_over() -> None:
    method = make_method("streamingllm", 16, {"interval": 8, "trigger": "prefill+every"})
    ledger = SessionLedger(method, 1)
    ledger.begin_turn(40)
    ledger.forward(40)
    assert ledger.sampled() is not None
    assert (ledger.live, ledger.deficit) == (16, 24)
    ledger.lose()
    assert (ledger.live, ledger.fed, ledger.deficit) == (0, 0, 0)
    assert ledger.stats.recomputed == 0  # a session that is closed now never will be
    ledger.begin_turn(45)
    assert (ledger.stats.recomputed, ledger.stats.restarts) == (40, [(1, 45)])
    ledger.forward(45)
    eviction = ledger.sampled()
    assert eviction is not None
    assert (eviction.live, eviction.keep, eviction.logical, eviction.prompt) == (45, 16, 45, 45)
    assert ledger.stats.longest_prefill == 45


def test_rows_moved_are_added_to_their_event() -> None:
    method = make_method("streamingllm", 16, {"trigger": "prefill+every"})
    ledger = SessionLedger(method, 1)
    ledger.begin_turn(40)
    ledger.forward(40)
    ledger.sampled()
    ledger.moved(0, 7)
    stats = ledger.snapshot()
    assert (stats.rows_moved, stats.events[0].rows_moved) == (7, 7)


def test_a_token_nobody_wanted_does_not_count() -> None:
    method = make_method("streamingllm", 16, {"interval": 5})
    wanted, taken = SessionLedger(method, 1), SessionLedger(method, 1)
    for ledger in (wanted, taken):
        ledger.begin_turn(20)
        ledger.forward(20)
        ledger.sampled()
        for _ in range(2):
            ledger.forward(1)
            ledger.sampled()
    taken.forward(1)
    taken.sampled()
    assert taken.take_back()
    wanted.begin_turn(7)
    wanted.forward(8)
    taken.begin_turn(7)
    taken.forward(7)
    for _ in range(8):
        evictions = [ledger.sampled() for ledger in (wanted, taken)]
        assert evictions[0] == evictions[1]
        for ledger in (wanted, taken):
            ledger.forward(1)
    assert wanted.stats.decode_tokens == taken.stats.decode_tokens
    assert [e.logical for e in wanted.stats.events] == [e.logical for e in taken.stats.events] != []


def test_a_token_with_an_event_cannot_be_taken_back() -> None:
    method = make_method("streamingllm", 16, {"interval": 1})
    ledger = SessionLedger(method, 1)
    ledger.begin_turn(20)
    ledger.forward(20)
    assert ledger.sampled() is not None
    assert not ledger.take_back()
