"""What workers do on a device: how much memory an event takes, and that nothing waits for it.

No GPU is needed. Memory is counted by PyTorch's profiler. In place of a GPU there is the device
`meta`, whose tensors have shapes and nothing that a host could read: reading one is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_device import ranking
from peak_memory import peak_bytes
from torch import Tensor

from agentbench_kv.conformance.scenes import made_up_calibration
from agentbench_kv.engines.core.attention_sums import AttentionSums
from agentbench_kv.engines.core.ledger import Eviction, EvictionOrder
from agentbench_kv.engines.core.policy import BackendPolicy
from agentbench_kv.engines.core.prefixes import PrefixTable
from agentbench_kv.engines.core.rings import QueryBuffer, RingWrite, RowShape
from agentbench_kv.engines.core.rows import Fed, PagedStore, WorkerRows
from agentbench_kv.engines.core.transfers import Arriving, to_device, used_here
from agentbench_kv.engines.sglang.plugin.hooks import Patches
from agentbench_kv.engines.sglang.plugin.prefixes import SharedPrefixes
from agentbench_kv.engines.sglang.plugin.runtime import Runtime
from agentbench_kv.engines.sglang.plugin.sessions import SglangSessions
from agentbench_kv.engines.sglang.plugin.steps import Steps
from agentbench_kv.engines.sglang.plugin.versions import Sglang0512
from agentbench_kv.engines.sglang.plugin.worker import (
    Compactor,
    DeviceWorker,
    Pool,
    PrefilledRows,
)
from agentbench_kv.engines.vllm.plugin.capture import QueryCapture
from agentbench_kv.kernels import dispatch
from agentbench_kv.kernels.layout import PagedRows
from agentbench_kv.kernels.torch_backend import TorchBackend
from agentbench_kv.methods import base
from agentbench_kv.methods.base import Method, QueryKind, QueryPlan
from agentbench_kv.methods.calibration import Calibration
from agentbench_kv.phases.machine import PromptPhases
from agentbench_kv.registry import make_method

LAYERS, HEADS, DIM = 8, 2, 128


def policy_of(method: Method) -> BackendPolicy:
    return BackendPolicy(method, Path(), Path())


@dataclass(frozen=True)
class Peak:
    """Bytes a row and head that an event takes beside the pool, here of 512 for a layer's keys."""

    layer: int  # of the layer that is scored, its keys among them
    logits: int  # and where PyTorch scores, logits and what is made of them
    every: int  # of each layer of the model, whichever is scored: positions, scores, marks


# What was measured, and a few percent. In float64 one head's rows are 512, as of a long session.
PEAKS = {
    # Keys. Logits of 32 queries of two heads, and their softmax.
    "agentkv": Peak(512 + 40, 2 * 256, 37),
    # Keys. In float64 a block of them, the same times both heads' covariances, and these.
    "expected-attention": Peak(512 + 256 + 512 + 256 + 80, 0, 21),
    "h2o": Peak(512 + 20, 0, 17),
    # Keys. One head's in float64: of unit length, and their products with the mean.
    "keydiff": Peak(512 + 2 * 512 + 50, 0, 53),
    # Keys and values. One head's in float64: as they are, less the minimum, and scaled.
    "lagkv": Peak(2 * 512 + 3 * 512 + 40, 0, 53),
    "random": Peak(512 + 50, 0, 21),
    # Keys, and these of unit length, which a GPU's kernel does not write down.
    "rkv": Peak(2 * 512 + 60, 0, 69),
    # Keys. Logits of 32 queries of two heads, the larger of both, and which ones are hidden.
    "snapkv": Peak(512 + 40, 256 + 128 + 32, 37),
    "streamingllm": Peak(512 + 30, 0, 21),
    # Keys. Logits of one query of two heads, and their softmax; one set for all heads of a layer.
    "tova": Peak(512 + 40, 2 * 8, 54),
    # Keys, these in float64, and the lengths of their pairs.
    "triattention": Peak(512 + 2 * 512 + 512 + 100, 0, 53),
}
LOOK_AT_NO_KEY = {"h2o", "random", "streamingllm"}


@pytest.mark.parametrize(
    ("name", "by_pytorch"), [*((name, True) for name in ranking()), ("agentkv", False)]
)
def test_an_event_takes_the_rows_of_one_layer_at_a_time(
    name: str, by_pytorch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention is scored by PyTorch on a GPU, and by a kernel that keeps no logits elsewhere."""
    compiled = dispatch.active_backend("cpu")
    if compiled.name == "torch":
        pytest.skip("no compiled kernels here; PyTorch's own operations take more")
    if by_pytorch:
        scores = TorchBackend().attention_mass
        monkeypatch.setattr(type(compiled), "attention_mass", lambda _, *given: scores(*given))
    live = 2048
    monkeypatch.setattr(base, "BLOCK_DOUBLES", live * DIM)  # as of longer sessions
    took = peak_bytes(second_event(name, live)) / (HEADS * live)
    peak = PEAKS[name]
    most = peak.layer + peak.logits * by_pytorch + peak.every * LAYERS
    assert took <= most
    assert most < LAYERS * 512, "what all layers' keys would take"
    assert took >= 512 or name in LOOK_AT_NO_KEY, "keys must have been looked at"


def second_event(name: str, live: int) -> Callable[[], object]:
    """Return a session's second event, in which rows are out of order as they mostly are."""
    shape = RowShape(LAYERS, 2 * HEADS, HEADS, DIM, torch.float32, torch.device("cpu"))
    short = {"protect": "none"} if name == "triattention" else {}
    known = made_up_calibration(LAYERS, 2 * HEADS, torch.ones(DIM // 2))
    method = make_method(name, live - 128, short).with_calibration(known)
    rows = WorkerRows(policy_of(method), shape, torch.ones(DIM // 2))
    caches = torch.randn(2, LAYERS, live // 16, 16, HEADS, DIM)
    keys, values = (PagedRows.of(list(side), "brhd") for side in caches)
    table = torch.randperm(live // 16).int()

    def event(number: int) -> None:
        seen = live + 128 * number
        eviction = Eviction(live, live - 128, seen, live)
        rows.remove(EvictionOrder("s", number, eviction, []), PagedStore(keys, values, table, live))

    rows.feed([Fed("s", 0, range(live))], {"s": PromptPhases("token-id")})
    if rows.wants_sums:
        rows.sums.of("s", live).uniform_()
    event(0)
    rows.feed([Fed("s", live, range(128))], {})
    return lambda: event(1)


def meta_worker(method: Method, page: int) -> DeviceWorker:
    device = torch.device("meta")
    shape = RowShape(2, 4, 2, 8, torch.bfloat16, device)
    worker = DeviceWorker(policy_of(method), shape, torch.ones(4, device=device), 3)
    side = [torch.zeros(64, page, 2, 8, dtype=shape.dtype, device=device) for _ in range(2)]
    keys, values = PagedRows.of(side, "brhd"), PagedRows.of(list(side), "brhd")
    worker.pool = Pool(keys, values, torch.zeros(4, 64, dtype=torch.int32, device=device), page)
    return worker


def request(name: str, row: int | None, tokens: int, given: list[int]) -> Any:
    """A session's first turn, of which 20 tokens are the system's."""
    ids = list(range(tokens))
    prompt = PromptPhases("token-id", {}, ((0, 9), (1, 9), (2, tokens - 18)), tokens, 20)
    wishes = {"kvbench": {"phases": asdict(prompt), "given": given}}
    return SimpleNamespace(
        rid=name, session=SimpleNamespace(session_id=name, streaming=True), origin_input_ids=ids,
        sampling_params=SimpleNamespace(max_new_tokens=99, ignore_eos=True, custom_params=wishes),
        output_ids=[], fill_ids=ids, prefix_indices=[], req_pool_idx=row, extend_input_len=tokens,
        kv_committed_len=tokens, kv_allocated_len=tokens, cache_protected_len=0,
    )  # fmt: skip


class Version(Sglang0512):
    """0.5.12 with slots of our own, as SGLang is not here."""

    def slot(self, row: int, rows: int, shared: int) -> Any:
        return SimpleNamespace(
            req_pool_idx=row, kv_committed_len=rows, kv_allocated_len=rows,
            cache_protected_len=shared,
        )  # fmt: skip


class Play:
    """SGLang's scheduler and its forwards on the device `meta`, with our hooks."""

    def __init__(self, method: Method, page: int) -> None:
        self.worker = meta_worker(method, page)
        version = Version()
        self.sessions = SglangSessions(
            method, 1, page, lambda _: pytest.fail("no stop text was asked for")
        )
        self.freed: list[Tensor] = []
        self.slots: dict[str, Any] = {}
        scheduler = SimpleNamespace(
            req_to_token_pool=SimpleNamespace(free_slots=[3, 2]),
            tree_cache=SimpleNamespace(slots=self.slots),
        )
        compactor = Compactor(self.worker, SimpleNamespace(free=self.freed.append))
        self.prefixes = SharedPrefixes(self.sessions, self.worker, scheduler, version)
        self.steps = Steps(self.sessions, self.worker, compactor, self.prefixes, version)
        self.hooks = Patches(self.worker.rows.policy, version)
        self.hooks._runtime = self  # type: ignore[assignment]
        self.attended = 0

    def prefill(self, requests: list[Any]) -> None:
        for each in requests:
            session = self.sessions.begin(each)
            self.prefixes.offer(session)
            assert self.prefixes.may_begin(session)
            if slot := self.slots.get(session.name):
                each.req_pool_idx = slot.req_pool_idx
                each.prefix_indices = each.fill_ids[: slot.kv_committed_len]
        self.hooks.prepare_for_extend(lambda _: None, SimpleNamespace(reqs=requests))
        rows = sum(len(each.fill_ids) - len(each.prefix_indices) for each in requests)
        self._forward(requests, rows, decode=False)

    def decode(self, batch: Any) -> None:
        self.steps.prepare(batch)
        self.hooks.prepare_for_decode(lambda _: None, batch)
        # A graph's batch, of which two are padding.
        self._forward(batch.reqs, 4, decode=True)

    def attend(self, *_: Any) -> None:
        self.attended += 1

    def _forward(self, requests: list[Any], rows: int, *, decode: bool) -> None:
        mode = SimpleNamespace(is_decode=lambda: decode, is_idle=lambda: False)
        numbers = partial(torch.zeros, dtype=torch.int64, device="meta")
        forward = SimpleNamespace(
            forward_mode=mode, positions=numbers(rows), extend_num_tokens=rows,
            req_pool_indices=numbers(rows if decode else len(requests)),
            extend_seq_lens=numbers(len(requests)),
        )  # fmt: skip
        batch = SimpleNamespace(reqs=requests)
        self.hooks.init_new(lambda *_: forward, None, batch, None)
        queries = torch.zeros(rows, 32, dtype=torch.bfloat16, device="meta")
        for number in range(2):
            layer = SimpleNamespace(
                layer_id=number, tp_q_head_num=4, qk_head_dim=8, scaling=8**-0.5
            )
            self.hooks.forward(self.attend, None, queries, None, None, layer, forward)
        drawn = torch.zeros(len(requests), dtype=torch.int32, device="meta")
        assert self.hooks.sample(lambda *_: drawn, None, None, forward).shape == drawn.shape


# Method, settings, and for what its events wait; decision 55 says the same.
WAITING: list[tuple[str, dict[str, Any], str]] = [
    ("agentkv", {"chunk": 4}, "how many chunks there are"),
    ("agentkv", {"drop_phase": "think"}, "how many queries are left"),
    ("agentkv", {"sampler": "multiscale"}, "how many queries a phase has"),
    ("agentkv", {"sampler": "weighted"}, "how many queries a phase has"),
    ("agentkv", {"sampler": "diverse"}, "how many queries a phase has"),
    ("agentkv", {"sampler": "shuffled"}, "how many queries the drawn rings hold"),
    ("agentkv", {"sampler": "own"}, "which phase is under way"),
    ("expected-attention", {}, "its statistics, at the first event"),
    ("triattention", {}, "its statistics, at the first event"),
]


def method_of(name: str, settings: dict[str, Any], statistics: str = "meta") -> Method:
    """Build a method for sessions of a few tokens; statistics, if any, lie on a device."""
    budget = 48 if "prefix" in settings else 16
    method = make_method(name, budget, {"interval": 3, **ranking()[name], **settings})
    known = made_up_calibration(2, 4, torch.ones(4), 1.0)
    return method.with_calibration(known if statistics == "cpu" else on_meta(known))


def on_meta(known: Calibration) -> Calibration:
    parts = {field.name: getattr(known, field.name) for field in fields(known) if field.init}
    there = {
        name: torch.empty_like(part, device="meta")
        for name, part in parts.items()
        if isinstance(part, Tensor)
    }
    return replace(known, **there)


@pytest.mark.usefixtures("no_waiting")
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *((name, {}) for name in ranking()),
        ("agentkv", {"kept_set": "per_layer"}),
        *((name, {"protect": "system", "prefix": "shared"}) for name in ranking()),
    ],
)
@pytest.mark.parametrize("page", [1, 16])
def test_no_step_waits_for_the_device(name: str, settings: dict[str, Any], page: int) -> None:
    play(method_of(name, settings), page)


@pytest.mark.usefixtures("no_waiting")
@pytest.mark.parametrize(("name", "settings", "why"), WAITING)
def test_what_waits_all_the_same_is_known(name: str, settings: dict[str, Any], why: str) -> None:
    with pytest.raises((AssertionError, RuntimeError, NotImplementedError)) as waited:
        play(method_of(name, settings, "cpu"), 16)
    assert any("methods" in str(frame.path) for frame in waited.traceback), why


@pytest.mark.usefixtures("no_waiting")
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("agentkv", {"takes its queries", "moves its rows"}),
        ("streamingllm", {"moves its rows"}),
    ],
)
def test_what_a_forward_may_still_read_waits_for_it_on_the_device(
    name: str, expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler's stream goes on while a forward runs; the host waits for neither."""
    done: list[str] = []
    stream = SimpleNamespace(wait_stream=lambda other: done.append(f"waits for {other}"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)

    def noted(holder: Any, name: str, said: str) -> None:
        work = getattr(holder, name)
        monkeypatch.setattr(holder, name, lambda *given: [done.append(said), work(*given)][1])

    def watch(run: Play) -> None:
        worker = run.worker
        worker.forwards = "forwards"
        noted(run, "attend", "forward")
        noted(worker.rows.rings, "write_all", "takes its queries")
        noted(worker.rows, "remove", "moves its rows")

    play(method_of(name, {}), 16, watch)
    touched = [i for i, what in enumerate(done) if what in ("takes its queries", "moves its rows")]
    assert {done[i] for i in touched} == expected
    for i in touched:
        since = done[i - done[i::-1].index("forward") : i]
        assert "waits for forwards" in since, done[: i + 1]


def play(method: Method, page: int, watch: Callable[[Play], None] = lambda _: None) -> None:
    """Prefill two sessions and decode until each had two events; one is given what it draws."""
    run = Play(method, page)
    watch(run)
    shared = method.prefix == "shared"
    first = request("a", 1, 52 if shared else 20, [])
    second = request("b", None if shared else 2, 57 if shared else 25, [7] * 5)
    both = [first, second]
    prefills = [[first], [second]] if shared else [both]
    for each in prefills:
        run.prefill(each)
    held = [run.sessions.sessions[name] for name in "ab"]
    lengths = torch.tensor([each.ledger.live for each in held])
    batch = SimpleNamespace(
        reqs=both, seq_lens=torch.zeros(2, dtype=torch.int64, device="meta"),
        seq_lens_cpu=lengths, seq_lens_sum=int(lengths.sum()),
    )  # fmt: skip
    for step in range(1, 9):
        for each in both:
            each.output_ids = list(range(step))
        run.decode(batch)
        batch.seq_lens_cpu = batch.seq_lens_cpu + 1
        for each in both:
            each.kv_committed_len += 1
            each.kv_allocated_len += 1
    assert [len(each.ledger.stats.events) for each in held] == [2, 2]
    assert len(run.freed) == 4
    assert run.attended == 2 * (len(prefills) + 8)
    rows = 20 // page * page if shared else 0
    assert [each.ledger.stats.shared for each in held] == [rows, rows]
    assert held[1].ledger.stats.cached_tokens == rows
    # What it would have drawn is still on the device, and how many rows moved nobody has asked yet.
    assert held[0].given is None
    assert held[1].given is not None
    assert sorted(held[1].given.best) == [*range(5)]
    for read in (held[0].ledger.snapshot, held[1].given.own):
        with pytest.raises(RuntimeError, match="meta"):
            read()


@pytest.mark.usefixtures("no_waiting")
def test_the_fake_device_notices_who_waits() -> None:
    there = torch.zeros(3, device="meta")
    for wait in (
        lambda: int(there.sum()),
        lambda: there.nonzero(),
        lambda: there.cpu(),
        lambda: torch.tensor([1], device="meta"),
        lambda: torch.tensor([1]).to("meta"),
        lambda: there.copy_(torch.zeros(3)),
        lambda: there[torch.arange(2)],
        lambda: there.index_put_((there.long(),), torch.zeros(3)),
        lambda: bool((there > 0).all()),
    ):
        with pytest.raises((AssertionError, RuntimeError, NotImplementedError)):
            wait()
    assert to_device([1, 2], there.device).shape == (2,)


def test_numbers_go_to_a_gpu_from_pinned_memory_without_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[Any] = []

    def pin(tensor: Tensor) -> Tensor:
        done.append("pinned")
        return tensor

    def to(tensor: Tensor, device: Any, **how: Any) -> Tensor:
        done.append((str(device), how))
        return tensor

    monkeypatch.setattr(Tensor, "pin_memory", pin)
    monkeypatch.setattr(Tensor, "to", to)
    assert to_device([3, 4], torch.device("cuda", 0)).tolist() == [3, 4]
    assert done == ["pinned", ("cuda:0", {"non_blocking": True})]


def test_a_number_comes_from_a_gpu_through_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class Stream:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def record_event(self) -> Any:
            done.append(f"recorded on a stream of {self.device}")
            return SimpleNamespace(synchronize=lambda: done.append("waited"))

    class Pinned:
        def copy_(self, _number: Any, **how: Any) -> None:
            done.append(f"copied {how}")

        def __int__(self) -> int:
            done.append("read")
            return 42

        def tolist(self) -> list[int]:
            done.append("read all")
            return [42]

    def empty_like(_like: Any, **how: Any) -> Any:
        done.append(f"made {how}")
        return Pinned()

    monkeypatch.setattr(torch, "empty_like", empty_like)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    number = Arriving(OnGpuTensor())
    sent = [
        "made {'device': 'cpu', 'pin_memory': True}",
        "copied {'non_blocking': True}",
        "recorded on a stream of cuda:0",
    ]
    assert done == sent
    assert int(number) == 42
    assert done == [*sent, "waited", "read"]
    assert number.tolist() == [42]
    assert done == [*sent, "waited", "read", "waited", "read all"]
    assert [int(Arriving(held)) for held in (7, torch.tensor(8))] == [7, 8]
    assert Arriving(torch.tensor([8, 9])).tolist() == [8, 9]


class OnGpuTensor(Tensor):
    """A tensor that says it is on a GPU."""

    device = torch.device("cuda", 0)  # type: ignore[assignment]


class OnGpu:
    """A tensor that notes which streams use it."""

    device = torch.device("cuda", 0)

    def __init__(self) -> None:
        self.streams: list[Any] = []

    def record_stream(self, stream: Any) -> None:
        self.streams.append(stream)


def test_tensors_planned_on_one_stream_are_recorded_on_the_one_that_reads_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"forwards of {device}")
    rows, slots = OnGpu(), OnGpu()
    used_here(rows, slots)  # type: ignore[arg-type]
    assert rows.streams == slots.streams == ["forwards of cuda:0"]
    used_here(torch.zeros(1))


def test_a_prefill_says_that_it_reads_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    module = "agentbench_kv.engines.sglang.plugin.worker"
    monkeypatch.setattr(f"{module}.used_here", lambda *tensors: seen.append(tensors))
    shape = RowShape(2, 4, 2, 8, torch.float32, torch.device("cpu"))
    worker = DeviceWorker(policy_of(make_method("agentkv", 64)), shape, torch.ones(4), 3)
    prompts = {"s": PromptPhases("token-id")}
    worker.plan_prefill([Fed("s", 0, [1, 2])], [PrefilledRows("s", 1, 0, 2, 2)], prompts, {})
    write = worker._write
    assert write is not None
    mode = SimpleNamespace(is_decode=lambda: False)
    worker.observe(0, torch.zeros(2, 4, 8), SimpleNamespace(forward_mode=mode))
    assert len(seen) == 1
    assert seen[0][0] is write.rows
    assert seen[0][1] is write.slots


def test_sums_are_used_on_both_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("agentbench_kv.engines.core.attention_sums.used_here", seen.append)
    sums = AttentionSums(1, 1, torch.device("cpu"))
    sums.of("s", 3)
    first = sums.of("s", 4)
    assert len(seen) == 2
    sums.of("s", 999)  # a larger one takes its place: both are
    assert [each.data_ptr() == first.data_ptr() for each in seen] == [True, True, True, False]


def test_staging_is_as_large_as_the_requests_and_made_before_the_pool() -> None:
    shape = RowShape(3, 4, 2, 8, torch.float32, torch.device("meta"))
    worker = DeviceWorker(policy_of(make_method("agentkv", 64)), shape, torch.ones(4), 32)
    assert not hasattr(worker, "pool")
    assert worker._staged is not None
    assert worker._staged.shape == (3, 33, 4, 8)
    assert worker.rows.rings.places == 16
    shared = make_method("agentkv", 64, {"prefix": "shared", "protect": "system"})
    assert DeviceWorker(policy_of(shared), shape, torch.ones(4), 32).rows.rings.places == 16 + 17
    plain = DeviceWorker(policy_of(make_method("full-constrained", None)), shape, torch.ones(4), 32)
    assert plain._staged is None
    assert plain.rows.rings.places == 0


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_no_method_keeps_more_queries_on_sglangs_gpu_than_the_first_one(device: str) -> None:
    shape = RowShape(3, 4, 2, 8, torch.float32, torch.device(device))
    for first, other in (
        (make_method("agentkv", 64), make_method("agentkv", 64, {"sampler": "shuffled"})),
        (make_method("agentkv", 64), make_method("agentkv@system", 64, {"prefix": "shared"})),
        (make_method("streamingllm", 64), make_method("h2o", 64)),  # queries that are staged
        (make_method("h2o", 64), make_method("tova", 64)),
    ):
        worker = DeviceWorker(policy_of(first), shape, torch.ones(4), 32)
        runtime: Any = Runtime.__new__(Runtime)
        table = SimpleNamespace(method=first, prefixes=PrefixTable())
        parts = {"policy": worker.rows.policy, "table": table, "worker": worker}
        vars(runtime).update(parts, _captured=False)
        if device == "meta":
            before = worker.rows
            with pytest.raises(ValueError, match="start it anew"):
                runtime.configure(policy_of(other))
            assert (runtime.policy, table.method) == (before.policy, first)
            assert worker.rows is before
        else:
            runtime.configure(policy_of(other))
            assert table.method == other
        for method in (make_method("streamingllm", 64), first):  # what was taken stays taken
            runtime.configure(policy_of(method))
            assert (table.method, worker.rows.policy.method) == (method, method)


def test_a_layer_that_shows_no_queries_stops_sglang() -> None:
    shape = RowShape(2, 4, 2, 8, torch.float32, torch.device("cpu"))
    worker = DeviceWorker(policy_of(make_method("agentkv", 64)), shape, torch.ones(4), 3)
    prompts, part = {"s": PromptPhases("token-id")}, PrefilledRows("s", 1, 0, 2, 2)
    worker.plan_prefill([Fed("s", 0, [1, 2])], [part], prompts, {})
    mode = SimpleNamespace(is_decode=lambda: False)
    worker.observe(1, torch.zeros(2, 4, 8), SimpleNamespace(forward_mode=mode))
    with pytest.raises(RuntimeError, match="1 of 2 attention layers show no queries, so agentkv"):
        worker.plan_prefill([Fed("s", 2, [1, 2])], [part], prompts, {})
    worker.observe(0, torch.zeros(2, 4, 8), SimpleNamespace(forward_mode=mode))
    worker.plan_prefill([Fed("s", 2, [1, 2])], [part], prompts, {})
    other = DeviceWorker(policy_of(make_method("streamingllm", 64)), shape, torch.ones(4), 3)
    other.check_seen()


def test_a_layer_that_shows_no_queries_stops_vllm() -> None:
    shape = RowShape(2, 4, 2, 8, torch.float32, torch.device("cpu"))
    rings = QueryBuffer(QueryPlan(QueryKind.RECENT, 2), shape)
    rings.reserve(1)
    capture = QueryCapture()
    capture.connect({"layers.0": 0, "layers.1": 1}, rings)
    write = RingWrite(torch.tensor([0]), torch.tensor([0]))
    capture.begin(write, 1)
    capture.see("layers.1", torch.ones(1, 4, 8))
    with pytest.raises(ValueError, match=r"1 of 2 attention layers show no queries \(layers.0"):
        capture.finish()
    # A replayed graph shows nothing any more; what it showed when it was captured counts.
    capture.see("layers.0", torch.ones(1, 4, 8))
    capture.begin(write, 1)
    capture.finish()
    # Other layers have to show theirs anew.
    capture.connect({"layers.5": 0}, rings)
    capture.begin(write, 1)
    with pytest.raises(ValueError, match="1 of 1 attention layers"):
        capture.finish()


def test_static_buffers_are_made_once() -> None:
    capture = QueryCapture()
    for rows in (4, 4, 8):
        capture.allocate(rows, 2, (4, 8), torch.zeros(0))
        assert capture.buffered == rows
        first = capture._buffers[0].data_ptr()
        capture.allocate(rows, 2, (4, 8), torch.zeros(0))
        assert capture._buffers[0].data_ptr() == first
