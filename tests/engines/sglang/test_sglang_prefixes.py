"""Sessions that share their system message's pages, over a pool that behaves like SGLang's."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from agentbench_kv.engines.base import EngineOptions
from agentbench_kv.engines.sglang.engine import SglangEngine
from agentbench_kv.engines.sglang.plugin.hooks import Patches
from agentbench_kv.engines.sglang.plugin.memory import Forks, MemoryPressure, _growth
from agentbench_kv.engines.sglang.plugin.prefixes import SharedPrefixes
from agentbench_kv.engines.sglang.plugin.runtime import Commands
from agentbench_kv.engines.sglang.plugin.sessions import SglangSession, SglangSessions
from agentbench_kv.engines.sglang.plugin.steps import Steps
from agentbench_kv.engines.sglang.plugin.versions import Sglang0512
from agentbench_kv.engines.sglang.plugin.worker import Compactor
from agentbench_kv.errors import UsageError
from agentbench_kv.methods.base import Method
from agentbench_kv.registry import make_method

PAGE, PAGES, ROWS = 4, 24, 6
# Tokens of system messages; the second is the first but for its last whole page.
SYSTEMS = {"a": list(range(100, 118)), "b": [*range(100, 112), *range(300, 306)], "none": []}
SHARED = 16  # rows of whole pages of either


def method(**more: str) -> Method:
    return make_method("full-constrained", None, {"prefix": "shared", **more})


@dataclass
class Held:
    """A request's or a slot's row in the table, and its lengths."""

    req_pool_idx: int | None = None
    kv_committed_len: int = 0
    kv_allocated_len: int = 0
    cache_protected_len: int = 0


@dataclass
class Request(Held):
    rid: str = ""
    session: Any = None
    sampling_params: Any = None
    origin_input_ids: list[int] = field(default_factory=list)
    output_ids: list[int] = field(default_factory=list)
    fill_ids: list[int] = field(default_factory=list)
    prefix_indices: list[int] = field(default_factory=list)

    def finished(self) -> bool:
        return False


class Version(Sglang0512):
    """0.5.12 with slots of our own, as SGLang is not here."""

    def slot(self, row: int, rows: int, shared: int) -> Any:
        return Held(row, rows, rows, shared)


class WithoutController(Forks):
    def _open_session(self, source: str, name: str) -> None:
        """SGLang's own sessions are not looked at."""


class Server:
    """SGLang's part: its queue, its table, its pages, its slots; a row holds a token."""

    def __init__(self, chosen: Method, pages: int = PAGES, rows: int = ROWS) -> None:
        self.free = list(range(pages))
        self.written = [-1] * (pages * PAGE)
        self.req_to_token_pool = SimpleNamespace(free_slots=list(range(1, rows + 1)))
        self.token_to_kv_pool_allocator = self
        self.slots: dict[str, Held] = {}
        self.waiting_queue: list[Request] = []
        self.chunked: Request | None = None
        self.tree_cache = self
        self.max_total_num_tokens = pages * PAGE
        version = Version()
        self.table = SglangSessions(chosen, 1, PAGE, lambda _: pytest.fail("no stop text"))
        self.known: dict[str, int] = {}  # worker's rows: name -> tokens
        pool = SimpleNamespace(page=PAGE, table=torch.full((rows + 1, 200), -1), keys=None)
        pool.store = lambda *_: None
        pool.keys = pool.values = SimpleNamespace(layers=[self])
        self.worker: Any = SimpleNamespace(
            pool=pool, deficits=[0] * (rows + 1), rows=self, keeps_queries=False,
            wait_for_forward=lambda: None, plan_prefill=self.plan, settle=lambda _: None,
        )  # fmt: skip
        self.prefixes = SharedPrefixes(self.table, self.worker, self, version)
        compactor = Compactor(self.worker, SimpleNamespace(free=self._free))
        self.steps = Steps(self.table, self.worker, compactor, self.prefixes, version)
        self.memory = MemoryPressure(self.table, self, version)
        self.forks = WithoutController(self.table, self.worker, None, self, version)  # type: ignore[arg-type]
        self.version = version
        self.patches = Patches(None, version)  # type: ignore[arg-type]
        self.patches._runtime = self  # type: ignore[assignment]

    # What the worker is told.

    def fork(self, source: str, name: str) -> None:
        self.known[name] = self.known[source]

    def drop(self, name: str) -> None:
        self.known.pop(name, None)

    def plan(self, fed: Any, _parts: Any, _prompts: Any, left: Any) -> None:
        (part,) = fed
        assert self.known.get(part.session, 0) == part.first_position
        after = part.first_position + len(part.tokens)
        for end in left.values():
            assert part.first_position < end.tokens <= after
            self.known[end.name] = end.tokens
        self.known[part.session] = after

    def remove(self, _order: Any, _store: None) -> int:
        """Keep the first rows: none moves."""
        return 0

    # A partial page that a fork copies, as `Forks` reads and writes a layer.

    def __getitem__(self, at: Any) -> Any:
        _, pages, places = at
        return [self.written[int(p) * PAGE + int(i)] for p, i in zip(pages, places, strict=True)]

    def __setitem__(self, at: Any, tokens: Any) -> None:
        _, pages, places = at
        for p, i, token in zip(pages, places, tokens, strict=True):
            self.written[int(p) * PAGE + int(i)] = token

    # SGLang's memory.

    def available_size(self) -> int:
        return len(self.free) * PAGE

    def alloc(self, count: int) -> torch.Tensor:
        page = self.free.pop(0)
        return torch.arange(page * PAGE, page * PAGE + count)

    def release_session(self, name: str) -> None:
        self.patches.release_session(Server._release, self, name)

    def _release(self, name: str) -> None:
        slot = self.slots.pop(name, None)
        if slot is None or slot.req_pool_idx is None:
            return
        own = slice(slot.cache_protected_len, slot.kv_allocated_len)
        self._free(self.worker.pool.table[slot.req_pool_idx, own])
        self.req_to_token_pool.free_slots.append(slot.req_pool_idx)

    def _free(self, slots: torch.Tensor) -> None:
        pages = {int(each) // PAGE for each in slots}
        assert not pages & set(self.free), "freed twice"
        self.free += sorted(pages)

    # A turn.

    def begin(self, name: str, rid: str, ids: list[int], system: int) -> None:
        opening = self.table.sessions[name].prompt.prompt or len(ids)
        phases = {"runs": [[3, len(ids)]], "prompt": opening, "system": system}
        wanted = {"phases": phases, "new": 1}
        sampling = SimpleNamespace(custom_params={"kvbench": wanted}, max_new_tokens=4)
        owner = SimpleNamespace(session_id=name, streaming=True, abort_req=lambda: None)
        request = Request(rid=rid, session=owner, sampling_params=sampling, origin_input_ids=ids)
        self.table.begin(request)
        self.waiting_queue.append(request)

    def admit(self, chunk: int) -> None:
        """Plan and run one prefill: of the chunked request, or the first that may run."""
        if self.chunked is not None:
            self.chunked.prefix_indices = self.chunked.fill_ids
            self._prefill(self.chunked, chunk)
            return
        for request in list(self.waiting_queue):
            session = self.table.of(request)
            assert session is not None
            self.prefixes.offer(session)
            self._match(request)
            if not self.prefixes.may_begin(session):
                assert session.prefix is None, "who waits holds nothing"
                continue
            if request.req_pool_idx is None and not self.memory.has_row():
                self.prefixes.withdraw(session)
                return
            if self._prefill(request, chunk):
                self.waiting_queue.remove(request)
                return
            self.prefixes.withdraw(session)
            assert session.name not in self.slots or session.ledger.fed
            if not self.memory._drop_one():
                return

    def _match(self, request: Request) -> None:
        slot = self.slots.get(request.session.session_id)
        found = request.cache_protected_len = 0
        if slot is not None:
            for name in ("req_pool_idx", "kv_committed_len", "kv_allocated_len"):
                setattr(request, name, getattr(slot, name))
            request.cache_protected_len, found = slot.cache_protected_len, slot.kv_committed_len
            assert found < len(request.origin_input_ids)
        request.prefix_indices = request.origin_input_ids[:found]

    def _prefill(self, request: Request, chunk: int) -> bool:
        first = len(request.prefix_indices)
        ids = request.origin_input_ids[: first + chunk]
        have = -(-request.kv_allocated_len // PAGE)
        needed = -(-len(ids) // PAGE) - have
        if needed > len(self.free):
            return False
        if request.req_pool_idx is None:
            request.req_pool_idx = self.version.take_row(self.req_to_token_pool)
        row = self.worker.pool.table[request.req_pool_idx]
        for at in range(request.kv_allocated_len, have * PAGE):  # of a page that is its own
            row[at] = row[at - 1] + 1
        for at in range(have * PAGE, (have + needed) * PAGE, PAGE):
            row[at : at + PAGE] = self.alloc(PAGE)
        assert first >= request.cache_protected_len, "a row of others would be written"
        request.fill_ids = ids
        request.kv_committed_len = request.kv_allocated_len = len(ids)
        self.steps.prefill([request])
        for at in range(first, len(ids)):
            self.written[int(row[at])] = ids[at]
        self.chunked = request if len(ids) < len(request.origin_input_ids) else None
        return True

    def prepare(self, session: SglangSession) -> None:
        """Prepare the first decode of a session whose prompt is read."""
        lengths = torch.tensor([session.request.kv_committed_len])
        batch = SimpleNamespace(
            reqs=[session.request], seq_lens=lengths, seq_lens_cpu=lengths, seq_lens_sum=None
        )
        self.steps.prepare(batch)

    def rest(self, session: SglangSession) -> None:
        """End a turn whose prompt is read, without an answer."""
        request, name = session.request, session.name
        protected = request.cache_protected_len
        slot = self.slots.setdefault(name, Held(cache_protected_len=protected))
        slot.req_pool_idx, request.req_pool_idx = request.req_pool_idx, None
        slot.kv_committed_len = slot.kv_allocated_len = request.kv_allocated_len
        self.table.end_turn(session, len(request.origin_input_ids))

    def abort(self, session: SglangSession) -> None:
        """End a turn early: in the queue nothing is lost, else all rows are."""
        request = session.request
        if request in self.waiting_queue:
            self.waiting_queue.remove(request)
            self.memory.release_turn(session)
            return
        self._lose_rows(session)
        self.table.end_turn(session, session.tokens)

    def put_back(self, session: SglangSession) -> None:
        request = session.request
        self._lose_rows(session)
        request.cache_protected_len = 0
        self.steps.start_over(request, session)
        self.waiting_queue.append(request)

    def _lose_rows(self, session: SglangSession) -> None:
        request = session.request
        if request is self.chunked:
            self.chunked = None
        self.version.free_rows_of(self, request)
        self.version.forget_rows(request)

    def close(self, session: SglangSession) -> None:
        if session.running:
            self.abort(session)
        self.release_session(session.name)
        self.table.forget(session)

    def holders(self) -> dict[str, Held]:
        """Return who has rows: requests that run, and slots of those that do not."""
        running = {
            name: session.request
            for name, session in self.table.sessions.items()
            if session.running and session.request not in self.waiting_queue
        }
        return {**self.slots, **running}

    def owned(self) -> list[int]:
        """Return the pages that are free and those of every holder's own rows."""
        pages = list(self.free)
        for held in self.holders().values():
            if held.req_pool_idx is not None:
                row = self.worker.pool.table[held.req_pool_idx]
                mine = row[held.cache_protected_len : held.kv_allocated_len]
                pages += {int(slot) // PAGE for slot in mine}
        return sorted(pages)


NAMES = st.sampled_from("uvwxyz")


class SharedMachine(RuleBasedStateMachine):
    """Sessions share, are fed in chunks, rest, fork, are put back and close, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.server = Server(method())
        self.table = self.server.table
        self.table.prefixes._limit = 1
        self.logs: dict[str, list[int]] = {}
        self.systems: dict[str, int] = {}
        self.numbers = 0

    @rule(name=NAMES, system=st.sampled_from(sorted(SYSTEMS)), more=st.integers(2, 20))
    def turn(self, name: str, system: str, more: int) -> None:
        session = self.table.sessions.get(name)
        if session is not None and session.running:
            return
        self.numbers += 1
        if name not in self.logs:
            self.logs[name], self.systems[name] = list(SYSTEMS[system]), len(SYSTEMS[system])
            self.table.open(name, lasting=True)
        log = self.logs[name]
        log += range(1000 * self.numbers, 1000 * self.numbers + more)
        self.server.begin(name, f"r{self.numbers}", list(log), self.systems[name])

    @rule(chunk=st.integers(1, 30), times=st.integers(1, 4))
    def step(self, chunk: int, times: int) -> None:
        for _ in range(times):
            self.server.admit(chunk)

    @rule(name=NAMES, system=st.sampled_from(sorted(SYSTEMS)), more=st.integers(2, 9))
    def play(self, name: str, system: str, more: int) -> None:
        """Play a whole turn, if there is room."""
        self.turn(name, system, more)
        self.step(30, 4)
        self.rest(name)

    @rule(name=NAMES)
    def rest(self, name: str) -> None:
        session = self.table.sessions.get(name)
        if session and session.running and session.ledger.fed == len(self.logs[name]):
            self.server.rest(session)

    @rule(name=NAMES)
    def abort(self, name: str) -> None:
        session = self.table.sessions.get(name)
        if session and session.running:
            self.server.abort(session)
            del self.logs[name][session.tokens :]
            if not session.tokens:
                self.close(name)

    @rule(name=NAMES)
    def put_back(self, name: str) -> None:
        session = self.table.sessions.get(name)
        waiting = self.server.waiting_queue
        if session and session.running and session.request not in waiting and session.ledger.fed:
            self.server.put_back(session)

    @rule(source=NAMES, new=NAMES)
    def fork(self, source: str, new: str) -> None:
        session = self.table.sessions.get(source)
        if session is None or session.running or new in self.table.sessions:
            return
        if not self.server.free or not self.server.req_to_token_pool.free_slots:
            return
        self.server.forks.make(session, new)
        self.logs[new], self.systems[new] = list(self.logs[source]), self.systems[source]

    @rule(name=NAMES)
    def close(self, name: str) -> None:
        session = self.table.sessions.get(name)
        if session is not None:
            self.server.close(session)
            self.logs.pop(name, None)

    @rule()
    def pressure(self) -> None:
        self.server.memory._drop_one()

    @invariant()
    def every_page_has_one_owner(self) -> None:
        assert self.server.owned() == list(range(PAGES))

    @invariant()
    def every_session_has_its_tokens(self) -> None:
        for name, held in self.server.holders().items():
            session = self.table.sessions.get(name)
            if session is None or held.req_pool_idx is None:
                continue
            row = self.server.worker.pool.table[held.req_pool_idx, : session.ledger.fed]
            found = [self.server.written[int(slot)] for slot in row]
            assert found == self.logs[name][: session.ledger.fed]
            assert session.shared <= session.ledger.fed

    @invariant()
    def readers_are_the_sessions_that_read(self) -> None:
        for prefix in self.table.prefixes.held:
            reading = {s.name for s in self.table.sessions.values() if s.prefix is prefix}
            assert prefix.readers == reading
            assert prefix.rows == SHARED
            assert self.server.known[prefix.name] == SHARED

    @invariant()
    def who_computes_runs(self) -> None:
        """Others wait for it."""
        for session in self.table.prefixes._computing.values():
            assert session.running
            assert session.request not in self.server.waiting_queue

    def teardown(self) -> None:
        for name in list(self.table.sessions):
            self.close(name)
        self.table.prefixes.clear()
        assert len(self.server.free) == PAGES
        assert sorted(self.server.req_to_token_pool.free_slots) == list(range(1, ROWS + 1))
        assert not self.server.slots
        assert not self.server.known


SharedMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestSharedMachine = SharedMachine.TestCase


def begun(*systems: str, more: int = 10, chosen: Method | None = None) -> Server:
    """Return a server with a session in the queue for each system message: u, v, w."""
    server = Server(chosen or method())
    for number, (name, system) in enumerate(zip("uvw", systems, strict=False)):
        server.table.open(name, lasting=True)
        ids = [*SYSTEMS[system], *range(1000 * number, 1000 * number + more)]
        server.begin(name, f"r{number}", ids, len(SYSTEMS[system]))
    return server


def test_the_second_session_begins_where_the_first_one_left_its_prefix() -> None:
    server = begun("a", "a", "b")
    server.admit(10)  # u, in chunks
    assert server.chunked is not None
    server.admit(30)
    for _ in range(2):
        server.admit(30)
    stats = {name: session.ledger.stats for name, session in server.table.sessions.items()}
    assert [stats[name].cached_tokens for name in "uvw"] == [0, SHARED, 0]
    assert [stats[name].shared for name in "uvw"] == [SHARED] * 3
    assert [stats[name].prefill_tokens for name in "uvw"] == [28] * 3
    rows = [held.req_pool_idx for held in server.holders().values() if held.req_pool_idx]
    tables = [server.worker.pool.table[row, :SHARED].tolist() for row in rows]
    assert len({tuple(each) for each in tables}) == 2  # of two messages, five holders
    # Seven pages of u, three of v's own, seven of w.
    assert len(server.free) == PAGES - 17


def test_who_needs_what_another_one_computes_waits_and_others_do_not() -> None:
    server = begun("a", "a", "b")
    request = server.waiting_queue[0]
    server.admit(5)
    server.chunked = None  # the server has something else to do first
    server.admit(30)
    assert [each.rid for each in server.waiting_queue] == ["r1"]  # w, another message, began
    server.chunked = request
    server.admit(30)
    server.admit(30)
    assert not server.waiting_queue


@pytest.mark.parametrize("how", ["put_back", "put_back and abort", "close"])
def test_who_waits_goes_on_when_the_computing_session_will_not(how: str) -> None:
    server = begun("a", "a")
    server.admit(5)
    session = server.table.sessions["u"]
    if how == "close":
        server.close(session)
    else:
        server.put_back(session)
    if how.endswith("abort"):
        server.abort(session)
    server.admit(30)
    assert server.table.sessions["v"].ledger.stats.shared == SHARED


def test_a_full_pool_gives_up_a_prefix_that_nobody_reads_first() -> None:
    server = begun("a", "b")
    server.admit(30)
    server.close(server.table.sessions["u"])
    (prefix,) = server.table.prefixes.held
    assert not prefix.rows_in_use
    server.free = server.free[:6]  # v needs seven
    server.admit(30)
    assert server.waiting_queue  # the room is made
    server.admit(30)
    assert not server.waiting_queue
    assert prefix.name not in server.slots


@pytest.mark.parametrize("budget", [12, 13, 16, 22, 40])
def test_an_event_frees_no_page_of_others(budget: int) -> None:
    """Of a prompt that fills the budget, and so of the message, only the beginning stays."""
    chosen = make_method("triattention", budget, {"interval": "4", "prefix": "shared"})
    server = begun("a", "a", more=30, chosen=chosen)
    for _ in range(2):
        server.admit(60)
    sessions = server.table.sessions.values()
    for session in sessions:
        server.prepare(session)
        assert server.owned() == list(range(PAGES))
    assert [session.ledger.live for session in sessions] == [budget] * 2
    shared = SHARED if budget >= SHARED else 0
    assert [session.shared for session in sessions] == [shared] * 2
    for session in sessions:
        row = server.worker.pool.table[session.request.req_pool_idx, :budget]
        first = [*session.request.origin_input_ids[:budget]]
        assert [server.written[int(slot)] for slot in row] == first


def test_what_waits_for_room_holds_no_prefix() -> None:
    server = begun("a", "a")
    server.admit(30)
    server.rest(server.table.sessions["u"])
    kept, server.free = server.free, []
    server.admit(30)  # what u has makes room
    session = server.table.sessions["v"]
    assert (session.prefix, session.shared, "v" in server.slots) == (None, 0, False)
    assert server.memory.drops == 1
    server.free += kept
    server.admit(30)
    assert session.ledger.stats.cached_tokens == SHARED


def test_rows_of_the_table_are_taken_from_who_is_longest_at_rest() -> None:
    """With a row each, the 33rd conversation waited for whatever ran, or ended SGLang (0.5.12)."""
    server = Server(method(), pages=20, rows=3)
    for number, name in enumerate("uvw"):
        server.table.open(name, lasting=True)
        server.begin(name, name, list(range(100 * number, 100 * number + 9)), 0)
        server.admit(30)
    rows = server.req_to_token_pool
    assert (rows.free_slots, server.memory.has_row(), server.memory.drops) == ([], False, 0)
    for name in "vu":
        server.rest(server.table.sessions[name])
    assert server.memory.has_row()
    assert (len(rows.free_slots), server.memory.drops) == (1, 1)
    assert server.memory.has_row()
    assert server.memory.drops == 1  # one is enough
    assert server.slots.keys() == {"u"}
    assert server.memory.has_row(promised=1)
    assert (len(rows.free_slots), server.memory.drops, server.slots) == (2, 2, {})
    assert not server.memory.has_row(promised=2)


def test_room_for_growth_counts_what_a_session_will_find() -> None:
    chosen = make_method("streamingllm", 40, {"prefix": "shared", "protect": "system"})
    found = []
    for system in ("a", "none"):
        table = SglangSessions(chosen, 1, PAGE, lambda _: pytest.fail("no stop text"))
        session = table.open("s", lasting=True)
        session.shared = SHARED if system == "a" else 0
        sampling = SimpleNamespace(max_new_tokens=400, ignore_eos=True)
        request = SimpleNamespace(sampling_params=sampling, output_ids=[])
        found.append(_growth(session, request, 10))
    assert found == [40 + chosen.interval - 26, 40 + chosen.interval - 10]


@pytest.mark.usefixtures("session_nodes")
def test_shared_tokens_neither_leave_nor_are_written_again() -> None:
    server = begun("a")
    server.admit(30)
    session = server.table.sessions["u"]
    server.rest(session)
    controller = SimpleNamespace(sessions={"u": SimpleNamespace(req_nodes={})})
    runtime: Any = SimpleNamespace(
        table=server.table, forks=server.forks, scheduler=server, version=server.version
    )
    server.session_controller = controller  # type: ignore[attr-defined]
    commands = Commands(runtime).handlers()
    with pytest.raises(ValueError, match="the first 16 tokens of session u are shared"):
        commands["evict_spans"]({"session": "u", "spans": [[15, 20]]})
    commands["rewind"]({"session": "u", "length": 15})
    assert (session.prefix, session.tokens, session.ledger.fed) == (None, 15, 0)
    (prefix,) = server.table.prefixes.held
    assert not prefix.rows_in_use
    assert prefix.name in server.slots


@pytest.mark.parametrize(
    ("name", "chosen", "said"),
    [
        ("full", {}, "has a prefix cache of its own"),
        ("agentkv", {"protect": "system", "positions": "cache"}, "no row stays common"),
        ("agentkv", {}, "use --set protect=system"),
    ],
)
def test_what_cannot_be_shared_is_refused(name: str, chosen: dict[str, str], said: str) -> None:
    budget = None if name == "full" else 64
    asked = make_method(name, budget, {"prefix": "shared", **chosen})
    with pytest.raises(UsageError, match=said):
        SglangEngine.check_options(EngineOptions("micro", asked, device="cpu"))
