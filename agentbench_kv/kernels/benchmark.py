"""Time and bandwidth of every operation at the shapes of real models (`kvbench bench kernels`)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentbench_kv.kernels.dispatch import Backend
from agentbench_kv.kernels.layout import PagedRows

REPRESENTATIVES = 32
INDEX_BLOCK = 16
COPY_BYTES = 1 << 28
MODELS = {"qwen3-8b": (32, 8, 128), "qwen3-32b": (64, 8, 128)}  # query and KV heads, head_dim


@dataclass(frozen=True)
class KernelCase:
    """What is measured: one layer of a model's cache, of some sessions at once."""

    operation: str
    model: str
    sessions: int
    tokens: int
    budget: int
    block: int
    dtype: torch.dtype
    device: torch.device

    @property
    def cache_bytes(self) -> int:
        _, kv_heads, head_dim = MODELS[self.model]
        return 2 * self.sessions * kv_heads * self.tokens * head_dim * self.dtype.itemsize


@dataclass(frozen=True)
class KernelTimes:
    """Medians of one case, in microseconds."""

    case: KernelCase
    native_us: float  # the compiled kernel
    torch_us: float  # the PyTorch reference
    library_us: float | None  # one library call that does the nearest thing, where there is one
    bytes_moved: int  # that must be read or written
    share_of_copy: float  # time of a plain copy of as many bytes, over the kernel's
    rows_moved: int  # compaction only


@dataclass(frozen=True)
class Work:
    """One operation on random data: how to run it on a backend, and what it has to move."""

    run: Callable[[Backend], Tensor | int | None]
    bytes_moved: int
    library: Callable[[], object] | None = None


class KernelData:
    """Random data of one case: a paged cache, queries, scores and a choice of rows to keep."""

    def __init__(self, case: KernelCase) -> None:
        self.case = case
        self.sessions, self.tokens, self.budget = case.sessions, case.tokens, case.budget
        self.device = case.device
        self.q_heads, self.kv_heads, self.head_dim = MODELS[case.model]
        self.draw = torch.Generator().manual_seed(0)
        blocks_each = -(-self.tokens // case.block)
        blocks = self.sessions * blocks_each
        shuffled = torch.randperm(blocks, generator=self.draw).to(self.device, torch.int32)
        self.table = shuffled.reshape(self.sessions, blocks_each)
        self.lengths = torch.full((self.sessions,), self.tokens, device=self.device)
        # Keys and values of a token lie side by side, as in vLLM.
        cache = self.normal(blocks, self.kv_heads, case.block, 2 * self.head_dim)
        self.keys = PagedRows.of(cache[..., : self.head_dim], "bhrd")
        self.values = PagedRows.of(cache[..., self.head_dim :], "bhrd")
        positions = torch.zeros(blocks, self.kv_heads, case.block, dtype=torch.int64)
        self.positions = PagedRows.of(positions.to(self.device), "bhr")

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.case.dtype, device=self.device).normal_()

    def flat_keys(self) -> Tensor:
        return self.normal(self.sessions * self.kv_heads, self.tokens, self.head_dim)


def _compact(data: KernelData) -> Work:
    # Rows of every head at random, ascending.
    scores = torch.rand(data.sessions, 1, data.kv_heads, data.tokens, generator=data.draw)
    kept = scores.topk(data.budget, -1).indices.sort(-1).values.to(data.device)
    late = int((kept >= data.budget).sum())
    tensors = (data.keys, data.values, data.positions)
    flat, index = data.normal(data.tokens, data.head_dim), kept[0, 0, 0]

    def rewrite() -> None:
        for _ in range(2 * data.sessions * data.kv_heads):
            flat.index_select(0, index)

    return Work(
        lambda backend: backend.compact_paged(tensors, data.table, kept, None, False),
        2 * late * sum(each.row_bytes for each in tensors),
        library=rewrite,
    )


def _attention_mass(data: KernelData) -> Work:
    queries = data.normal(data.sessions, 1, data.q_heads, REPRESENTATIVES, data.head_dim)
    arguments = (data.keys, data.table, data.lengths, data.tokens, "mean_prob", None, None, None)
    scores = data.sessions * data.kv_heads * data.tokens * 4
    return Work(
        lambda backend: backend.attention_mass_paged(queries, *arguments),
        data.case.cache_bytes // 2 + queries.nbytes + scores,
    )


def _select_top(data: KernelData) -> Work:
    scores = data.normal(data.sessions, data.kv_heads, data.tokens, dtype=torch.float32)
    return Work(
        lambda backend: backend.select_top(scores, data.budget, None, None),
        scores.nbytes + data.sessions * data.kv_heads * data.budget * 8,
        library=lambda: scores.topk(data.budget, -1).indices.sort(-1).values,
    )


def _ring_write(data: KernelData) -> Work:
    rows = data.normal(data.sessions, data.q_heads, data.head_dim)
    ring = data.normal(data.sessions * REPRESENTATIVES, data.q_heads, data.head_dim)
    slots = torch.arange(data.sessions, device=data.device) * REPRESENTATIVES
    return Work(
        lambda backend: backend.ring_write(ring, rows, slots),
        2 * rows.nbytes,
        library=lambda: ring.index_copy_(0, slots, rows),
    )


def _rope_rotate(data: KernelData) -> Work:
    # Blocks of 128 tokens that move by a distance each, as restored ones do.
    index = torch.arange(data.budget, device=data.device)
    shifts = (-97 * (1 + index // 128)).expand(data.sessions, 1, data.kv_heads, -1)
    lengths = torch.full_like(data.lengths, data.budget)
    frequencies = 1e6 ** -torch.linspace(0, 1, data.head_dim // 2, device=data.device)
    arguments = (data.keys, data.table, lengths, shifts, frequencies, False)
    return Work(
        lambda backend: backend.rope_rotate(*arguments),
        2 * data.sessions * data.kv_heads * data.budget * data.keys.row_bytes,
    )


def _aabb(data: KernelData) -> Work:
    keys = data.flat_keys()
    boxes = 2 * keys.shape[0] * -(-data.tokens // INDEX_BLOCK) * data.head_dim * 4
    return Work(lambda backend: backend.aabb(keys, INDEX_BLOCK)[0], keys.nbytes + boxes)


def _aabb_score(data: KernelData) -> Work:
    blocks, head_dim, single = -(-data.tokens // INDEX_BLOCK), data.head_dim, torch.float32
    corners = data.normal(2, data.sessions * data.kv_heads, blocks, head_dim, dtype=single)
    queries = data.normal(data.sessions * data.q_heads, 8, head_dim, dtype=single)
    return Work(
        lambda backend: backend.aabb_score(queries, corners.amin(0), corners.amax(0)),
        corners.nbytes + queries.nbytes + queries.shape[0] * 8 * blocks * 4,
    )


def _similarity(data: KernelData) -> Work:
    keys = data.flat_keys()
    return Work(lambda backend: backend.similarity_column_mean(keys, 0.5), keys.nbytes)


OPERATIONS: dict[str, Callable[[KernelData], Work]] = {
    "compact": _compact,
    "attention_mass": _attention_mass,
    "select_top": _select_top,
    "ring_write": _ring_write,
    "rope_rotate": _rope_rotate,
    "aabb": _aabb,
    "aabb_score": _aabb_score,
    "similarity": _similarity,
}


class Copy:
    """A plain copy from cold memory to cold memory."""

    def __init__(self, device: torch.device) -> None:
        self._source = torch.ones(COPY_BYTES, dtype=torch.uint8, device=device)
        self._target = torch.zeros_like(self._source)
        self._at = 0

    def run(self, size: int) -> None:
        """Copy `size` bytes of a part of the buffers that was not touched for a while."""
        size = min(size, COPY_BYTES)
        self._at = self._at + size if self._at + 2 * size <= COPY_BYTES else 0
        place = slice(self._at, self._at + size)
        self._target[place].copy_(self._source[place])


def measure(
    cases: Sequence[KernelCase], native: Backend, reference: Backend, repeats: int
) -> Iterator[KernelTimes]:
    """Measure case by case; arms are interleaved, and a repetition before `repeats` warms up."""
    copy = None
    for case in cases:
        copy = copy or Copy(case.device)
        yield _measured(case, native, reference, repeats, copy)


def _measured(
    case: KernelCase, native: Backend, reference: Backend, repeats: int, copy: Copy
) -> KernelTimes:
    work = OPERATIONS[case.operation](KernelData(case))
    arms: dict[str, Callable[[], object]] = {
        # Half of the bytes are read, half are written.
        "copy": lambda: copy.run(work.bytes_moved // 2),
        "native": lambda: work.run(native),
        "torch": lambda: work.run(reference),
    }
    if work.library is not None:
        arms["library"] = work.library
    times: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(repeats + 1):
        for name, run in arms.items():
            times[name].append(_timed(run, case.device) * 1e6)
    medians = {name: statistics.median(values[1:]) for name, values in times.items()}
    moved = work.run(native) if case.operation == "compact" else 0
    return KernelTimes(
        *(case, medians["native"], medians["torch"], medians.get("library"), work.bytes_moved),
        share_of_copy=medians["copy"] / medians["native"],
        rows_moved=int(moved or 0),
    )


def _timed(run: Callable[[], object], device: torch.device) -> float:
    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    wait()
    began = time.perf_counter()
    run()
    wait()
    return time.perf_counter() - began
