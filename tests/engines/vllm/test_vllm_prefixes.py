"""Sessions that share their system message's blocks, over a pool that behaves like vLLM's."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from paged_blocks import BLOCK, POOL, Manager, Pool

from agentbench_kv.engines.base import EngineOptions
from agentbench_kv.engines.core.ledger import Rewind, StepPlan
from agentbench_kv.engines.core.prefixes import PrefixTable
from agentbench_kv.engines.vllm.engine import VllmEngine
from agentbench_kv.engines.vllm.plugin.blocks import SessionBlocks
from agentbench_kv.engines.vllm.plugin.sessions import Forward, VllmSession, VllmSessions
from agentbench_kv.errors import UsageError
from agentbench_kv.methods.base import Method
from agentbench_kv.registry import make_method

# Tokens of system messages; the second is the first but for its last full block.
SYSTEMS = {"a": list(range(100, 120)), "b": [*range(100, 108), *range(300, 309)], "none": []}


def method(**more: str) -> Method:
    chosen = {"interval": "4", "trigger": "prefill+every", "protect": "system", "prefix": "shared"}
    return make_method("streamingllm", 32, {**chosen, "sinks": "1", **more})


def keeps_a_beginning(budget: int) -> Method:
    """Return the method whose events evict from a protected prompt that fills the budget."""
    return make_method("triattention", budget, {"interval": "4", "prefix": "shared"})


def new_table(chosen: Method | None = None) -> tuple[VllmSessions, Any]:
    pool = Pool()
    manager = Manager(pool)
    coordinator = SimpleNamespace(single_type_managers=[manager])
    outer = SimpleNamespace(coordinator=coordinator, block_pool=pool)
    return VllmSessions(chosen or method(), 1, SessionBlocks(outer, evicting=0)), manager


class Scheduler:
    """vLLM's part, and the workers': they know rows by name, and write tokens into blocks."""

    def __init__(self) -> None:
        self.table, self.manager = new_table()
        self.logs: dict[str, list[int]] = {}
        self.systems: dict[str, list[int]] = {}
        self.waiting: list[str] = []
        self.numbers = 0
        self.known: dict[str, int] = {}  # worker's rows: name -> tokens

    def begin(self, name: str, system: list[int], more: int) -> None:
        self.numbers += 1
        if name not in self.logs:
            self.logs[name], self.systems[name] = list(system), system
        log = self.logs[name]
        log += range(1000 * self.numbers, 1000 * self.numbers + more)
        runs = [[3, len(self.systems[name])], [3, len(log)]]
        phases = f'{{"runs": {runs}, "prompt": 0, "system": {len(self.systems[name])}}}'
        request = SimpleNamespace(
            request_id=f"r{self.numbers}",
            session_id=name,
            sampling_params=SimpleNamespace(extra_args={"kvbench_phases": phases}),
            prompt_token_ids=list(log),
            num_computed_tokens=0,
            skip_reading_prefix_cache=False,
        )
        self.table.begin(request)
        self.waiting.append(name)

    def feed(self, name: str, most: int) -> bool:
        """Plan and run one forward of a session; False if it has to wait, or is put back."""
        session = self.table.sessions[name]
        computed, found = session.ledger.fed, None
        if not computed and session.prefix_key is not None:
            if not self.table.may_begin(session):
                return False
            found = self.table.found(session)
            computed = found.rows if found else 0
        log = self.logs[name]
        rows = min(most, len(log) - computed)
        if not rows or not self._allocate(session, found, computed + rows):
            return False
        plan = StepPlan(dropped=self.table.dropped.copy())
        self.table.dropped.clear()
        self.table.plan_prefixes([Forward(session, computed, rows)], plan)
        session.ledger.forward(rows)
        self._write(session, log[computed : computed + rows], leaves=bool(plan.left))
        self._work(plan, session, computed, rows)
        if session.ledger.fed == len(log):
            if name in self.waiting:
                self.waiting.remove(name)
            eviction = session.ledger.sampled()
            log.append(5000 + len(log))
            if eviction is not None:
                self.table.order(session, eviction)
        return True

    def _allocate(self, session: VllmSession, found: Any, tokens: int) -> bool:
        held = self.manager.req_to_blocks.get(session.request, [])
        shared = len(found.blocks) if found else 0
        physical = tokens - session.ledger.deficit
        while (
            -(-physical // BLOCK) - len(held) - shared
            > self.manager.block_pool.get_num_free_blocks()
        ):
            if not self.table.make_room(session.request):
                return False
        if found:
            self.manager.req_to_blocks[session.request] = []
            self.manager.add_local_computed_blocks(session.request, found.blocks, found.rows, 0)
        self.manager.allocate_new_blocks(session.request, tokens, 0)
        return True

    def _write(self, session: VllmSession, tokens: list[int], *, leaves: bool) -> None:
        blocks, end = self.manager.req_to_blocks[session.request], session.ledger.live
        for place, token in enumerate(tokens, end - len(tokens)):
            block = blocks[place // BLOCK]
            assert block.ref_cnt == 1 or leaves, "a row was written into a block of others"
            block.rows[place % BLOCK] = token

    def _work(self, plan: StepPlan, session: VllmSession, first: int, rows: int) -> None:
        for name in plan.dropped:
            self.known.pop(name, None)
        for name, prefix in plan.begun.items():
            self.known[name] = self.known[prefix]
        assert self.known.get(session.name, 0) == first
        for prefix in plan.left.values():
            assert first < prefix.tokens <= first + rows
            self.known[prefix.name] = prefix.tokens
        self.known[session.name] = first + rows
        for name in self.table.given_up:
            del self.known[name]
        self.table.given_up.clear()

    def rest(self, session: VllmSession) -> None:
        if session.name in self.waiting:
            self.waiting.remove(session.name)
        self.table.rest(session, list(self.logs[session.name]))

    def put_back(self, session: VllmSession) -> None:
        """As vLLM preempts a request: its rows are gone, and it waits again."""
        self.manager.free(session.request)
        self.table.lose(session)
        self.table.begin_again(session, list(self.logs[session.name]))
        if session.name not in self.waiting:
            self.waiting.append(session.name)


NAMES = st.sampled_from("uvwxyz")


class SharedMachine(RuleBasedStateMachine):
    """Sessions share, are fed in chunks, rest, go back, are put back and close, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.vllm = Scheduler()
        self.table = self.vllm.table

    @initialize(chosen=st.sampled_from([method(), *map(keeps_a_beginning, (13, 16, 22))]))
    def start(self, chosen: Method) -> None:
        self.table.method = chosen

    def running(self, name: str) -> VllmSession | None:
        session = self.table.sessions.get(name)
        return session if session is not None and session.running else None

    @rule(name=NAMES, system=st.sampled_from(sorted(SYSTEMS)), more=st.integers(1, 20))
    def turn(self, name: str, system: str, more: int) -> None:
        if not self.running(name):
            self.vllm.begin(name, SYSTEMS[system], more)

    @rule(name=NAMES, chunk=st.integers(1, 30), steps=st.integers(1, 6))
    def forward(self, name: str, chunk: int, steps: int) -> None:
        for _ in range(steps):
            if self.running(name):
                self.vllm.feed(name, chunk)

    @rule(name=NAMES)
    def rest(self, name: str) -> None:
        if session := self.running(name):
            self.vllm.rest(session)

    @rule(name=NAMES)
    def put_back(self, name: str) -> None:
        session = self.running(name)
        if session and session.ledger.fed:
            self.vllm.put_back(session)

    @rule(name=NAMES, length=st.integers(0, 40))
    def rewind(self, name: str, length: int) -> None:
        session = self.table.sessions.get(name)
        if session is None or session.running or session.ledger.deficit:
            return
        log = self.vllm.logs[name]
        if length < len(log):
            self.table.rewind(session, length)
            del log[length:]
            for told in self.table.before:
                assert isinstance(told, Rewind)
                known = self.vllm.known.get(told.session, 0)
                self.vllm.known[told.session] = min(known, told.length)
            self.table.before.clear()

    @rule(name=NAMES)
    def close(self, name: str) -> None:
        session = self.table.sessions.get(name)
        if session is None:
            return
        if session.running:
            self.vllm.rest(session)
        self.table.end(session)
        del self.vllm.logs[name]

    @rule()
    def pressure(self) -> None:
        self.table.prefixes.make_room(None) or self.table.lose_oldest()

    @invariant()
    def references_are_those_of_sessions_and_prefixes(self) -> None:
        held = Counter(
            block.block_id
            for blocks in self.vllm.manager.req_to_blocks.values()
            for block in blocks
        )
        stored = [prefix for prefix in self.table.prefixes.held if not prefix.freed]
        held.update(block.block_id for prefix in stored for block in prefix.blocks)
        pool = self.vllm.manager.block_pool
        assert {block.block_id: block.ref_cnt for block in pool.blocks if block.ref_cnt} == held

    @invariant()
    def what_could_be_freed_is_what_nobody_else_holds(self) -> None:
        tables = self.vllm.manager.req_to_blocks
        for name in "uvwxyz":
            if session := self.running(name):
                kept = self.table.found(session)
                givers: list[Any] = [
                    *(tables.get(each.request, ()) for each in self.table.sessions.values()
                      if not each.running),
                    *(each.blocks for each in self.table.prefixes.held if each is not kept),
                ]  # fmt: skip
                given = Counter(block.block_id for blocks in givers for block in blocks)
                pool = self.vllm.manager.block_pool.blocks
                free = sum(0 < block.ref_cnt == given[block.block_id] for block in pool)
                assert self.table.could_free(session.request) == free

    @invariant()
    def every_session_has_its_first_tokens(self) -> None:
        for session in self.table.sessions.values():
            blocks = self.vllm.manager.req_to_blocks.get(session.request, [])
            assert len(blocks) == -(-session.ledger.live // BLOCK)
            log, shared = self.vllm.logs[session.name], session.ledger.stats.shared
            rows = [block.rows[at] for block in blocks[: shared // BLOCK] for at in range(BLOCK)]
            assert rows == log[:shared]
            assert shared in (0, 16)

    def teardown(self) -> None:
        for name in list(self.table.sessions):
            self.close(name)
        self.table.prefixes.clear()
        assert self.vllm.manager.block_pool.get_num_free_blocks() == POOL


SharedMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestShared = SharedMachine.TestCase


def test_the_second_session_begins_where_the_first_one_left_its_prefix() -> None:
    vllm = Scheduler()
    vllm.begin("u", SYSTEMS["a"], 10)
    vllm.begin("v", SYSTEMS["a"], 5)
    vllm.begin("w", SYSTEMS["b"], 5)
    assert vllm.feed("u", 10)
    assert not vllm.feed("v", 10)  # waits for it
    assert vllm.feed("w", 10)  # another message
    assert vllm.feed("u", 10)
    assert vllm.feed("v", 10)
    stats = {name: vllm.table.sessions[name].ledger.stats for name in "uvw"}
    assert [stats[name].cached_tokens for name in "uv"] == [0, 16]
    assert [stats[name].shared for name in "uvw"] == [16, 16, 0]
    tables = vllm.manager.req_to_blocks
    assert tables["r1"][:2] == tables["r2"][:2]
    assert [block.ref_cnt for block in tables["r1"][:3]] == [3, 3, 1]


@pytest.mark.parametrize("how", ["put_back", "close", "rest"])
def test_who_waits_goes_on_when_the_computing_session_will_not(how: str) -> None:
    vllm = Scheduler()
    for name in "uv":
        vllm.begin(name, SYSTEMS["a"], 10)
    assert vllm.feed("u", 10)
    assert not vllm.feed("v", 10)
    session = vllm.table.sessions["u"]
    if how == "put_back":
        vllm.put_back(session)
    else:
        vllm.rest(session)
        if how == "close":
            vllm.table.end(session)
    assert vllm.feed("v", 30)
    assert vllm.table.sessions["v"].ledger.stats.shared == 16


@pytest.mark.parametrize("length", [15, 9, 1])
def test_who_goes_back_into_the_prefix_leaves_it_to_others(length: int) -> None:
    vllm = Scheduler()
    for name in "uv":
        vllm.begin(name, SYSTEMS["a"], 3)
        assert vllm.feed(name, 30)
    session, blocks = vllm.table.sessions["v"], vllm.manager.req_to_blocks
    held = [dict(block.rows) for block in blocks["r1"][:2]]
    vllm.rest(session)
    vllm.table.rewind(session, length)
    del vllm.logs["v"][length:]
    vllm.table.before.clear()
    vllm.begin("v", SYSTEMS["a"], 12)
    assert vllm.feed("v", 40)
    assert [block.rows for block in blocks["r1"][:2]] == held
    assert session.ledger.stats.recomputed == length


def test_a_session_whose_events_would_evict_the_message_shares_none() -> None:
    protects = (("8", False), ("16", True), ("20", True), ("prompt", True))
    arms = [(method(protect=protect), shares) for protect, shares in protects]
    arms += [(keeps_a_beginning(budget), budget >= 16) for budget in (12, 15, 16, 22, 40)]
    arms += [(make_method("agentkv@system", 40, {"prefix": "shared"}), True)]
    for chosen, shares in arms:
        vllm = Scheduler()
        vllm.table.method = chosen
        vllm.begin("u", SYSTEMS["a"], 3)
        assert (vllm.table.sessions["u"].prefix_key is not None) is shares, chosen


def test_a_prefix_that_is_dropped_within_a_step_is_begun_with_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    vllm = Scheduler()
    table, tables = vllm.table, vllm.manager.req_to_blocks
    monkeypatch.setattr(table.prefixes, "_limit", 1)
    vllm.begin("u", SYSTEMS["a"], 3)
    assert vllm.feed("u", 30)
    for name, system in (("v", "b"), ("w", "a")):
        vllm.begin(name, SYSTEMS[system], 3)
    leaves, begins = (table.sessions[name] for name in "vw")
    assert table.may_begin(leaves)
    assert table.may_begin(begins)
    found = table.found(begins)
    assert found is not None
    vllm.manager.allocate_new_blocks(leaves.request, 20, 0)
    tables[begins.request] = []
    vllm.manager.add_local_computed_blocks(begins.request, found.blocks, 16, 0)
    plan = StepPlan()
    table.plan_prefixes([Forward(leaves, 0, 20), Forward(begins, 16, 4)], plan)
    assert plan.begun == {"w": found.name}
    assert list(plan.left) == ["v"]
    assert table.given_up == [found.name]
    assert [block.ref_cnt for block in tables[begins.request]] == [2, 2]  # u's and w's


def test_a_message_with_other_phases_is_another_one() -> None:
    vllm = Scheduler()
    vllm.begin("u", SYSTEMS["a"], 3)
    session = vllm.table.sessions["u"]
    key = session.prefix_key
    session.prompt.runs[0][0] = 1
    vllm.table.begin_again(session, vllm.logs["u"])
    assert session.prefix_key not in (key, None)


class Rows:
    """A prefix of an engine."""

    def __init__(self, readers: int = 0) -> None:
        self.rows, self.readers, self.freed = 10, readers, False

    @property
    def rows_in_use(self) -> bool:
        return self.readers > 0

    def free(self) -> None:
        self.freed = True


def test_a_full_table_drops_the_one_used_longest_ago() -> None:
    table: PrefixTable[str, Rows] = PrefixTable(limit=2)
    rows = {key: Rows(readers=int(key == b"1")) for key in (b"0", b"1", b"2", b"3")}
    for key in (b"0", b"1"):
        assert table.computed_by(key, "s")
        table.store(key, rows[key])
    assert table.find(b"0") is rows[b"0"]
    table.computed_by(b"2", "s")
    table.store(b"2", rows[b"2"])
    assert [each.freed for each in rows.values()] == [False, True, False, False]
    assert table.rows == 30  # one that is dropped, and read, too
    rows[b"1"].readers = 0
    assert table.rows == 20
    assert table.make_room(but=b"0")
    assert rows[b"2"].freed
    assert not rows[b"0"].freed
    assert not table.make_room(but=b"0")
    rows[b"0"].readers = 1
    assert not table.make_room(but=None)
    rows[b"0"].readers = 0
    assert table.make_room(but=None)


@pytest.mark.parametrize(
    ("name", "chosen", "said"),
    [
        ("full@prefix", {}, "prefix cache of its own"),
        ("agentkv", {"prefix": "shared"}, "protect=system"),
        ("agentkv@system", {"prefix": "shared", "positions": "cache"}, "positions=logical"),
    ],
)
def test_what_cannot_be_shared_is_refused(name: str, chosen: dict[str, str], said: str) -> None:
    asked = make_method(name, None if name.startswith("full") else 512, chosen)
    with pytest.raises(UsageError, match=said):
        VllmEngine.check_options(EngineOptions("micro", asked, device="cpu"))
