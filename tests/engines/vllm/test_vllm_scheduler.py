"""Our scheduler above one that behaves like vLLM's: who gives way, and that nobody hangs."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from vllm_scheduler import BLOCK, Request
from vllm_stand_ins import MICRO, cache_of, config

from agentbench_kv.accounting import KVStats
from agentbench_kv.engines.core.policy import VARIABLE, BackendPolicy, method_document
from agentbench_kv.methods.base import Method
from agentbench_kv.registry import make_method

ALL = make_method("full-constrained", None)
SHARED = {"prefix": "shared", "protect": "system"}
STEPS = 2000  # more than any test takes


class Server:
    """A scheduler and its clients, who send whole sessions."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.logs: dict[str, list[int]] = {}
        self.asked: dict[str, Request] = {}  # what has not been answered, by session
        self.numbers = itertools.count(1)

    @property
    def table(self) -> Any:
        return self.scheduler.sessions

    def ask(self, name: str, more: int, answer: int, system: int = 0) -> Request:
        """Send a session with so many new tokens."""
        log = self.logs.setdefault(name, list(range(system)))
        log += range(1000 * len(log), 1000 * len(log) + more)
        request = Request(f"r{next(self.numbers)}", name, list(log), answer, system)
        self.asked[name] = request
        self.scheduler.add_request(request)
        return request

    def step(self) -> set[str]:
        """Run a step; return the sessions that were in it."""
        output = self.scheduler.schedule()
        ran = set()
        for name in output.num_scheduled_tokens:
            session = self.table.by_request[name]
            assert session.ledger.fed == self.scheduler.requests[name].num_computed_tokens
            ran.add(session.name)
        self.scheduler.update_from_output(output, SimpleNamespace())
        for name, request in list(self.asked.items()):
            if request.is_finished():
                self.logs[name] = request.all_token_ids
                del self.asked[name]
        return ran

    def until(self, *names: str) -> None:
        """Run steps until these sessions are answered; each has to do something."""
        for _ in range(STEPS):
            if not self.asked.keys() & names:
                return
            assert self.step(), f"nothing runs, {', '.join(self.asked)} wait"
        pytest.fail(f"{', '.join(self.asked)} are not answered")

    def command(self, name: str, **arguments: Any) -> Any:
        return self.scheduler._control.commands[name](arguments)

    def stats(self, name: str) -> KVStats:
        found: KVStats = self.table.sessions[name].ledger.snapshot()
        return found

    def held(self, name: str) -> int:
        """Blocks of a session."""
        return int(self.table.blocks.held(self.table.sessions[name].request))


Build = Callable[..., Server]


@pytest.fixture
def build(plugin: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Build:
    def made(
        method: Method = ALL, blocks: int = 100, sessions: int = 5, workers: int = 1
    ) -> Server:
        policy = BackendPolicy(method, MICRO, tmp_path / "socket")
        monkeypatch.setenv(VARIABLE, str(policy.save(tmp_path)))
        cache = cache_of(["layers.0"])
        cache.num_blocks = blocks
        asked = config(sessions)
        asked.parallel_config.tensor_parallel_size = workers
        return Server(plugin.EvictingScheduler(asked, cache))

    return made


def rest(server: Server, name: str, blocks: int) -> None:
    """Let a session fill so many blocks, and rest with them."""
    server.ask(name, blocks * BLOCK - 1, 2)
    server.until(name)
    assert server.held(name) == blocks


def test_a_session_that_waits_with_its_rows_gives_way_where_nothing_runs(build: Build) -> None:
    server = build()
    for name in "ab":
        rest(server, name, 48)
    server.ask("c", 10, 9)
    server.step()
    for name in "ab":
        server.ask(name, 100, 5)
    server.until("a", "b", "c")
    a, b = server.stats("a"), server.stats("b")
    assert (a.recomputed, a.restarts) == (0, [])
    # All of its first turn again, but for the last token, which was never computed before.
    assert (b.recomputed, b.restarts) == (384, [(0, 485)])
    assert (a.prefill_tokens, b.prefill_tokens) == (383 + 100, 383 + 485)
    assert server.scheduler.preempted == 0


def test_the_first_in_the_queue_goes_on_with_its_rows_and_the_others_keep_their_order(
    build: Build,
) -> None:
    server = build(sessions=1)
    for name in "abc":
        rest(server, name, 30)
    server.ask("d", 40, 2)
    for name in "abc":
        server.ask(name, 400, 3)
    order: list[str] = []
    while server.asked:
        (ran,) = server.step()
        order += [ran] if ran not in order[-1:] else []
    assert order == ["a", "b", "c", "d"]
    assert [server.stats(name).recomputed for name in "abc"] == [0, 240, 240]


def test_who_waits_gives_way_before_anybody_who_runs(build: Build) -> None:
    server = build(sessions=1)
    rest(server, "b", 50)
    server.ask("a", 370, 80)
    server.step()
    server.ask("b", 8, 2)
    server.until("a", "b")
    assert server.scheduler.preempted == 0
    assert [server.stats(name).recomputed for name in "ab"] == [0, 400]


def test_a_request_that_waits_for_those_that_run_drops_nobody_in_vain(build: Build) -> None:
    server = build()
    for name in "xyz":
        rest(server, name, 10)
    server.ask("long", 60 * BLOCK - 8, 8)
    while server.held("long") < 60:
        server.step()
    assert server.table.blocks.free == 10
    server.ask("new", 50 * BLOCK - 8, 2)
    assert "new" not in server.step()
    assert (server.table.drops, server.table.blocks.free) == (0, 10)
    server.until("new", "long")
    assert server.table.drops > 0
    assert server.stats("long").recomputed == 0


def test_where_the_first_part_of_a_prompt_is_enough_others_at_rest_give_way(build: Build) -> None:
    server = build()
    server.scheduler.scheduler_reserve_full_isl = False
    rest(server, "x", 10)
    server.ask("long", 60 * BLOCK - 8, 8)
    while server.held("long") < 60:
        server.step()
    server.ask("new", 50 * BLOCK - 8, 2)
    server.step()
    assert server.table.drops == 1


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_a_prompt_that_was_hung_up_on_counts_once(build: Build, steps: int) -> None:
    """It was counted again from its beginning, or from where it had been read."""
    server = build()
    server.scheduler.max_num_scheduled_tokens = 24
    request = server.ask("a", 40, 4)
    for _ in range(steps):
        server.step()
    del server.asked["a"]
    server.scheduler.finish_requests(request.request_id, type(request.status).FINISHED_ABORTED)
    server.logs["a"] = request.all_token_ids
    server.ask("a", 10, 4)
    server.until("a")
    stats = server.stats("a")
    assert stats.prefill_tokens == 50
    assert stats.recomputed == 0


def test_as_many_sessions_at_rest_are_dropped_as_a_request_needs(build: Build) -> None:
    server = build()
    for name in "xyz":
        rest(server, name, 10)
    server.ask("long", 30 * BLOCK - 8, 8)
    while server.held("long") < 30:
        server.step()
    server.ask("new", 50 * BLOCK - 8, 2)
    assert "new" in server.step()
    assert server.table.drops == 1
    assert [server.held(name) for name in "xyz"] == [0, 10, 10]


@pytest.mark.parametrize("readers", ["rest", "run"])
def test_a_shared_prefix_is_room_only_if_its_readers_are_at_rest(
    build: Build, readers: str
) -> None:
    server = build(make_method("full-constrained", None, SHARED))
    for name in "xy":
        server.ask(name, 15, 2, system=20 * BLOCK)
        server.until(name)
    request = server.ask("x", 5, 50, system=20 * BLOCK)
    if readers == "rest":
        server.until("x")
        request = server.ask("z", 5, 2)
    # Beside the message, which its own reference holds too: two blocks, or three by then nine.
    expected = 20 + 2 + 9 if readers == "rest" else 2
    assert server.table.could_free(request.request_id) == expected


def configure(server: Server, folder: Path, name: str, **settings: Any) -> Method:
    """Go on with another method; return the one that sessions have from then on."""
    method = make_method(name, 96, settings)
    server.command("configure", method=method_document(method, folder))
    found: Method = server.table.method
    assert found == server.scheduler._policy.method == method
    return found


def test_another_method_is_refused_as_at_the_start_and_changes_nothing(
    build: Build, tmp_path: Path
) -> None:
    server = build(make_method("agentkv", 96), workers=2)
    before = server.scheduler._policy
    for name, said in (("tova", "kept_set=per_layer"), ("random", "number of a head")):
        with pytest.raises(ValueError, match=f"{said}.* under tensor parallelism"):
            configure(server, tmp_path, name)
        assert (server.scheduler._policy, server.table.method) == (before, before.method)
        assert server.scheduler.schedule().kvbench.method is None
    configure(server, tmp_path, "snapkv")
    told = server.scheduler.schedule().kvbench.method
    assert told["class"].endswith("SnapKV")


def test_no_method_keeps_more_queries_on_a_gpu_than_the_first_one(
    build: Build, tmp_path: Path
) -> None:
    server = build(make_method("agentkv", 96))
    before = server.scheduler._policy
    for larger in ({"sampler": "shuffled"}, SHARED):
        with pytest.raises(ValueError, match="memory for 160; start it anew"):
            configure(server, tmp_path, "agentkv", **larger)
        assert (server.scheduler._policy, server.table.method) == (before, before.method)
    for name in ("streamingllm", "tova", "agentkv"):  # what was taken stays taken
        configure(server, tmp_path, name)


def test_on_a_cpu_queries_take_what_memory_there_is(
    build: Build, plugin: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin.current_platform, "is_cpu", lambda: True)
    server = build(make_method("agentkv", 96))
    configure(server, tmp_path, "agentkv", sampler="shuffled")


NAMES = st.sampled_from("abcdef")
BLOCKS = 48


class SchedulerMachine(RuleBasedStateMachine):
    """Sessions ask, go on, are aborted and close, in any order and in a small pool."""

    build: Build

    @initialize(
        method=st.sampled_from(
            [
                ("full-constrained", None, {}),
                ("full-constrained", None, SHARED),
                ("streamingllm", 96, {"interval": 4, "trigger": "prefill+every"}),
                ("streamingllm", 96, {"trigger": "turn", **SHARED}),
            ]
        ),
        sessions=st.integers(1, 4),
    )
    def start(self, method: tuple[str, int | None, dict[str, Any]], sessions: int) -> None:
        self.server = self.build(make_method(*method), BLOCKS, sessions)
        self.table = self.server.table

    def step(self) -> None:
        """Who preempts itself runs in the next step, if nobody else does."""
        server = self.server
        busy = bool(server.asked)
        ran = server.step()
        assert ran or not busy or server.step(), f"nothing runs, {', '.join(server.asked)} wait"

    @rule(
        names=st.sets(NAMES, min_size=1),
        more=st.integers(1, 150),
        answer=st.integers(1, 20),
        system=st.booleans(),
    )
    def ask(self, names: set[str], more: int, answer: int, system: bool) -> None:
        for name in sorted(names - self.server.asked.keys()):
            held = self.server.logs.get(name, [0] * 40)
            if len(held) + more + answer <= BLOCKS * BLOCK:
                self.server.ask(name, more, answer, 40 if system else 0)

    @rule(steps=st.integers(1, 30))
    def go_on(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    @rule(name=NAMES)
    def hang_up(self, name: str) -> None:
        if request := self.server.asked.pop(name, None):
            status = type(request.status).FINISHED_ABORTED
            self.server.scheduler.finish_requests(request.request_id, status)
            self.server.logs[name] = request.all_token_ids

    @rule(name=NAMES)
    def close(self, name: str) -> None:
        self.server.asked.pop(name, None)
        self.server.logs.pop(name, None)
        self.server.command("close", session=name)

    @invariant()
    def every_block_is_somebodys(self) -> None:
        manager = self.server.scheduler.kv_cache_manager
        tables = manager.manager.req_to_blocks
        held = Counter(block.block_id for blocks in tables.values() for block in blocks)
        held.update(block.block_id for each in self.table.prefixes.held for block in each.blocks)
        pool = manager.block_pool.blocks
        assert {block.block_id: block.ref_cnt for block in pool if block.ref_cnt} == held
        for session in self.table.sessions.values():
            blocks = tables.get(session.request, [])
            assert len(blocks) == -(-session.ledger.live // BLOCK)
            waits = session.request in self.server.scheduler.requests and session.ledger.fed
            assert not waits or session.running

    def teardown(self) -> None:
        if not hasattr(self, "server"):
            return
        for _ in range(STEPS):
            if self.server.asked:
                self.step()
        assert not self.server.asked
        for name in list(self.table.sessions):
            self.close(name)
        self.table.prefixes.clear()
        assert self.table.blocks.free == BLOCKS
        assert not self.table.by_request
        assert not self.table.blocks.deficits


def test_nobody_waits_for_ever_and_no_block_is_lost(build: Build) -> None:
    machine = type("Machine", (SchedulerMachine,), {"build": staticmethod(build)})
    run_state_machine_as_test(
        machine,
        settings=settings(max_examples=60, stateful_step_count=40, deadline=None),
    )
