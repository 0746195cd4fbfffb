"""Rings of more sessions than there is memory for, and sums after an event."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentbench_kv.engines.core.attention_sums import AttentionSums
from agentbench_kv.engines.core.rings import QueryBuffer, QueryStore, RingWrite, RowShape
from agentbench_kv.methods.base import Phase, QueryKind, QueryPlan

SHAPE = RowShape(2, 4, 2, 4, torch.float32, torch.device("cpu"))
FREQUENCIES = torch.tensor([1.0, 0.1])


class Sessions:
    """Sessions whose queries go to one buffer."""

    def __init__(self, kind: QueryKind, reserved: int | None) -> None:
        self.buffer = QueryBuffer(QueryPlan(kind, 2), SHAPE)
        if reserved is not None:
            self.buffer.reserve(reserved)
        self.stores: dict[int, QueryStore] = {}

    def forward(self, fed: dict[int, list[Phase]], first: dict[int, int], draw: int) -> None:
        """Feed tokens of some sessions in one forward, whose queries are numbers of their own."""
        rows: list[int] = []
        slots: list[int] = []
        start = 0
        with self.buffer.planning():
            for name, phases in fed.items():
                store = self.stores.setdefault(name, QueryStore(self.buffer))
                stored, where = store.place(phases, first[name], start)
                rows, slots, start = rows + stored, slots + where, start + len(phases)
        write = RingWrite(torch.tensor(rows), torch.tensor(slots))
        numbers = torch.Generator().manual_seed(draw)
        for layer in range(SHAPE.layers):
            queries = torch.randn(SHAPE.q_heads, start, SHAPE.head_dim, generator=numbers)
            self.buffer.write(layer, queries, write)


def assert_same(mine: QueryStore, other: QueryStore) -> None:
    for left, right in zip(
        mine.layer_queries(SHAPE.layers), other.layer_queries(SHAPE.layers), strict=True
    ):
        assert torch.equal(left.vectors, right.vectors)
        assert torch.equal(left.positions, right.positions)
        assert torch.equal(left.phases, right.phases)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    places=st.integers(1, 4),
    kind=st.sampled_from([QueryKind.RECENT, QueryKind.PER_PHASE]),
)
def test_rings_put_aside_are_the_rings_that_never_moved(
    seed: int, places: int, kind: QueryKind
) -> None:
    rng = random.Random(seed)
    few, many = Sessions(kind, places), Sessions(kind, None)
    positions: dict[int, int] = {}
    for step in range(30):
        act = rng.choice(["feed", "feed", "feed", "read", "shift", "fork", "free"])
        known = sorted(few.stores)
        if act == "feed":
            names = rng.sample(range(8), rng.randint(1, places))
            fed = {name: rng.choices(list(Phase), k=rng.randint(1, 5)) for name in names}
            for side in (few, many):
                side.forward(fed, {name: positions.get(name, 0) for name in names}, step)
            for name, phases in fed.items():
                positions[name] = positions.get(name, 0) + len(phases)
        elif known and act == "fork":
            old, new = rng.choice(known), 100 + step
            for side in (few, many):
                side.stores[new] = side.stores[old].fork()
            positions[new] = positions[old]
        elif known:
            name = rng.choice(known)
            if act == "read":
                assert_same(few.stores[name], many.stores[name])
            for side in (few, many):
                if act == "shift":
                    side.stores[name].shift(-3, FREQUENCIES)
                elif act == "free":
                    side.stores.pop(name).free()
            if act == "free":
                del positions[name]
        assert few.buffer.places == places
    for name, store in few.stores.items():
        assert_same(store, many.stores[name])
    for store in few.stores.values():
        store.free()
    assert few.buffer.places == places
    assert sorted(few.buffer._free) == [*range(places)]


def test_the_rings_of_one_forward_stay_and_a_reservation_too_small_for_it_grows() -> None:
    phases = [Phase.THINK]
    sessions = Sessions(QueryKind.RECENT, 2)
    sessions.forward(dict.fromkeys(range(3), phases), dict.fromkeys(range(3), 0), 0)
    assert sessions.buffer.places == 6
    reference = Sessions(QueryKind.RECENT, None)
    reference.forward(dict.fromkeys(range(3), phases), dict.fromkeys(range(3), 0), 0)
    for name in range(3):
        assert_same(sessions.stores[name], reference.stores[name])


@pytest.mark.parametrize("places", [1, 2, 3])
def test_a_prefix_left_within_a_forward_has_the_rings_of_its_session(places: int) -> None:
    """With one place the twin takes its source's; slots that are given out stay where they are."""
    found = []
    for reserved in (places, None):
        sessions = Sessions(QueryKind.RECENT, reserved)
        sessions.forward({0: [Phase.THINK] * 3}, {0: 0}, 0)
        with sessions.buffer.planning():
            twin = sessions.stores[0].fork()
            rows, slots = twin.place([Phase.ACT], 3, 0)
            more, others = sessions.stores[0].place([Phase.ACT, Phase.TOOL], 3, 0)
        write = RingWrite(torch.tensor(rows + more), torch.tensor(slots + others))
        queries = torch.arange(32.0).reshape(4, 2, 4)
        for layer in range(SHAPE.layers):
            sessions.buffer.write(layer, queries, write)
        found.append((twin, sessions.stores[0], sessions.buffer.places))
    for mine, other in zip(found[0][:2], found[1][:2], strict=True):
        assert_same(mine, other)
    assert found[0][2] == (5 if places == 1 else places)  # two rings are written at once


def test_vectors_move_only_when_forwards_are_over() -> None:
    phases = [Phase.THINK]
    sessions = Sessions(QueryKind.RECENT, 1)
    waits: list[str] = []
    sessions.buffer.before_moving = lambda: waits.append("waited")
    sessions.forward({0: phases}, {0: 0}, 0)
    assert waits == []
    sessions.forward({1: phases}, {1: 0}, 1)  # the first one's are put aside
    assert waits == ["waited"]
    sessions.stores[0].layer_queries(SHAPE.layers)  # they change places
    assert waits == ["waited"] * 3
    free = Sessions(QueryKind.RECENT, None)
    free.buffer.before_moving = lambda: waits.append("grew")
    free.forward({0: phases}, {0: 0}, 0)
    assert waits[3:] == ["grew"]


@pytest.mark.parametrize(("places", "more"), [(5, 4), (80, 10)])
def test_a_buffer_grows_by_an_eighth_as_others_have_taken_the_rest(places: int, more: int) -> None:
    buffer = QueryBuffer(QueryPlan(QueryKind.RECENT, 2), SHAPE)
    buffer._grow(places)
    for _ in range(places + 1):
        buffer.take(QueryStore(buffer))
    assert buffer.places == places + more
    buffer.reserve(places)  # there is room already
    assert buffer.places == places + more


def test_sums_shrink_after_an_event_and_keep_what_is_in_them() -> None:
    sums = AttentionSums(1, 1, torch.device("cpu"))
    sums.of("s", 5000)[:] = torch.arange(5000.0)
    sums.shrink("s", 4000)
    assert sums._sums["s"].shape[-1] == 10000
    sums.shrink("s", 1000)
    assert sums._sums["s"].shape[-1] == 2000
    assert torch.equal(sums.of("s", 1000)[0, 0], torch.arange(1000.0))
    sums.shrink("nobody", 1)
    sums.of("short", 10)
    sums.shrink("short", 1)
    assert sums._sums["short"].shape[-1] == 256
