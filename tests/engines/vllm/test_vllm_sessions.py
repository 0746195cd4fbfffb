"""The table of sessions over a pool of blocks that behaves like vLLM's, without vLLM."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from agentbench_kv.engines.core.ledger import Rewind
from agentbench_kv.engines.vllm.plugin.blocks import SessionBlocks
from agentbench_kv.engines.vllm.plugin.sessions import VllmSession, VllmSessions
from agentbench_kv.registry import make_method

BLOCK, POOL, WINDOW = 8, 40, 12


class FakePool:
    def __init__(self) -> None:
        self.num_gpu_blocks = POOL + 1
        self.free_ids = list(range(1, POOL + 1))

    def get_num_free_blocks(self) -> int:
        return len(self.free_ids)

    def free_blocks(self, blocks: Iterable[Any]) -> None:
        for block in blocks:
            assert block.block_id not in self.free_ids, "freed twice"
            self.free_ids.append(block.block_id)


class FakeManager:
    """What the table uses of vLLM's single-type manager."""

    window: FakeWindow  # of the layers beside it

    def __init__(self, pool: FakePool) -> None:
        self.block_size = BLOCK
        self.pool = pool
        self.req_to_blocks: dict[str, list[Any]] = {}
        self.num_cached_block: dict[str, int] = {}

    def get_num_blocks_to_allocate(self, request_id: str, num_tokens: int, *_: Any) -> int:
        assert num_tokens >= 0
        return max(0, -(-num_tokens // BLOCK) - len(self.req_to_blocks.get(request_id, ())))

    def allocate_new_blocks(self, request_id: str, num_tokens: int, _: int) -> None:
        count = FakeManager.get_num_blocks_to_allocate(self, request_id, num_tokens)
        blocks = [SimpleNamespace(block_id=self.pool.free_ids.pop()) for _ in range(count)]
        self.req_to_blocks.setdefault(request_id, []).extend(blocks)

    def free(self, request_id: str) -> None:
        self.pool.free_blocks(self.req_to_blocks.pop(request_id, []))
        self.num_cached_block.pop(request_id, None)


class FakeWindow(FakeManager):
    """The manager of layers with a window, which evict nothing and hold the last blocks."""

    def missing(self, request_id: str, tokens: int) -> int:
        wanted = min(-(-tokens // BLOCK), -(-WINDOW // BLOCK) + 1)
        return max(0, wanted - len(self.req_to_blocks.get(request_id, ())))

    def hold(self, request_id: str, tokens: int) -> None:
        self.allocate_new_blocks(request_id, tokens, 0)
        blocks = self.req_to_blocks[request_id]
        last = -(-WINDOW // BLOCK) + 1
        self.pool.free_blocks(blocks[:-last])
        self.req_to_blocks[request_id] = blocks[-last:]

    def allocate_new_blocks(self, request_id: str, num_tokens: int, _: int) -> None:
        count = self.missing(request_id, num_tokens)
        blocks = [SimpleNamespace(block_id=self.pool.free_ids.pop()) for _ in range(count)]
        self.req_to_blocks.setdefault(request_id, []).extend(blocks)


def new_table(budget: int = 16, trigger: str = "prefill+every") -> tuple[VllmSessions, FakeManager]:
    pool = FakePool()
    manager = FakeManager(pool)
    manager.window = FakeWindow(pool)
    outer = SimpleNamespace(
        coordinator=SimpleNamespace(single_type_managers=[manager.window, manager]),
        block_pool=pool,
    )
    method = make_method("streamingllm", budget, {"interval": 4, "trigger": trigger})
    return VllmSessions(method, 1, SessionBlocks(outer, evicting=1)), manager


def request(number: int, session: str | None, tokens: list[int]) -> Any:
    return SimpleNamespace(
        request_id=f"r{number}",
        session_id=session,
        sampling_params=None,
        prompt_token_ids=tokens,
        num_computed_tokens=0,
        skip_reading_prefix_cache=False,
    )


def feed(table: VllmSessions, manager: FakeManager, session: VllmSession, rows: int) -> None:
    """One forward as the scheduler orders it."""
    name = session.request
    fed, window = session.ledger.fed + rows, manager.window
    needed = manager.get_num_blocks_to_allocate(name, fed, 0, 0, 0, 0) + window.missing(name, fed)
    while needed > manager.pool.get_num_free_blocks() and table.lose_oldest():
        pass
    manager.allocate_new_blocks(name, fed, 0)
    window.hold(name, fed)
    session.ledger.forward(rows)
    eviction = session.ledger.sampled()
    if eviction is not None:
        before = table.order(session, eviction).blocks
        assert len(before) == -(-eviction.live // BLOCK)


class TableMachine(RuleBasedStateMachine):
    """Sessions open, grow, are compressed, rest, go on, are dropped and close, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.manager = new_table()
        self.logs: dict[str, list[int]] = {}
        self.numbers = 0

    def start(self, name: str, more: int) -> None:
        self.numbers += 1
        log = self.logs.setdefault(name, [])
        log += range(len(log), len(log) + more)
        asked = request(self.numbers, name, list(log))
        self.table.begin(asked)
        session = self.table.by_request[asked.request_id]
        assert asked.num_computed_tokens == session.ledger.fed
        feed(self.table, self.manager, session, len(log) - session.ledger.fed)
        log.append(1000 + len(log))

    @rule(name=st.sampled_from("abcdef"), more=st.integers(1, 30))
    def turn(self, name: str, more: int) -> None:
        session = self.table.sessions.get(name)
        if session is None or not session.running:
            self.start(name, more)

    @rule(name=st.sampled_from("abcdef"), steps=st.integers(1, 12))
    def decode(self, name: str, steps: int) -> None:
        session = self.table.sessions.get(name)
        if session is None or not session.running:
            return
        for _ in range(steps):
            feed(self.table, self.manager, session, 1)
            self.logs[name].append(1000 + len(self.logs[name]))

    @rule(name=st.sampled_from("abcdef"))
    def rest(self, name: str) -> None:
        session = self.table.sessions.get(name)
        if session is not None and session.running:
            self.table.rest(session, list(self.logs[name]))

    @rule(name=st.sampled_from("abcdef"), back=st.integers(1, 40))
    def rewind(self, name: str, back: int) -> None:
        """As the engine asks for it: nothing has been evicted, and no window outgrown."""
        session = self.table.sessions.get(name)
        if session is None or session.running or session.ledger.deficit:
            return
        if session.ledger.fed <= WINDOW:
            length = max(0, len(self.logs[name]) - back)
            fed, decoded = session.ledger.fed, session.ledger.stats.decode_tokens
            self.table.rewind(session, length)
            del self.logs[name][length:]
            assert session.ledger.fed == min(fed, length)
            assert session.ledger.stats.decode_tokens == decoded

    @rule(name=st.sampled_from("abcdef"))
    def close(self, name: str) -> None:
        session = self.table.sessions.get(name)
        if session is None:
            return
        if session.running:
            self.table.rest(session, list(self.logs[name]))
        self.table.end(session)
        del self.logs[name]

    @rule(name=st.sampled_from("abcdef"))
    def rewrite(self, name: str) -> None:
        """The client's history is not what the session holds."""
        session = self.table.sessions.get(name)
        if session is not None and not session.running and self.logs[name]:
            self.logs[name][0] = -1 - len(self.logs[name])

    @precondition(lambda self: self.manager.pool.get_num_free_blocks() < POOL)
    @rule()
    def pressure(self) -> None:
        self.table.lose_oldest()

    @invariant()
    def blocks_are_where_the_rows_are(self) -> None:
        managers = (self.manager, self.manager.window)
        held = [blocks for each in managers for blocks in each.req_to_blocks.values()]
        held_ids = [block.block_id for blocks in held for block in blocks]
        free = self.manager.pool.free_ids
        assert sorted(held_ids + free) == list(range(1, POOL + 1))
        for session in self.table.sessions.values():
            blocks = self.manager.req_to_blocks.get(session.request, [])
            assert len(blocks) == -(-session.ledger.live // BLOCK)
            assert not self.manager.window.missing(session.request, session.ledger.fed)
            assert self.table.blocks.deficits.get(session.request, 0) == session.ledger.deficit

    def teardown(self) -> None:
        for name in list(self.table.sessions):
            self.close(name)
        assert self.manager.pool.get_num_free_blocks() == POOL
        assert not self.table.by_request
        assert not self.table.blocks.deficits


TableMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestTable = TableMachine.TestCase


def test_a_session_goes_on_where_it_rested() -> None:
    table, manager = new_table()
    first = request(1, "s", list(range(30)))
    table.begin(first)
    session = table.by_request["r1"]
    feed(table, manager, session, 30)
    table.rest(session, [*range(30), 99])
    second = request(2, "s", [*range(30), 99, 7, 8])
    table.begin(second)
    assert second.num_computed_tokens == 30
    assert session.request == "r2"
    assert session.ledger.stats.prefill_tokens == 32
    assert (table.adoptions, table.mismatches) == (1, 0)


def test_another_history_is_computed_again_and_counted() -> None:
    table, manager = new_table()
    table.begin(request(1, "s", list(range(30))))
    session = table.by_request["r1"]
    feed(table, manager, session, 30)
    table.rest(session, [*range(30), 99])
    second = request(2, "s", [5, *range(40)])
    table.begin(second)
    assert second.num_computed_tokens == 0
    assert table.mismatches == 1
    assert session.ledger.stats.recomputed == 30
    assert table.dropped == ["s"]
    assert manager.pool.get_num_free_blocks() == POOL


def test_a_request_without_session_leaves_nothing() -> None:
    table, manager = new_table()
    table.begin(request(1, None, list(range(9))))
    session = table.by_request["r1"]
    assert not session.lasting
    feed(table, manager, session, 9)
    manager.free("r1")
    manager.window.free("r1")
    table.lose(session)
    table.end(session)
    assert not table.sessions
    assert manager.pool.get_num_free_blocks() == POOL


def test_an_event_at_rest_waits_for_the_next_step() -> None:
    table, manager = new_table(trigger="turn")
    table.begin(request(1, "s", list(range(30))))
    session = table.by_request["r1"]
    feed(table, manager, session, 30)
    table.rest(session, [*range(30), 99])
    (order,) = table.before
    assert (order.session, order.eviction.live, order.eviction.keep) == ("s", 30, 16)
    assert len(manager.req_to_blocks["r1"]) == 2
    table.end(session)
    assert not table.before


@pytest.mark.parametrize("forgotten", [False, True])
def test_a_client_that_stops_a_token_early_goes_on_all_the_same(forgotten: bool) -> None:
    table, manager = new_table(budget=64)
    table.begin(request(1, "s", list(range(30))))
    session = table.by_request["r1"]
    feed(table, manager, session, 30)
    feed(table, manager, session, 1)
    table.rest(session, [*range(30), 98] if forgotten else [*range(30), 98, 99])
    second = request(2, "s", [*range(30), 98, 7, 8])
    table.begin(second)
    assert second.num_computed_tokens == 31
    assert (table.adoptions, table.mismatches) == (1, 0)
    assert session.ledger.stats.decode_tokens == 1
    assert session.ledger.stats.recomputed == 0


@pytest.mark.parametrize("length", [31, 30, 20, 17, 16, 0])
def test_a_rewound_session_goes_on_with_what_stays(length: int) -> None:
    table, manager = new_table(budget=64)
    manager.window.req_to_blocks = {"r1": []}  # no layer has one
    table.begin(request(1, "s", list(range(30))))
    session = table.by_request["r1"]
    manager.allocate_new_blocks("r1", 30, 0)
    session.ledger.forward(30)
    session.ledger.sampled()
    table.rest(session, [*range(30), 99])
    table.rewind(session, length)
    assert session.tokens == [*range(30), 99][:length]
    assert len(manager.req_to_blocks.get("r1", [])) == -(-min(length, 30) // BLOCK)
    assert table.before == ([Rewind("s", length)] if length < 30 else [])
    second = request(2, "s", [*session.tokens, 7, 8, 9])
    table.begin(second)
    stats = session.ledger.stats
    assert second.num_computed_tokens == min(length, 30)
    assert (stats.prefill_tokens, stats.decode_tokens, stats.recomputed) == (33, 1, 0)
    assert (table.mismatches, table.dropped) == (0, [])
    assert manager.req_to_blocks.keys() <= {"r2"}
