"""EVOKE in a session, over a cache that is a set of positions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentbench_kv.errors import UsageError
from agentbench_kv.methods.evoke.method import Evoke
from agentbench_kv.methods.spans import Block, Hints, Source, TurnNotes
from agentbench_kv.registry import make_method

BYTES = 10


class Positions:
    """A `SpanCache` that only knows which positions it holds."""

    def __init__(self, name: str = "s") -> None:
        self.name = name
        self.held: set[int] = set()
        self.fed = 0
        self.losses = 0
        self.calls: list[str] = []

    @property
    def live(self) -> int:
        return len(self.held)

    def feed(self, upto: int) -> None:
        self.held |= set(range(self.fed, upto))
        self.fed = upto

    def save(self, start: int, end: int) -> Block:
        assert set(range(start, end)) <= self.held
        return Block(start, end, start, np.zeros((end - start) * BYTES, np.uint8))

    def evict(self, spans: Sequence[tuple[int, int]]) -> int:
        before = self.live
        for start, end in spans:
            assert set(range(start, end)) <= self.held
            self.held -= set(range(start, end))
        self.calls.append("evict")
        return before - self.live

    def restore(self, block: Block) -> None:
        assert not set(range(block.start, block.end)) & self.held
        assert block.end <= self.fed
        self.held |= set(range(block.start, block.end))
        self.calls.append("restore")

    def attention(
        self, spans: Sequence[tuple[int, int]], layers: Sequence[int], decay: float
    ) -> list:
        assert layers == ()
        assert decay == 0.95
        return [1.0 / (1 + start) for start, _ in spans]


class Driver:
    """Plays turns as `BlockEngine` does, with a made-up engine."""

    def __init__(self, method: Evoke) -> None:
        self.method = method
        self.cache = Positions()
        self.shared = method.sessions()
        self.session = self.shared.open(self.cache)
        self.total = 0
        self.peaks: list[int] = []

    def turn(self, parts: Sequence[tuple[Sequence[int], Source]], answer: Sequence[int], **hints):
        tokens = [token for ids, _ in parts for token in ids]
        notes = TurnNotes([(len(ids), source) for ids, source in parts], Hints(**hints))
        self.session.check(tokens, notes)
        self.session.admit(tokens, notes)
        self.total += len(tokens)
        self.session.before_prefill()
        done = 0
        while done < len(answer):
            count = min(self.session.room(), len(answer) - done)
            done += count
            self.total += count
            # The newest token is fed with the next one.
            self.cache.feed(self.total - 1)
            self.peaks.append(self.cache.live)
            if done < len(answer):
                self.session.at_watermark(answer[:done])
        self.session.after_turn(answer)

    def user(self, ids: Sequence[int], answer: Sequence[int] = (1, 2, 3), **hints) -> None:
        self.turn([(ids, Source.USER)], answer, **hints)

    def document(self, ids: Sequence[int], answer: Sequence[int] = (1, 2, 3), **hints) -> None:
        self.turn([(ids, Source.DOCUMENT)], answer, **hints)


def evoke(budget: int = 100, **settings: object) -> Evoke:
    plain = {"block": 8, "encoder": "hash", "store_mb": 1, **settings}
    return make_method("evoke", budget, {key: str(value) for key, value in plain.items()})


TURN = st.tuples(
    st.lists(
        st.tuples(st.lists(st.integers(0, 30), min_size=1, max_size=60), st.sampled_from(Source)),
        min_size=1,
        max_size=3,
    ),
    st.lists(st.integers(0, 30), min_size=1, max_size=150),
    st.booleans(),
    st.booleans(),
    st.floats(0.1, 5),
)


@given(
    turns=st.lists(TURN, min_size=1, max_size=8),
    recovery=st.sampled_from(["discard", "kv_restore"]),
    weight=st.sampled_from([0.0, 1.0]),
)
@settings(max_examples=60, deadline=None)
def test_the_budget_holds_and_fixed_blocks_stay(turns: list, recovery: str, weight: float) -> None:
    driver = Driver(evoke(recovery=recovery, w_attention=weight))
    pinned: set[int] = set(range(4))
    for parts, answer, pin, boundary, priority in turns:
        before = driver.total
        try:
            driver.turn(parts, answer, pinned=pin, task_boundary=boundary, priority=priority)
        except UsageError:
            assert pin
            assert driver.total == before
            continue
        if pin:
            pinned |= set(range(before, before + sum(len(ids) for ids, _ in parts)))
        assert driver.cache.live <= 95
        assert {p for p in pinned if p < driver.cache.fed} <= driver.cache.held
        assert driver.shared.store.nbytes <= 1 << 20
        spans = driver.session.spans
        assert [s.start for s in spans[1:]] == [s.end for s in spans[:-1]]
        assert max(map(len, spans)) <= 8
        there = {p for s in spans if s.resident for p in range(s.start, s.end)}
        assert {p for p in there if p < driver.cache.fed} == driver.cache.held
    driver.session.close()
    assert driver.shared.store.nbytes == 0


def test_decoding_stops_for_room_at_the_watermark() -> None:
    driver = Driver(evoke())
    driver.document(range(60), answer=range(200))
    assert max(driver.peaks) <= 95
    assert driver.cache.calls.count("evict") >= 3
    # The answer is longer than the budget: its oldest part is away, its newest is here.
    assert driver.cache.fed - 1 in driver.cache.held
    assert 70 not in driver.cache.held


def test_this_turns_answer_outlives_older_documents() -> None:
    driver = Driver(evoke())
    driver.document([5] * 50)
    driver.document([6] * 30, answer=[7] * 40)
    answer = set(range(driver.total - 40, driver.cache.fed))
    assert answer <= driver.cache.held
    assert driver.cache.live < driver.cache.fed


def test_the_user_outlives_documents_and_priority_outlives_both() -> None:
    driver = Driver(evoke(sinks=0, recovery="discard"))
    driver.document([5] * 8, answer=[1])
    driver.user([3] * 8, answer=[1])
    driver.document([6] * 8, answer=[1], priority=8.0)
    driver.document([4] * 60, answer=[1])
    driver.document([4] * 8, answer=[1])
    first, second, third = (driver.session.spans[i] for i in (0, 2, 4))
    assert (first.source, second.source, third.hints.priority) == ("document", "user", 8.0)
    assert [first.resident, second.resident, third.resident] == [False, True, True]


def test_a_block_comes_back_when_the_user_asks_for_it() -> None:
    driver = Driver(evoke(recovery="kv_restore"))
    driver.document(range(100, 108))
    driver.document([50, 51, 52, 53, 54, 55, 56, 57])
    for number in range(8):
        driver.document([200 + number] * 16)
    spans = driver.session.spans
    wanted = next(s for s in spans if driver.session.tokens[s.start] == 50)
    assert not wanted.resident
    driver.user([50, 51, 52, 53])
    assert wanted.resident
    assert driver.session.figures()["recovered_blocks"] >= 1


def test_hints_are_for_what_the_request_adds_not_for_its_answer() -> None:
    """The gateway's last part is the answer's header; a pin that grew would pass the budget."""
    driver = Driver(evoke(342, block=128))
    prompt = [([3] * 125, Source.USER), ([1] * 3, Source.ASSISTANT)]
    driver.turn(prompt, [7] * 300, pinned=True)
    assert sum(len(s) for s in driver.session.spans if s.hints.pinned) == 128
    driver.turn([([3] * 60, Source.USER), ([1] * 3, Source.ASSISTANT)], [7] * 360)
    assert driver.cache.live <= 0.95 * 342


def test_discarded_blocks_never_come_back() -> None:
    driver = Driver(evoke(recovery="discard"))
    driver.document([50] * 8)
    for number in range(8):
        driver.document([200 + number] * 16)
    driver.user([50] * 8)
    assert "restore" not in driver.cache.calls
    assert driver.session.figures()["held"] == 0


@pytest.mark.parametrize(("margin", "swaps"), [(2.0, False), (0.0, True)])
def test_blocks_leave_for_others_by_the_margin_only(margin: float, swaps: bool) -> None:
    driver = Driver(evoke(recovery="kv_restore", margin=margin))
    for number in range(12):
        driver.document([200 + number] * 16)
    driver.cache.calls.clear()
    driver.user([1000, 1001])
    assert (driver.cache.calls.count("evict") > 1) == swaps


def test_rows_that_were_lost_and_computed_again_are_all_there() -> None:
    driver = Driver(evoke(recovery="kv_restore"))
    for number in range(8):
        driver.document([200 + number] * 16)
    assert driver.session.figures()["away"] > 0
    driver.cache.held = set(range(driver.cache.fed))
    driver.cache.losses = 1
    driver.user([50, 51], answer=range(10))
    assert driver.cache.live <= 95
    there = {p for s in driver.session.spans if s.resident for p in range(s.start, s.end)}
    assert {p for p in there if p < driver.cache.fed} == driver.cache.held


def test_breadcrumbs_name_what_is_away_once() -> None:
    driver = Driver(evoke(recovery="breadcrumb", stub=3))
    driver.document([9] * 8)
    driver.document([50] * 8)
    for number in range(8):
        driver.document([200 + number] * 16)
    session = driver.session
    notes = TurnNotes([(2, Source.USER)])
    wanted = next(s for s in session.spans if session.tokens[s.start] == 50)
    named = session.recalls([50, 50], notes)
    assert (wanted.start, wanted.start + 3) in named
    assert len(named) == 4
    assert named == sorted(named)
    assert (wanted.start, wanted.start + 3) not in session.recalls([50, 50], notes)
    assert session.recalls([50, 50], TurnNotes([(2, Source.DOCUMENT)])) == []
    assert Driver(evoke()).session.recalls([50, 50], notes) == []


def test_pins_that_leave_no_room_are_refused() -> None:
    driver = Driver(evoke())
    driver.document([1] * 20, pinned=True)
    with pytest.raises(UsageError, match="raise --budget or pin less"):
        driver.document([1] * 60, pinned=True)
    driver.document([1] * 60)
    assert set(range(20)) <= driver.cache.held


def test_sessions_share_a_store_and_nothing_else() -> None:
    method = evoke()
    shared = method.sessions()
    first, second = shared.open(Positions("a")), shared.open(Positions("b"))
    shared.store.put(("a", 0), Block(0, 1, 0, np.zeros(4, np.uint8)))
    second.close()
    assert ("a", 0) in shared.store
    first.close()
    assert ("a", 0) not in shared.store
