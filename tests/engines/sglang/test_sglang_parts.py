"""Parts of the SGLang engine that need no SGLang: flags, wire, book-keeping, admission, pages."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agentbench_kv.engines.base import EngineOptions
from agentbench_kv.engines.core.ledger import Eviction
from agentbench_kv.engines.core.policy import BackendPolicy
from agentbench_kv.engines.core.rings import RowShape
from agentbench_kv.engines.core.rows import Fed
from agentbench_kv.engines.serving.model_facts import CpuRoom, ModelFacts
from agentbench_kv.engines.sglang.engine import SglangEngineWire, _refuse_abort, flags
from agentbench_kv.engines.sglang.plugin import cpu
from agentbench_kv.engines.sglang.plugin.hooks import Patches
from agentbench_kv.engines.sglang.plugin.memory import add_one_req, running_growth
from agentbench_kv.engines.sglang.plugin.prefixes import SharedPrefixes
from agentbench_kv.engines.sglang.plugin.sessions import SglangSessions, attach
from agentbench_kv.engines.sglang.plugin.steps import Steps
from agentbench_kv.engines.sglang.plugin.versions import VERSIONS, Sglang0512, Sglang0523
from agentbench_kv.engines.sglang.plugin.worker import DecodedRow, DeviceWorker, Pool, PrefilledRows
from agentbench_kv.errors import CapacityError, KVBenchError
from agentbench_kv.kernels.layout import PagedRows
from agentbench_kv.methods.base import Method
from agentbench_kv.phases.machine import PromptPhases
from agentbench_kv.registry import make_method

FACTS = ModelFacts("qwen3", 4, 4, 2, 64, 2048, (2,))


def command(method: str, gpu: bool, **more: Any) -> list[str]:
    options = EngineOptions(
        "micro", make_method(method, 512 if method == "agentkv" else None), **more
    )
    room = None if gpu else CpuRoom(4096, 9999, 1)
    return flags(options, FACTS, room, gpu=gpu, stock=method == "full", grammars=True)


def test_the_stock_arm_keeps_the_radix_cache_and_the_others_do_not() -> None:
    for gpu in (False, True):
        assert "--disable-radix-cache" not in command("full", gpu)
        assert "--enable-streaming-session" not in command("full", gpu)
        assert "--disable-radix-cache" in command("full-constrained", gpu)
        assert "--enable-streaming-session" in command("full-constrained", gpu)
        for method in ("full", "full-constrained"):
            assert "--disable-overlap-schedule" not in command(method, gpu)
    assert "--disable-piecewise-cuda-graph" not in command("full", True)
    assert "--disable-piecewise-cuda-graph" in command("full-constrained", True)
    assert "--disable-cuda-graph" not in command("full-constrained", True)


def test_prompts_are_read_in_the_engines_own_chunks() -> None:
    """Chunks of 512 made its attention for CPUs compute everything before each of them again."""
    for gpu, method in ((False, "full"), (False, "agentkv"), (True, "full"), (True, "agentkv")):
        assert "--chunked-prefill-size" not in command(method, gpu)


def test_engine_arguments_come_last_and_may_be_switches() -> None:
    words = command("full", False, engine_args={"page-size": "16", "disable-overlap-schedule": ""})
    assert words[words.index("--page-size") + 1] == "16"
    assert "--disable-overlap-schedule" in words
    assert "" not in words


def test_a_refusal_for_lack_of_memory_is_one() -> None:
    def event(**reason: Any) -> dict[str, Any]:
        return {"meta_info": {"finish_reason": {"type": "abort", "message": "why", **reason}}}

    with pytest.raises(CapacityError, match="why"):
        _refuse_abort(event(err_type="CapacityError"))
    with pytest.raises(KVBenchError, match="gave up: why"):
        _refuse_abort(event())
    _refuse_abort({"meta_info": {"finish_reason": {"type": "length"}}})
    _refuse_abort({"meta_info": {"finish_reason": None}})


@pytest.fixture(params=VERSIONS, ids=lambda version: type(version).__name__)
def version(request: pytest.FixtureRequest) -> Sglang0512:
    found: Sglang0512 = request.param
    return found


def test_every_target_has_a_hook(version: Sglang0512) -> None:
    patches = Patches(SimpleNamespace(), version)  # type: ignore[arg-type]
    hooks = {patches.hook(target) for target in version.targets}
    assert all(callable(hook) for hook in hooks)
    assert len(hooks) == len(version.targets)


def request(rid: str, tokens: int, limit: int, session: str | None = None) -> Any:
    parameters = SimpleNamespace(max_new_tokens=limit, ignore_eos=True, custom_params=None)
    owner = None if session is None else SimpleNamespace(session_id=session, streaming=True)
    return SimpleNamespace(
        rid=rid,
        session=owner,
        sampling_params=parameters,
        origin_input_ids=list(range(tokens)),
        output_ids=[],
    )


def table_of(method: Method) -> SglangSessions:
    return SglangSessions(method, 1, 1, lambda _: pytest.fail("no stop text was asked for"))


def test_a_session_is_its_request_in_flight_only() -> None:
    sessions = table_of(make_method("full-constrained", None))
    first = request("r1", 10, 5, "s")
    held = sessions.begin(first)
    assert sessions.of(first) is held
    assert sessions.of(request("r2", 10, 5, "s")) is None
    sessions.end_turn(held, 14)
    assert sessions.of(first) is None
    later = request("r3", 20, 5, "s")
    assert sessions.begin(later) is held
    assert held.starting == 6
    assert sessions.begin(request("alone", 3, 5)).lasting is False


def test_the_longest_at_rest_comes_first() -> None:
    sessions = table_of(make_method("full-constrained", None))
    for name in "abc":
        held = sessions.begin(request(name, 10, 5, name))
        held.ledger.forward(10)
    for name in "cab":
        sessions.end_turn(sessions.sessions[name], 10)
    sessions.begin(request("again", 20, 5, "a"))
    assert [held.name for held in sessions.resting()] == ["c", "b"]


def test_the_accounting_goes_out_with_the_last_tokens_only() -> None:
    sessions = table_of(make_method("full-constrained", None))
    first, refused = request("r1", 10, 5, "s"), request("r2", 3, 5)
    held = sessions.begin(first)
    attach(first, held)
    attach(refused, None)
    sent = slice(0, 1)
    assert first.customized_info.keys() == refused.customized_info.keys() == {"kvbench"}
    assert first.customized_info["kvbench"][sent] is None
    held.ledger.forward(10)
    sessions.end_turn(held, 10)
    assert first.customized_info["kvbench"][sent]["live"] == 10
    sessions.begin(request("r3", 20, 5, "s"))
    assert first.customized_info["kvbench"][sent] is None
    assert refused.customized_info["kvbench"][sent] is None


@pytest.mark.parametrize(
    ("method", "budget", "settings", "growth"),
    [
        ("full-constrained", None, {}, 5000),
        ("streamingllm", 96, {"interval": 32}, 32),
        ("streamingllm", 400, {"interval": 32}, 332),
        ("streamingllm", 96, {"interval": 32, "trigger": "turn"}, 5000),
        # Nothing may be evicted: the budget holds no more than the protected prompt.
        ("streamingllm", 96, {"interval": 32, "protect": "prompt"}, 5000),
        ("streamingllm", 196, {"interval": 32, "protect": "prompt"}, 128),
    ],
)
def test_admission_counts_with_bounded_growth(
    method: str, budget: int | None, settings: dict[str, Any], growth: int
) -> None:
    sessions = table_of(make_method(method, budget, settings))
    arrived = request("r", 100, 5000, "s")
    sessions.begin(arrived)
    seen = []

    def original(_adder: Any, asked: Any, **rest: Any) -> str:
        sampling = asked.sampling_params
        seen.append((sampling.max_new_tokens, sampling.ignore_eos, rest))
        return "added"

    added = add_one_req(sessions, original, None, arrived, 100, has_chunked_req=False)
    assert added == "added"
    assert seen == [(growth, False, {"has_chunked_req": False})]
    assert (arrived.sampling_params.max_new_tokens, arrived.sampling_params.ignore_eos) == (
        5000,
        True,
    )

    def estimate(_adder: Any, asked: Any) -> float:
        assert not asked.sampling_params.ignore_eos
        return 4096.0

    assert running_growth(sessions, estimate, None, arrived) <= min(4096, growth + 100)
    assert arrived.sampling_params.ignore_eos


class FakeWorker:
    """Stands for the device: counts what it is told."""

    def __init__(self) -> None:
        self.deficits = [0] * 4
        self.keeps_queries = False
        self.labelled: list[int] = []
        self.rows = SimpleNamespace(drop=lambda _name: None)

    def plan_prefill(self, fed: Any, _parts: Any, _prompts: Any, _left: Any) -> None:
        self.labelled += [token for each in fed for token in each.tokens]

    def settle(self, decoded: Any) -> None:
        self.labelled += [token for each in decoded for token in each.fed.tokens]


class FakeCache:
    """Stands for the session cache: notes what is freed."""

    def __init__(self) -> None:
        self.freed: list[tuple[int, int]] = []

    def _free_kv_aligned(self, row: Any, first: int, end: int) -> None:
        assert getattr(row, "req_pool_idx", row) == 1
        self.freed.append((first, end))


def prefilled_request(version: Sglang0512, tokens: int, limit: int) -> Any:
    """Return a request of a session whose prefill is about to run, as a version describes it."""
    one, record = request("r", tokens, limit, "s"), SimpleNamespace()
    if isinstance(version, Sglang0523):
        one.kv, one.prefix_len, one.extend_end = record, 0, tokens
        one.get_fill_ids = lambda: one.origin_input_ids[: one.extend_end]
    else:
        record, one.fill_ids, one.prefix_indices = one, one.origin_input_ids, []
    record.req_pool_idx = 1
    record.kv_committed_len = record.kv_allocated_len = tokens
    return one


def turn(
    version: Sglang0512, overlap: bool, method: Method, skipped: int = 0
) -> tuple[Any, FakeWorker, FakeCache, list[Eviction]]:
    """Play one turn of 6 tokens as SGLang's scheduler would, working ahead or not.

    The step of number `skipped`, from 1 on, runs no forward after it was prepared.
    """
    sessions, worker, cache = table_of(method), FakeWorker(), FakeCache()
    evictions = list[Eviction]()
    compactor = SimpleNamespace(carry_out=lambda _held, _row, eviction: evictions.append(eviction))
    prefixes = SharedPrefixes(sessions, worker, None, version)  # type: ignore[arg-type]
    steps = Steps(sessions, worker, compactor, prefixes, version)  # type: ignore[arg-type]
    one = prefilled_request(version, 20, 6)
    rows, held = version.rows(one), sessions.begin(one)
    steps.prefill([one])
    sampled = list(range(100, 107))
    lengths = torch.tensor([20])
    summed = None if isinstance(version, Sglang0523) else 20
    batch = SimpleNamespace(reqs=[one], seq_lens=lengths, seq_lens_cpu=lengths, seq_lens_sum=summed)
    forwards, ahead = 1, overlap  # whether the last forward still runs
    for step in itertools.count(1):
        one.output_ids = sampled[: forwards - ahead]
        if len(one.output_ids) == 6:
            break
        steps.prepare(batch)
        ahead = overlap and step != skipped
        if step == skipped:
            continue
        assert held.samples == forwards  # the place in the answer of the token it will draw
        steps.decode([one])
        forwards += 1
        rows.kv_committed_len += 1
        rows.kv_allocated_len += 1
        batch.seq_lens_cpu = batch.seq_lens_cpu + 1
        batch.seq_lens = batch.seq_lens + 1
    steps.finish(cache, one, held, 6)
    return held, worker, cache, evictions


def short(name: str) -> Method:
    """Return a method whose events, if it has any, fall due with the third and sixth token."""
    if name == "full-constrained":
        return make_method(name, None)
    return make_method(name, 8, {"interval": 3, "sinks": 1})


@pytest.mark.parametrize("name", ["full-constrained", "streamingllm"])
def test_working_ahead_changes_nothing(version: Sglang0512, name: str) -> None:
    plain, ahead = (turn(version, overlap, short(name)) for overlap in (False, True))
    assert plain[0].ledger.snapshot() == ahead[0].ledger.snapshot()
    assert plain[1].labelled == ahead[1].labelled == [*range(20), *range(100, 105)]
    assert plain[3] == ahead[3]
    compresses = name != "full-constrained"
    assert len(plain[3]) == (2 if compresses else 0)
    # Ahead, the last event comes before the forward that is one too many; its row goes.
    freed = ([(11, 11)], [(8, 9)]) if compresses else ([(25, 25)], [(25, 26)])
    assert (plain[2].freed, ahead[2].freed) == freed


@pytest.mark.parametrize("skipped", range(1, 7))
@pytest.mark.parametrize("name", ["full-constrained", "streamingllm"])
def test_a_step_without_a_forward_counts_nothing(name: str, skipped: int) -> None:
    """0.5.23, working ahead, skips one if the pool is full and another request is about to end."""
    whole, held_up = (turn(Sglang0523(), True, short(name), number) for number in (0, skipped))
    assert held_up[0].ledger.snapshot() == whole[0].ledger.snapshot()
    assert held_up[1].labelled == whole[1].labelled
    assert held_up[3] == whole[3]


def small_worker(kept: str) -> DeviceWorker:
    shape = RowShape(2, 4, 2, 8, torch.float32, torch.device("cpu"))
    buffers = [[torch.zeros(64, 1, 2, 8) for _ in range(2)] for _ in range(2)]
    keys, values = (PagedRows.of(buffer, "brhd") for buffer in buffers)
    pool = Pool(keys, values, torch.zeros(3, 64, dtype=torch.int32), 1)
    policy = BackendPolicy(make_method(kept, 64), Path(), Path())
    worker = DeviceWorker(policy, shape, torch.ones(4), 2)
    worker.pool = pool
    return worker


def forward_of(decode: bool, rows: int) -> Any:
    mode = SimpleNamespace(is_decode=lambda: decode)
    return SimpleNamespace(forward_mode=mode, req_pool_indices=torch.full((rows,), 2))


@pytest.mark.parametrize("kept", ["agentkv", "snapkv"])
def test_staged_queries_end_up_where_a_prefill_puts_them(kept: str) -> None:
    tokens, prompts = [(7 * i) % 23 for i in range(40)], {"s": PromptPhases("token-id")}
    queries = torch.randn(2, len(tokens), 4, 8)
    whole, stepwise = small_worker(kept), small_worker(kept)
    for worker, count in ((whole, 40), (stepwise, 12)):
        part = PrefilledRows("s", 2, 3, count, count)
        worker.plan_prefill([Fed("s", 0, tokens[:count])], [part], prompts, {})
        for layer in range(2):
            # Three rows in front belong to a request that is nobody's turn.
            packed = torch.cat([torch.full((3, 4, 8), 9.0), queries[layer, :count]])
            worker.observe(layer, packed, forward_of(False, count))
    for at in range(12, 40):
        for layer in range(2):
            stepwise.observe(layer, queries[layer, at : at + 1], forward_of(True, 1))
        decoded = DecodedRow(Fed("s", at, [tokens[at]]), 2, at + 1)
        stepwise.settle([decoded])
    expected, found = (
        worker.rows._sessions["s"].queries.layer_queries(2) for worker in (whole, stepwise)
    )
    assert len(expected[0].positions) > 0
    for one, other in zip(expected, found, strict=True):
        for name in ("vectors", "positions", "phases"):
            assert torch.equal(getattr(one, name), getattr(other, name))


class Pages:
    """A page allocator as far as `cpu` uses it."""

    need_sort = False

    def __init__(self, page: int, pages: list[int]) -> None:
        self.page_size = page
        self.free_pages = torch.tensor(pages)


def test_pages_are_filled_before_new_ones_are_taken() -> None:
    pages = Pages(4, [7, 5, 9, 2])
    before, after = torch.tensor([6, 0]), torch.tensor([11, 4])
    last = torch.tensor([4 * 3 + 1, -1])
    slots = cpu.alloc_extend(pages, before, before, after, after, last, 9)
    assert slots is not None
    assert slots.tolist() == [14, 15, 28, 29, 30, 20, 21, 22, 23]
    assert pages.free_pages.tolist() == [9, 2]
    grown = cpu.alloc_decode(pages, None, torch.tensor([12, 5]), torch.tensor([30, 23]))
    assert grown is not None
    assert grown.tolist() == [31, 36]
    assert pages.free_pages.tolist() == [2]


def test_no_slots_without_pages() -> None:
    pages = Pages(4, [1])
    before, after = torch.tensor([0]), torch.tensor([5])
    found = cpu.alloc_extend(pages, before, before, after, after, torch.tensor([-1]), 5)
    assert found is None
    assert pages.free_pages.tolist() == [1]


def test_a_command_line_holds_no_key(tmp_path: Path) -> None:
    options = EngineOptions("micro", make_method("full-constrained", None))
    wire = SglangEngineWire(options, FACTS, Path("python"), tmp_path, tmp_path, False, False)
    launch = wire.launch()
    wire.close()
    keys = {value for name, value in launch.environment.items() if "KEY" in name}
    assert keys
    assert not keys & set(launch.command)
