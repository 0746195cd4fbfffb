"""What an event costs: scoring, selection and compaction, for every method.

    python benchmarks/methods.py [--budgets 1024 4096 16384] [--repeats 9] [--device cpu]
        [--dtype float32] [--kernels auto torch] [--layers 1]

Layers with Qwen3-8B's heads (32 query heads, 8 KV heads, head size 128; the model has 36 of them),
T = B + 128 cached rows of random values, in no order, as an earlier event leaves them. Methods and
kernels take turns, repetition after repetition; medians are printed. Each method's peak memory is
measured in a process of its own: what the event allocates above the cache, from the high-water mark
of the process (CPU) or of the allocator (CUDA).
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from agentbench_kv.conformance.scenes import made_up_calibration
from agentbench_kv.kernels import compact, use_backend
from agentbench_kv.methods.base import LayerView, Method, Phase, Queries, QueryKind
from agentbench_kv.registry import load_method, make_method, names

QUERY_HEADS, KV_HEADS, HEAD_DIM, INTERVAL = 32, 8, 128, 128
MEGABYTE = 1 << 20


class Scene:
    """Some layers' cache with what a method asks for."""

    def __init__(
        self, method: Method, budget: int, device: str, dtype: torch.dtype, layers: int = 1
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        tokens = budget + INTERVAL
        heads = QUERY_HEADS if method.per_query_head else KV_HEADS
        shape = (layers, heads, tokens, HEAD_DIM)
        self.keys = torch.randn(shape, generator=generator).to(device, dtype)
        self.values = torch.randn(shape, generator=generator).to(device, dtype)
        rows = torch.rand(shape[:3], generator=generator).argsort(-1)
        self.positions = rows.to(device)
        sums = torch.rand(shape[:3], generator=generator).to(device)
        needs = method.query_plan().kind in (QueryKind.SUMS, QueryKind.FUTURE)
        self.views = [
            LayerView(self.keys[i], self.values[i], self.positions[i], sums[i] if needs else None)
            for i in range(layers)
        ]
        self.queries = [
            self._queries(method, tokens, generator, device, dtype) for _ in range(layers)
        ]
        self.phases = torch.randint(len(Phase), (tokens,), generator=generator).to(device)
        self.now = tokens

    @staticmethod
    def _queries(
        method: Method,
        tokens: int,
        generator: torch.Generator,
        device: str,
        dtype: torch.dtype,
    ) -> Queries:
        plan = method.query_plan()
        rings = {QueryKind.RECENT: 1, QueryKind.PER_PHASE: len(Phase)}.get(plan.kind, 0)
        n = rings * plan.size
        vectors = torch.randn(QUERY_HEADS, n, HEAD_DIM, generator=generator).to(device, dtype)
        phases = torch.arange(n, device=device) // max(1, plan.size)
        return Queries(vectors, torch.arange(tokens - n, tokens, device=device), phases)

    def event(self, method: Method) -> tuple[float, float, int]:
        """Run one event; return seconds of scoring and selection, of compaction, rows moved."""
        with torch.inference_mode():
            began = _now(self.keys.device)
            selection = method.select(self.views, self.queries, self.now, 0, self.phases)
            chosen = _now(self.keys.device)
            caches = [cache.clone() for cache in (self.keys, self.values, self.positions)]
            copied = _now(self.keys.device)
            moved = compact(*caches, selection.kept, self.now)
            return chosen - began, _now(self.keys.device) - copied, moved


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def built(name: str, budget: int, layers: int = 1) -> Method:
    """Build a method with made-up statistics of a model, if it needs any."""
    frequencies = 1e6 ** -torch.linspace(0, 1, HEAD_DIM // 2)
    statistics_ = made_up_calibration(layers, QUERY_HEADS, frequencies)
    return make_method(name, budget).with_calibration(statistics_)


def arms() -> Iterator[str]:
    """Name every method that compresses, with its presets."""
    for name in names("method"):
        cls = load_method(name)
        if cls.compresses and not cls.spans:
            yield from (f"{name}@{preset}" for preset in cls.presets) if cls.presets else (name,)


def peak_bytes(
    name: str, budget: int, device: str, dtype: str, kernels: str, found: multiprocessing.Queue[int]
) -> None:
    """Measure one event's allocations above the cache (in a process of its own)."""
    method = built(name, budget)
    use_backend(kernels)
    scene = Scene(method, budget, device, getattr(torch, dtype))
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        before = _high_water(reset=True)
    with torch.inference_mode():
        method.select(scene.views, scene.queries, scene.now, 0, scene.phases)
    after = torch.cuda.max_memory_allocated() if device == "cuda" else _high_water(reset=False)
    found.put(after - before)


def _high_water(*, reset: bool) -> int:
    """Return the most memory the process has held since the last reset, in bytes (Linux)."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def peak(name: str, budget: int, device: str, dtype: str, kernels: str) -> float:
    """Return megabytes, see `peak_bytes`."""
    context = multiprocessing.get_context("spawn")
    found: multiprocessing.Queue[int] = context.Queue()
    process = context.Process(target=peak_bytes, args=(name, budget, device, dtype, kernels, found))
    process.start()
    size = found.get()
    process.join()
    return size / MEGABYTE


def main() -> None:
    """Measure and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budgets", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--methods", nargs="+", default=None)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", default="float32", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--kernels", nargs="+", default=["auto"])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print("| method | B | kernels | score + select, ms | compact, ms | rows moved | peak, MB |")
    print("|---|--:|---|--:|--:|--:|--:|")
    for budget in options.budgets:
        for (name, kernels), rows in measured(options, budget).items():
            # The first repetition warms up.
            select, move, moved = (statistics.median(part) for part in zip(*rows[1:], strict=True))
            size = peak(name, budget, options.device, options.dtype, kernels)
            cells = (f"{select * 1e3:,.2f}", f"{move * 1e3:,.2f}", f"{moved:,.0f}", f"{size:.0f}")
            print(f"| {name} | {budget:,} | {kernels} | {' | '.join(cells)} |", flush=True)


def measured(
    options: argparse.Namespace, budget: int
) -> dict[tuple[str, str], list[tuple[float, float, int]]]:
    """Return every repetition of every method with every choice of kernels, interleaved."""
    methods = {name: built(name, budget, options.layers) for name in options.methods or arms()}
    dtype = getattr(torch, options.dtype)
    scenes = {
        name: Scene(each, budget, options.device, dtype, options.layers)
        for name, each in methods.items()
    }
    times: dict[tuple[str, str], list[tuple[float, float, int]]] = {
        (name, kernels): [] for name in methods for kernels in options.kernels
    }
    for _ in range(options.repeats + 1):
        for name, kernels in times:
            use_backend(kernels)
            times[name, kernels].append(scenes[name].event(methods[name]))
    return times


if __name__ == "__main__":
    main()
