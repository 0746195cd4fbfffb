"""Spans that leave sessions at rest: the scheduler's table, the workers' rows, and in vLLM."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from paged_blocks import BLOCK, POOL, Block, Manager, Pool

from agentbench_kv.cli import kvbench
from agentbench_kv.conformance.engines.fixture import prompt, write_model
from agentbench_kv.engines.base import Engine, EngineOptions, KVStats, Sampling
from agentbench_kv.engines.core.ledger import EvictionOrder, Rewind
from agentbench_kv.engines.core.policy import BackendPolicy
from agentbench_kv.engines.core.rings import RowShape
from agentbench_kv.engines.core.rows import WorkerRows
from agentbench_kv.engines.embedded.engine import EmbeddedEngine
from agentbench_kv.engines.vllm.engine import VllmEngine
from agentbench_kv.engines.vllm.plugin.blocks import SessionBlocks
from agentbench_kv.engines.vllm.plugin.sessions import VllmSession, VllmSessions
from agentbench_kv.errors import KVBenchError
from agentbench_kv.methods.base import Phase
from agentbench_kv.methods.spans import Resident
from agentbench_kv.phases import TokenPhases
from agentbench_kv.registry import make_method
from agentbench_kv.results.store import RunStore

MODEL = Path("agentbench_kv/models/micro").resolve()


class Store:
    """Rows in blocks by number: each is the token that was written there."""

    def __init__(self, pool: Pool, blocks: Sequence[int], live: int) -> None:
        self._blocks = [pool.blocks[number - 1] for number in blocks]
        self._live = live

    def keep(
        self, kept: torch.Tensor, positions: torch.Tensor, extras: Sequence[Any], *, sort: bool
    ) -> int:
        del extras
        assert sort
        rows = read(self._blocks, self._live)
        for place, row in enumerate(kept[0, 0].tolist()):
            self._blocks[place // BLOCK].rows[place % BLOCK] = rows[row]
        positions[0, 0, : kept.shape[-1]] = positions[0, 0, kept[0, 0]].clone()
        return 0


def read(blocks: Sequence[Block], rows: int) -> list[int]:
    return [blocks[at // BLOCK].rows[at % BLOCK] for at in range(rows)]


class KeepingPool(Pool):
    """One whose blocks hold what they held until somebody writes there, as a GPU's do."""

    def get(self) -> Block:
        block = next(block for block in self.blocks if not block.ref_cnt)
        block.ref_cnt = 1
        return block


class SpanMachine(RuleBasedStateMachine):
    """Sessions grow, lose spans, go back, are put back and close, in any order."""

    def __init__(self) -> None:
        super().__init__()
        pool = self.pool = KeepingPool()
        self.manager: Any = Manager(pool)
        coordinator = SimpleNamespace(single_type_managers=[self.manager])
        outer = SimpleNamespace(coordinator=coordinator, block_pool=pool)
        self.table = VllmSessions(Resident(), 1, SessionBlocks(outer, evicting=0))
        shape = RowShape(1, 1, 1, 2, torch.float32, torch.device("cpu"))
        self.rows = WorkerRows(BackendPolicy(Resident(), MODEL, Path()), shape, torch.ones(1))
        self.logs: dict[str, list[int]] = {}
        self.gone: dict[str, set[int]] = {}
        self.numbers = 0

    @rule(name=st.sampled_from("uvw"), more=st.integers(1, 40), answer=st.integers(1, 12))
    def turn(self, name: str, more: int, answer: int) -> None:
        self.numbers += 1
        log = self.logs.setdefault(name, [])
        log += range(1000 * self.numbers, 1000 * self.numbers + more)
        request = SimpleNamespace(
            request_id=f"r{self.numbers}",
            session_id=name,
            sampling_params=None,
            prompt_token_ids=list(log),
            num_computed_tokens=0,
            skip_reading_prefix_cache=False,
        )
        self.table.begin(request)
        session = self.table.sessions[name]
        assert request.num_computed_tokens == session.ledger.fed
        for step in range(answer):
            if not self.feed(session, log):
                self.manager.free(session.request)
                self.table.lose(session)
                self.gone[name] = set()
                break
            log.append(500 + step)
        self.table.rest(session, list(log))

    def feed(self, session: VllmSession, log: list[int]) -> bool:
        """One forward, in vLLM's order: blocks, what the workers do before it, the tokens."""
        fed, total = session.ledger.fed, len(log)
        held = self.manager.req_to_blocks.get(session.request, [])
        needed = -(-(total - session.ledger.deficit) // BLOCK) - len(held)
        while needed > self.pool.get_num_free_blocks():
            if not self.table.make_room(session.request):
                return False
        self.manager.allocate_new_blocks(session.request, total, 0)
        self.work()
        known = self.rows._open(session.name)
        assert len(known.phases) == fed
        known.phases += [int(Phase.OTHERS)] * (total - fed)
        blocks = self.manager.req_to_blocks[session.request]
        for place, token in enumerate(log[fed:], session.ledger.live):
            blocks[place // BLOCK].rows[place % BLOCK] = token
        session.ledger.forward(total - fed)
        session.ledger.sampled()
        return True

    def work(self) -> None:
        for name in self.table.dropped:
            self.rows.drop(name)
            self.gone[name] = set()
        self.table.dropped.clear()
        for each in self.table.before:
            if isinstance(each, Rewind):
                self.rows.rewind(each.session, each.length)
            else:
                assert isinstance(each, EvictionOrder)
                store: Any = Store(self.pool, each.blocks, each.eviction.live)
                self.rows.remove(each, store)
        self.table.before.clear()

    def resting(self, name: str) -> VllmSession | None:
        session = self.table.sessions.get(name)
        return session if session is not None and session.ledger.fed else None

    @rule(
        name=st.sampled_from("uvw"),
        spans=st.lists(st.tuples(st.integers(-3, 90), st.integers(0, 30)), max_size=3),
    )
    def evict(self, name: str, spans: list[tuple[int, int]]) -> None:
        session = self.resting(name)
        if session is None:
            return
        inside = {at for start, size in spans for at in range(start, start + size)}
        leaving = {at for at in inside if 0 <= at < session.ledger.fed} - self.of(name)
        wanted = [(start, start + size) for start, size in spans]
        assert self.table.evict_spans(session, wanted) == len(leaving)
        self.gone[name] = self.of(name) | leaving

    @rule(name=st.sampled_from("uvw"), length=st.integers(0, 90))
    def rewind(self, name: str, length: int) -> None:
        session = self.resting(name)
        if session is None or length >= len(self.logs[name]):
            return
        self.table.rewind(session, length)
        del self.logs[name][length:]
        self.gone[name] = {at for at in self.of(name) if at < length}

    @rule(name=st.sampled_from("uvw"))
    def close(self, name: str) -> None:
        if name in self.table.sessions:
            self.table.end(self.table.sessions[name])
            del self.logs[name]
            self.gone[name] = set()

    def of(self, name: str) -> set[int]:
        return self.gone.get(name, set())

    @invariant()
    def blocks_are_those_of_sessions(self) -> None:
        held = [block for blocks in self.manager.req_to_blocks.values() for block in blocks]
        assert len(held) == POOL - self.pool.get_num_free_blocks()
        for session in self.table.sessions.values():
            blocks = self.manager.req_to_blocks.get(session.request, [])
            assert len(blocks) == -(-session.ledger.live // BLOCK)

    @invariant()
    def rows_are_what_did_not_leave(self) -> None:
        self.work()
        for session in self.table.sessions.values():
            fed, log = session.ledger.fed, self.logs[session.name]
            wanted = [log[at] for at in range(fed) if at not in self.of(session.name)]
            assert session.ledger.live == len(wanted)
            if wanted:
                blocks = self.manager.req_to_blocks[session.request]
                assert read(blocks, len(wanted)) == wanted


class LazySpanMachine(SpanMachine):
    """The same where workers hear of it with the next forward alone: changes pile up."""

    @invariant()
    def rows_are_what_did_not_leave(self) -> None:
        if not self.table.before:
            super().rows_are_what_did_not_leave()


for machine in (SpanMachine, LazySpanMachine):
    machine.TestCase.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
TestSpans, TestLazySpans = SpanMachine.TestCase, LazySpanMachine.TestCase


def a_session(fed: int = 40, shared: int = 0) -> tuple[VllmSessions, VllmSession]:
    machine = SpanMachine()
    machine.turn("u", fed, 1)
    session = machine.table.sessions["u"]
    session.ledger.stats.shared = shared
    return machine.table, session


def test_what_others_read_does_not_leave() -> None:
    table, session = a_session(shared=16)
    with pytest.raises(ValueError, match="the first 16 tokens of session u are shared"):
        table.evict_spans(session, [(15, 20)])
    assert table.evict_spans(session, [(16, 20)]) == 4


def test_heads_that_keep_other_tokens_have_no_spans() -> None:
    table, session = a_session()
    table.method = make_method("streamingllm", 32)
    with pytest.raises(ValueError, match="keeps other tokens in every head"):
        table.evict_spans(session, [(1, 2)])


TURNS = ((160, 30), (60, 30), (9, 12), (45, 30))
# Between the turns: what leaves, and to which length the session then goes back.
CHANGES: list[tuple[list[tuple[int, int]], int | None]] = [
    ([(10, 45), (100, 131), (400, 420)], None),
    ([(20, 60), (180, 190)], 240),
    ([(0, 8), (190, 250)], None),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "qwen3", "qwen3")


@pytest.fixture(scope="module")
def vllm(vllm_python: Path, folder: Path) -> Iterator[VllmEngine]:  # noqa: ARG001
    """One server for all tests, which reads prompts in chunks of 64."""
    arguments = {"max-num-batched-tokens": "64", "enable-chunked-prefill": ""}
    method = make_method("full-constrained", None)
    made = VllmEngine.create(
        EngineOptions(
            str(folder), method, device="cpu", max_live_tokens=4096, engine_args=arguments,
            concurrency=3,
        )
    )  # fmt: skip
    yield made
    made.shutdown()


def play(
    engine: Engine, name: str, seed: int, *, goes_back: bool
) -> tuple[list[list[int]], list[int], KVStats]:
    """Play turns with changes between them; return the answers, what left, and the account."""
    engine.open(name, TokenPhases())
    answers, left, total = [], [], 0
    for number, (length, out) in enumerate(TURNS):
        if number:
            spans, back = CHANGES[number - 1]
            left += [engine.evict_spans(name, [span]) for span in spans]
            if back is not None and goes_back:
                engine.rewind(name, back)
                left.append(engine.evict_spans(name, [(back - 5, total)]))
                total = back
        ids = prompt(length, seed + number)
        engine.extend(name, ids, [TokenPhases().label(token) for token in ids])
        answers.append(list(engine.generate(name, Sampling(out))))
        total += length + out
    return answers, left, engine.close(name)


@pytest.mark.engine
@pytest.mark.parametrize("method", [Resident(), Resident(positions="cache")], ids=["stay", "move"])
def test_sessions_that_lose_spans_are_the_embedded_engines(
    vllm: VllmEngine, folder: Path, method: Resident
) -> None:
    goes_back = method.positions == "logical"  # nobody knows where turned keys would be
    vllm.reconfigure(method)
    reference = EmbeddedEngine.create(
        EngineOptions(str(folder), method, device="cpu", max_live_tokens=100_000)
    )
    with ThreadPoolExecutor(3) as threads:
        found = list(
            threads.map(lambda i: play(vllm, f"s{i}", 10 * i, goes_back=goes_back), range(3))
        )
    wanted = [play(reference, f"s{i}", 10 * i, goes_back=goes_back) for i in range(3)]
    reference.shutdown()
    assert found == wanted
    assert all(left[:2] == [35, 31] and stats.evicted > 100 for _, left, stats in found)
    pool = vllm.pool()
    assert (pool["sessions"], pool["free_blocks"]) == (0, pool["total_blocks"])


@pytest.mark.engine
def test_blocks_go_back_as_spans_leave(vllm: VllmEngine) -> None:
    vllm.reconfigure(Resident())
    vllm.open("s", TokenPhases())
    ids = prompt(320, 1)
    vllm.extend("s", ids, [TokenPhases().label(token) for token in ids])
    list(vllm.generate("s", Sampling(1)))
    before = vllm.pool()["free_blocks"]
    assert vllm.evict_spans("s", [(0, 160)]) == 160
    assert vllm.pool()["free_blocks"] == before + 160 // vllm.pool()["block_size"]
    assert vllm.evict_spans("s", [(0, 160), (900, 950)]) == 0
    stats = vllm.close("s")
    assert (stats.evicted, len(stats.events), stats.live) == (160, 1, 160)


@pytest.mark.engine
def test_a_method_that_ranks_rows_has_no_spans(vllm: VllmEngine) -> None:
    vllm.reconfigure(make_method("streamingllm", 96))
    vllm.open("s", TokenPhases())
    ids = prompt(60, 1)
    vllm.extend("s", ids, [TokenPhases().label(token) for token in ids])
    list(vllm.generate("s", Sampling(4)))
    with pytest.raises(KVBenchError, match="keeps other tokens in every head"):
        vllm.evict_spans("s", [(0, 10)])
    vllm.close("s")


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.usefixtures("vllm_python")
@pytest.mark.parametrize("how", ["span", "span+move"])
def test_cleared_tool_results_leave_as_in_the_embedded_engine(tmp_path: Path, how: str) -> None:
    words = ["run", "--task", "micro/recall-1k", "--method", "clear-tools", "--budget", "800"]
    words += ["--set", f"exec={how}", "--limit", "2", "--device", "cpu", "--quiet"]
    found = []
    for name in ("embedded", "vllm"):
        out = tmp_path / name
        done = CliRunner().invoke(kvbench, [*words, "--engine", name, "--out", str(out)])
        assert done.exit_code == 0, done.output
        (run,) = RunStore(out).names()
        trials = RunStore(out).find(run).trials()
        found.append({each.sample_id: (each.score, each.kv, each.usage) for each in trials})
    assert found[0] == found[1]
    assert sum(account.evicted for _, account, _ in found[0].values()) > 0
