"""The host store: limits hold whatever happens, and what comes out is what went in."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from agentbench_kv.methods.evoke.store import HostStore
from agentbench_kv.methods.spans import Block

KEYS = st.tuples(st.sampled_from("ab"), st.integers(0, 5))
MEMORY, DISK = 100, 60


def block(size: int, fill: int) -> Block:
    return Block(0, 1, 7, np.full(size, fill % 256, np.uint8))


class Stored(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.store = HostStore(MEMORY, DISK)
        self.put_in: dict[tuple[str, int], Block] = {}
        self.count = 0

    @rule(key=KEYS, size=st.integers(1, 120))
    def put(self, key: tuple[str, int], size: int) -> None:
        self.count += 1
        self.put_in[key] = block(size, self.count)
        self.store.put(key, self.put_in[key])

    @rule(key=KEYS)
    def take(self, key: tuple[str, int]) -> None:
        held = key in self.store
        found = self.store.take(key)
        assert (found is not None) == held
        if found is not None:
            assert found.at == 7
            assert (found.data == self.put_in[key].data).all()
        assert key not in self.store

    @rule(session=st.sampled_from("ab"))
    def drop(self, session: str) -> None:
        self.store.drop(session)
        assert not any((session, start) in self.store for start in range(6))

    @invariant()
    def limits_hold(self) -> None:
        assert 0 <= self.store.nbytes <= MEMORY
        assert 0 <= self.store.spilled_bytes <= DISK

    def teardown(self) -> None:
        self.store.close()
        assert (self.store.nbytes, self.store.spilled_bytes) == (0, 0)


Stored.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestStored = Stored.TestCase


def test_the_oldest_leaves_first_and_lies_on_disk() -> None:
    store = HostStore(memory=100, disk=50)
    for start, size in enumerate((40, 40, 40)):
        store.put(("s", start), block(size, start))
    assert (store.nbytes, store.spilled_bytes) == (80, 40)
    files = list(Path(store._folder.name).iterdir())
    assert [file.stat().st_size for file in files] == [40]
    back = store.take(("s", 0))
    assert (back.data == 0).all()
    assert back.nbytes == 40
    assert not files[0].exists()
    folder = Path(store._folder.name)
    store.close()
    assert not folder.exists()


def test_without_disk_the_oldest_is_lost() -> None:
    store = HostStore(memory=100)
    for start in range(3):
        store.put(("s", start), block(40, start))
    assert ("s", 0) not in store
    assert store.take(("s", 0)) is None
    assert ("s", 1) in store


def test_a_block_above_the_limit_is_not_kept() -> None:
    store = HostStore(memory=10)
    store.put(("s", 0), block(11, 0))
    assert store.nbytes == 0
    assert ("s", 0) not in store
