"""Who may generate, with cells that nothing is written to: no llama.cpp is needed."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import torch

from agentbench_kv.engines.base import Sampling
from agentbench_kv.engines.llamacpp.server.admission import Admission
from agentbench_kv.engines.llamacpp.server.prefixes import SequencePrefixes
from agentbench_kv.engines.llamacpp.server.scheduler import BatchScheduler
from agentbench_kv.engines.llamacpp.server.session import BackendGeneration, BackendSession
from agentbench_kv.methods.base import Method
from agentbench_kv.phases.machine import PromptPhases
from agentbench_kv.registry import make_method

SYSTEM, OWN, ANSWER = 300, 20, 30
NOTHING: Any = SimpleNamespace(fork=lambda *_: None, drop=lambda *_: None)


class FreeCells:
    """Cells and their context, as far as whoever admits looks at them."""

    def __init__(self, count: int) -> None:
        self.holders = torch.zeros(count, dtype=torch.int32)
        nothing = {"share": lambda *_: None, "remove": lambda *_: None}
        self.context = SimpleNamespace(cells=count, scratch=40, **nothing)

    @property
    def used(self) -> int:
        return int(self.holders.count_nonzero())


class Room:
    """A cache of so many cells under a method, and its sessions."""

    def __init__(self, cells: int, method: Method) -> None:
        self.cells: Any = FreeCells(cells)
        self.method = method
        self.prefixes = SequencePrefixes(method, NOTHING, 40)
        self.admission = Admission(self.cells, method, self.prefixes)
        self.sessions: dict[str, BackendSession] = {}

    def asked(self, name: str, system: int = SYSTEM) -> BackendGeneration:
        session = BackendSession(name, self.method, self.cells, 1)
        session.tokens = [*range(system), *[7] * OWN]
        session.prompt = PromptPhases(prompt=system + OWN, system=system)
        session.begin_turn(len(session.tokens))
        self.prefixes.plan(session)
        self.sessions[name] = session
        return BackendGeneration(session, Sampling(max_tokens=ANSWER), NOTHING)

    def admit(self, generation: BackendGeneration) -> bool:
        assert self.prefixes.ready(generation.session)
        return self.admission.admit(generation, self.sessions.values())

    def feed(self, session: BackendSession) -> None:
        """Feed a session all that is pending, as a scheduler does."""
        while session.pending:
            free = (self.cells.holders == 0).nonzero()[: session.next_rows, 0]
            session.fed(free)
            self.admission.leave_prefix(session, self.sessions.values())


def room(cells: int, name: str = "full", budget: int | None = None, **settings: str) -> Room:
    return Room(cells, make_method(name, budget, {**settings, "prefix": "shared"}))


def test_rows_in_common_need_room_once() -> None:
    """Three sessions of 350 rows at once, where 512 have room: 300 and three times 50."""
    found = room(512)
    for name in "abc":
        generation = found.asked(name)
        assert found.admit(generation)
        found.feed(generation.session)
    assert found.cells.used == SYSTEM + 3 * OWN
    assert [each.ledger.stats.cached_tokens for each in found.sessions.values()] == [0, 300, 300]
    own = found.asked("d", system=0)
    assert found.admit(own)  # 20 and 30 more come to 500 in the end
    assert not found.admit(found.asked("e", system=0))


def test_rows_that_an_event_copies_need_room_twice() -> None:
    for name, budget, settings, together in (
        ("streamingllm", 340, {"protect": "system"}, True),
        ("streamingllm", 340, {"protect": "system", "positions": "cache"}, False),
        ("triattention", SYSTEM, {}, True),
        ("triattention", SYSTEM - 1, {}, False),
    ):
        found = room(512, name, budget, **settings)
        first, second = found.asked("a"), found.asked("b")
        assert found.admit(first)
        found.feed(first.session)
        assert (first.session.rows.common > 0) is together
        # There is no room for copies beside the prefix: nobody is to find it.
        assert (found.prefixes.find(second.session) is not None) is together
        assert found.admit(second) is together


def test_a_prefix_goes_where_what_is_copied_of_it_has_no_room() -> None:
    cells = 930
    found = room(cells, "streamingllm", 340, positions="cache", protect="system")
    first = found.asked("a")
    assert found.admit(first)
    found.feed(first.session)
    found.admission.settle(first.session)
    assert found.prefixes.find(found.asked("b").session) is not None
    large = found.asked("large", system=0)
    large.session.tokens = [7] * 500
    assert found.admit(large)
    found.feed(large.session)
    first.session.tokens += [7] * OWN
    first.session.begin_turn(OWN)
    assert found.admit(first)
    growth = sum(found.admission._growth(each.session) for each in (first, large))
    assert found.cells.used + growth <= cells
    assert first.session.rows.shared == 0
    assert found.prefixes.find(found.sessions["b"]) is None


def test_who_would_begin_with_a_prefix_that_has_to_go_computes_it() -> None:
    """One that was computed under others, and has no room beside those who generate now."""
    cells = 1000
    found = room(cells, "streamingllm", 340, positions="cache", protect="system")
    first, second = found.asked("a"), found.asked("b")
    assert found.admit(first)
    found.feed(first.session)
    found.admission.settle(first.session)
    first.session.lose()
    found.admission.release(first.session)
    large = found.asked("large", system=0)
    large.session.tokens = [7] * 500
    assert found.admit(large)
    found.feed(large.session)
    assert found.prefixes.find(second.session) is not None
    assert found.admit(second)
    assert (second.session.prefix_key, second.session.rows.live) == (None, 0)
    found.feed(second.session)
    growth = sum(found.admission._growth(each.session) for each in (second, large))
    assert found.cells.used + growth <= cells


def scheduler_of(found: Room, *waiting: BackendGeneration) -> Any:
    made = object.__new__(BatchScheduler)
    about = {"prefixes": found.prefixes, "admission": found.admission, "sessions": found.sessions}
    for name, value in {**about, "_waiting": deque(waiting), "_running": []}.items():
        setattr(made, name, value)
    return made


def test_who_needs_no_prefix_need_not_wait_for_one() -> None:
    found = room(2048)
    names = {"computes": SYSTEM, "waits": SYSTEM, "other": 0}
    asked = [found.asked(*each) for each in names.items()]
    scheduler = scheduler_of(found, *asked)
    scheduler._admit()
    assert [each.session.name for each in scheduler._running] == ["computes", "other"]
    found.feed(asked[0].session)
    scheduler._admit()
    assert [each.session.name for each in scheduler._running] == ["computes", "other", "waits"]


def test_who_leaves_the_queue_leaves_the_prefix_to_others() -> None:
    found = room(512)
    full = found.asked("full", system=0)
    full.session.tokens = [7] * 450
    assert found.admit(full)
    ends: Any = SimpleNamespace(end=lambda: None)
    first, second = found.asked("first"), found.asked("second")
    first.stream = ends
    scheduler = scheduler_of(found, first, second)
    scheduler._admit()
    assert first.session.computes_prefix
    assert not found.prefixes.ready(second.session)
    scheduler._end(first)
    assert found.prefixes.ready(second.session)
