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
MOST_SIMILARITY_TOKENS = 8192


@dataclass(frozen=True)
class ModelShape:
    """Attention heads of a model."""

    q_heads: int
    kv_heads: int
    head_dim: int


MODELS = {"qwen3-8b": ModelShape(32, 8, 128), "qwen3-32b": ModelShape(64, 8, 128)}


@dataclass(frozen=True)
class Cell:
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
    def shape(self) -> ModelShape:
        return MODELS[self.model]

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values of the layer."""
        rows = self.sessions * self.shape.kv_heads * self.tokens
        return 2 * rows * self.shape.head_dim * self.dtype.itemsize


@dataclass(frozen=True)
class Measurement:
    """Medians of one cell, in microseconds."""

    cell: Cell
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


class Scene:
    """Random data of one cell: a paged cache, queries, scores and a choice of rows to keep."""

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self.draw = torch.Generator().manual_seed(0)
        shape = cell.shape
        self.blocks_each = -(-cell.tokens // cell.block)
        blocks = cell.sessions * self.blocks_each
        shuffled = torch.randperm(blocks, generator=self.draw).to(cell.device, torch.int32)
        self.table = shuffled.reshape(cell.sessions, self.blocks_each)
        self.lengths = torch.full((cell.sessions,), cell.tokens, device=cell.device)
        # Keys and values of a token lie side by side, as in vLLM.
        cache = self.normal(blocks, shape.kv_heads, cell.block, 2 * shape.head_dim)
        self.keys = PagedRows.of(cache[..., : shape.head_dim], "bhrd")
        self.values = PagedRows.of(cache[..., shape.head_dim :], "bhrd")
        positions = torch.zeros(blocks, shape.kv_heads, cell.block, dtype=torch.int64)
        self.positions = PagedRows.of(positions.to(cell.device), "bhr")

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        cell = self.cell
        return torch.empty(shape, dtype=dtype or cell.dtype, device=cell.device).normal_()

    def kept(self) -> Tensor:
        """Choose `budget` rows of every head at random, ascending."""
        cell = self.cell
        scores = torch.rand(cell.sessions, 1, cell.shape.kv_heads, cell.tokens, generator=self.draw)
        return scores.topk(cell.budget, -1).indices.sort(-1).values.to(cell.device)


def _compact(scene: Scene) -> Work:
    kept = scene.kept()
    late = int((kept >= scene.cell.budget).sum())
    tensors = (scene.keys, scene.values, scene.positions)
    row = sum(each.row_bytes for each in tensors)
    flat = scene.normal(scene.cell.tokens, scene.cell.shape.head_dim)
    index = kept[0, 0, 0]
    heads = kept[:, 0, :, 0].numel()

    def rewrite() -> None:
        for _ in range(2 * heads):
            flat.index_select(0, index)

    return Work(
        lambda backend: backend.compact_paged(tensors, scene.table, kept, None, False),
        2 * late * row,
        library=rewrite,
    )


def _attention_mass(scene: Scene) -> Work:
    cell, shape = scene.cell, scene.cell.shape
    queries = scene.normal(cell.sessions, 1, shape.q_heads, REPRESENTATIVES, shape.head_dim)
    arguments = (scene.keys, scene.table, scene.lengths, cell.tokens, "mean_prob", None, None, None)
    return Work(
        lambda backend: backend.attention_mass_paged(queries, *arguments),
        cell.cache_bytes // 2 + queries.nbytes + cell.sessions * shape.kv_heads * cell.tokens * 4,
    )


def _select_top(scene: Scene) -> Work:
    cell = scene.cell
    scores = scene.normal(cell.sessions, cell.shape.kv_heads, cell.tokens, dtype=torch.float32)
    rows = cell.sessions * cell.shape.kv_heads
    return Work(
        lambda backend: backend.select_top(scores, cell.budget, None, None),
        scores.nbytes + rows * cell.budget * 8,
        library=lambda: scores.topk(cell.budget, -1).indices.sort(-1).values,
    )


def _ring_write(scene: Scene) -> Work:
    cell, shape = scene.cell, scene.cell.shape
    rows = scene.normal(cell.sessions, shape.q_heads, shape.head_dim)
    ring = scene.normal(cell.sessions * REPRESENTATIVES, shape.q_heads, shape.head_dim)
    slots = torch.arange(cell.sessions, device=cell.device) * REPRESENTATIVES
    return Work(
        lambda backend: backend.ring_write(ring, rows, slots),
        2 * rows.nbytes,
        library=lambda: ring.index_copy_(0, slots, rows),
    )


def _rope_rotate(scene: Scene) -> Work:
    cell, shape = scene.cell, scene.cell.shape
    # Blocks of 128 tokens that move by a distance each, as restored ones do.
    index = torch.arange(cell.budget, device=cell.device)
    shifts = (-97 * (1 + index // 128)).expand(cell.sessions, 1, shape.kv_heads, -1)
    lengths = torch.full_like(scene.lengths, cell.budget)
    frequencies = 1e6 ** -torch.linspace(0, 1, shape.head_dim // 2, device=cell.device)
    rows = cell.sessions * shape.kv_heads * cell.budget
    return Work(
        lambda backend: backend.rope_rotate(
            scene.keys, scene.table, lengths, shifts, frequencies, False
        ),
        2 * rows * scene.keys.row_bytes,
    )


def _flat_keys(scene: Scene) -> Tensor:
    cell = scene.cell
    return scene.normal(cell.sessions * cell.shape.kv_heads, cell.tokens, cell.shape.head_dim)


def _aabb(scene: Scene) -> Work:
    keys = _flat_keys(scene)
    boxes = 2 * keys.shape[0] * -(-keys.shape[1] // INDEX_BLOCK) * keys.shape[2] * 4
    return Work(lambda backend: backend.aabb(keys, INDEX_BLOCK)[0], keys.nbytes + boxes)


def _aabb_score(scene: Scene) -> Work:
    cell, shape = scene.cell, scene.cell.shape
    heads = cell.sessions * shape.kv_heads
    blocks = -(-cell.tokens // INDEX_BLOCK)
    corners = scene.normal(2, heads, blocks, shape.head_dim, dtype=torch.float32)
    queries = scene.normal(
        heads * shape.q_heads // shape.kv_heads, 8, shape.head_dim, dtype=torch.float32
    )
    scores = queries.shape[0] * 8 * blocks * 4
    return Work(
        lambda backend: backend.aabb_score(queries, corners.amin(0), corners.amax(0)),
        corners.nbytes + queries.nbytes + scores,
    )


def _similarity(scene: Scene) -> Work:
    keys = _flat_keys(scene)
    return Work(lambda backend: backend.similarity_column_mean(keys, 0.5), keys.nbytes)


OPERATIONS: dict[str, Callable[[Scene], Work]] = {
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
    cells: Sequence[Cell], native: Backend, reference: Backend, repeats: int
) -> Iterator[Measurement]:
    """Measure cell by cell; arms are interleaved, and a repetition before `repeats` warms up."""
    copy = None
    for cell in cells:
        copy = copy or Copy(cell.device)
        yield _measured(cell, native, reference, repeats, copy)


def _measured(
    cell: Cell, native: Backend, reference: Backend, repeats: int, copy: Copy
) -> Measurement:
    work = OPERATIONS[cell.operation](Scene(cell))
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
            times[name].append(_timed(run, cell.device) * 1e6)
    medians = {name: statistics.median(values[1:]) for name, values in times.items()}
    moved = work.run(native) if cell.operation == "compact" else 0
    copy_us, native_us, torch_us = (medians[name] for name in ("copy", "native", "torch"))
    library_us, share = medians.get("library"), copy_us / native_us
    rows_moved = 0 if moved is None else int(moved)
    return Measurement(cell, native_us, torch_us, library_us, work.bytes_moved, share, rows_moved)


def _timed(run: Callable[[], object], device: torch.device) -> float:
    """Return seconds until the device is done."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    wait()
    began = time.perf_counter()
    run()
    wait()
    return time.perf_counter() - began
