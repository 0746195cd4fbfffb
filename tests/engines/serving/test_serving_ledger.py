"""The session ledger, alone and in the embedded engine, against a replay of the accounting."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentbench_kv.conformance.reference import tiny_model
from agentbench_kv.engines.base import EngineOptions, KVEvent, KVStats, Sampling
from agentbench_kv.engines.core.ledger import SessionLedger
from agentbench_kv.engines.embedded.engine import EmbeddedEngine
from agentbench_kv.engines.serving.session import ObservedLedger
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


def replayed_stats(
    budget: int, interval: int, trigger: str, turns: Turns, bytes_per_token: int
) -> KVStats:
    """The accounting as its fields are described, counted step by step."""
    found = KVStats(budget=budget)

    def event() -> None:
        row = KVEvent(found.decode_tokens, found.logical, found.live, budget, rows_moved=0)
        found.events.append(row)
        found.evicted += found.live - budget
        found.live = budget

    for number, (prompt, decode) in enumerate(turns):
        found.prefill_tokens += prompt
        found.longest_prefill = max(found.longest_prefill, prompt)
        for step in range(decode):
            rows = 1 if step else prompt + (number > 0)
            found.live += rows
            found.logical += rows
            found.peak_live = max(found.peak_live, found.live)
            found.bytes_read += found.live * bytes_per_token if step else 0
            if not step and trigger == "prefill+every" and found.live > budget:
                event()
            found.decode_tokens += 1
            found.decode_kv_sum += found.live
            due = found.decode_tokens % interval == 0 and trigger in ("every", "prefill+every")
            if (due and found.live > budget) or (
                trigger == "slack" and found.live >= budget + interval
            ):
                event()
        if trigger == "turn" and found.live > budget:
            event()
    found.peak_bytes = found.peak_live * bytes_per_token
    return found


def unmoved(stats: KVStats) -> KVStats:
    """The accounting without the rows that moved, which only a worker knows."""
    events = [replace(event, rows_moved=0) for event in stats.events]
    return replace(stats, events=events, rows_moved=0)


TURNS = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 30)), min_size=1, max_size=4)
TRIGGERS = st.sampled_from(["every", "slack", "turn", "prefill+every"])


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(turns=TURNS, budget=st.integers(8, 40), interval=st.integers(1, 20), trigger=TRIGGERS)
def test_events_and_figures_are_those_of_a_replay(
    model: Any, turns: Turns, budget: int, interval: int, trigger: str
) -> None:
    method = make_method("streamingllm", budget, {"interval": interval, "trigger": trigger})
    embedded, size = embedded_stats(model, method, turns)
    expected = replayed_stats(budget, interval, trigger, turns, size)
    assert unmoved(ledger_stats(method, turns, size)) == expected
    # The last token is known to the engine, and not fed.
    assert unmoved(embedded) == replace(expected, logical=expected.logical + 1)


@settings(deadline=None)
@given(
    turns=TURNS,
    budget=st.sampled_from([8, 30, "25%", "60%"]),
    interval=st.integers(1, 20),
    trigger=TRIGGERS,
)
def test_a_turn_holds_no_more_rows_than_it_was_said_to_need(
    turns: Turns, budget: int | str, interval: int, trigger: str
) -> None:
    method = make_method("streamingllm", budget, {"interval": interval, "trigger": trigger})
    ledger, carried = SessionLedger(method, 1), 0
    for prompt, decode in turns:
        needed = ledger.rows_needed(prompt + carried, decode)
        assert needed <= ledger.live + prompt + carried + decode
        ledger.begin_turn(prompt)
        for step in range(decode):
            ledger.forward(1 if step else prompt + carried)
            assert ledger.live <= needed
            ledger.sampled()
        ledger.end_turn()
        carried = 1


def test_rows_that_come_back_count_as_restored() -> None:
    ledger = SessionLedger(make_method("full", None), 1)
    ledger.begin_turn(40)
    ledger.forward(40)
    ledger.evict(30)
    ledger.forward(8)
    ledger.restore(10, moved=3)
    stats = ledger.snapshot()
    assert (stats.live, stats.evicted, stats.restored, stats.rows_moved) == (48, 10, 10, 3)
    assert (stats.peak_live, len(stats.events)) == (48, 1)


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


@pytest.mark.parametrize(
    ("name", "budget", "protect", "stay"),
    [
        ("triattention", 149, "prompt", False),
        ("triattention", 150, "prompt", True),
        ("triattention", 250, "prompt", True),
        ("triattention", "70%", "prompt", False),
        ("triattention", "100%", "prompt", True),
        ("triattention", 149, "system", True),  # no event fires
        ("triattention", 151, "system", True),
        ("streamingllm", 149, "prompt", True),
        ("streamingllm", "70%", "prompt", True),
        ("streamingllm", 180, "system", True),
        ("streamingllm", 149, "none", False),
        ("streamingllm", 250, "149", False),
    ],
)
def test_first_rows_are_protected_where_whatever_event_fires_keeps_them(
    name: str, budget: int | str, protect: str, stay: bool
) -> None:
    """Of a system message of 150 tokens in a prompt of 200."""
    settings = {"interval": 8, "protect": protect, "prefix": "shared"}
    method = make_method(name, budget, settings)
    ledger = SessionLedger(method, 1)
    ledger.opens_with(200, 150)
    assert ledger.protects(150) is stay
    ledger.begin_turn(200)
    for rows in [200] + [1] * 200:
        ledger.forward(rows)
        eviction = ledger.sampled()
        if eviction is not None and stay:
            assert eviction.keep >= 150
    assert ledger.protects(150) is stay


@pytest.mark.parametrize("taken_back", [False, True])
@pytest.mark.parametrize("fed", [0, 8, 13])
def test_of_a_prefill_that_was_cut_off_what_was_read_counts(fed: int, taken_back: bool) -> None:
    ledger = SessionLedger(make_method("full", None), 1)
    ledger.begin_turn(40)
    ledger.forward(40)
    ledger.sampled()
    ledger.forward(1)
    ledger.sampled()
    # What is fed next begins with the last sampled token, unless nobody wanted that.
    unfed = 0 if taken_back and ledger.take_back() else 1
    ledger.begin_turn(20)
    for rows in (fed // 2, fed - fed // 2):
        if rows:
            ledger.forward(rows)
    ledger.lose()
    read = 40 + max(0, fed - unfed)
    assert ledger.stats.prefill_tokens == read
    ledger.begin_turn(61 + unfed)
    ledger.forward(61 + unfed)
    ledger.sampled()
    ledger.lose()
    assert (ledger.stats.prefill_tokens, ledger.stats.recomputed) == (read + 61 + unfed, 41 + fed)


def test_a_found_prefix_is_read_of_a_prefill_that_is_cut_off() -> None:
    ledger = SessionLedger(make_method("full", None), 1)
    ledger.begin_turn(40)
    ledger.find(16, 16)
    ledger.forward(10)
    ledger.lose()
    assert (ledger.stats.prefill_tokens, ledger.stats.cached_tokens) == (26, 16)


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


def test_a_prefill_that_brought_no_token_is_counted_when_it_comes_again() -> None:
    ledger = ObservedLedger(8, None)
    ledger.begin(10)  # the server died meanwhile
    ledger.end(None)
    assert (ledger.stats.prefill_tokens, ledger.stats.recomputed) == (0, 0)
    ledger.begin(10)
    for _ in range(3):
        ledger.token()
    ledger.end(0)
    assert (ledger.stats.prefill_tokens, ledger.stats.longest_prefill) == (10, 10)
    ledger.begin(20)  # 12 fed, one generated and never fed, 7 new
    ledger.end(12)
    assert ledger.stats.prefill_tokens == 10
    ledger.begin(20)
    ledger.token()
    ledger.end(12)
    assert (ledger.stats.prefill_tokens, ledger.stats.recomputed) == (17, 0)


def test_what_was_done_before_a_rewind_stays_counted() -> None:
    ledger = SessionLedger(make_method("full", None), 10)
    ledger.begin_turn(40)
    ledger.forward(40)
    ledger.sampled()
    ledger.forward(1)
    ledger.sampled()
    ledger.evict(30)
    before = ledger.snapshot()
    ledger.rewind(25, 14)
    assert ledger.snapshot() == replace(before, logical=25, live=14)
    assert ledger.deficit == 11
    assert ledger.take_back()  # the last sampled token went; there is nothing to uncount
    assert ledger.stats.decode_tokens == 2
    ledger.lose()
    ledger.rewind(10, 0)
    ledger.begin_turn(12)
    assert ledger.stats.recomputed == 10
    ledger.forward(12)
    eviction = ledger.evict(6)
    assert eviction.prompt == 12


@settings(deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.integers(0, 30), st.integers(1, 12), st.booleans(), st.floats(0, 1)),
        max_size=8,
    )
)
def test_a_stock_server_is_counted_as_its_tokens_go(
    steps: list[tuple[int, int, bool, float]],
) -> None:
    """Turns and rewinds of a session whose prefix cache holds whole blocks of eight."""
    ledger, tokens, fed, drawn, live = ObservedLedger(1, None), 0, 0, 0, 0
    prefilled = decoded = again = 0
    for prompt, answer, goes_back, share in steps:
        if goes_back:
            length = round(share * tokens)
            drawn *= length > fed
            tokens, fed = length, min(fed, length)
            ledger.rewind(length, fed)
            live = fed
        tokens += prompt + (tokens == fed and not prompt)
        prefilled += tokens - fed - drawn
        again += fed % 8
        ledger.begin(tokens)
        for _ in range(answer):
            ledger.token()
        ledger.end(fed - fed % 8)
        tokens += answer
        decoded += answer
        fed, drawn, live = tokens - 1, 1, tokens - 1
        stats = ledger.snapshot()
        assert (stats.live, stats.logical, ledger.fed) == (live, fed, fed)
        found = (stats.prefill_tokens, stats.decode_tokens, stats.recomputed)
        assert found == (prefilled, decoded, again)
