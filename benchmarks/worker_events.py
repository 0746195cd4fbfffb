"""One event of a session, whole, as the worker of a serving engine carries it out on pages.

    python benchmarks/worker_events.py --device cuda        # Qwen3-8B's shapes
    python benchmarks/worker_events.py --layers 4 --live 4224

Milliseconds until the host goes on, and until the device is done; medians.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median

import torch

from agentbench_kv.engines.core.ledger import Eviction, EvictionOrder
from agentbench_kv.engines.core.policy import BackendPolicy
from agentbench_kv.engines.core.rings import RowShape
from agentbench_kv.engines.core.rows import Fed, PagedStore, WorkerRows
from agentbench_kv.kernels.layout import PagedRows
from agentbench_kv.phases.machine import PromptPhases
from agentbench_kv.registry import make_method

METHODS = ("agentkv", "snapkv", "rkv", "streamingllm")
Q_HEADS, KV_HEADS, HEAD_DIM, PAGE = 32, 8, 128, 16


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def event_ms(
    name: str, live: int, budget: int, layers: int, device: torch.device
) -> tuple[float, float]:
    """Make a session of `live` random rows, evict once; return host's and whole milliseconds."""
    shape = RowShape(layers, Q_HEADS, KV_HEADS, HEAD_DIM, torch.bfloat16, device)
    policy = BackendPolicy(make_method(name, budget), Path(), Path())
    rows = WorkerRows(policy, shape, torch.ones(HEAD_DIM // 2))
    write = rows.feed([Fed("s", 0, [7] * live)], {"s": PromptPhases("token-id")})

    def drawn(*size: int) -> torch.Tensor:
        return torch.randn(*size, device=device, dtype=torch.bfloat16)

    if write is not None:
        for layer in range(layers):
            rows.rings.write(layer, drawn(Q_HEADS, live, HEAD_DIM), write)
    pages = -(-live // PAGE)
    caches = [drawn(pages, PAGE, KV_HEADS, 2 * HEAD_DIM) for _ in range(layers)]
    keys, values = (
        PagedRows.of([cache[..., at : at + HEAD_DIM] for cache in caches], "brhd")
        for at in (0, HEAD_DIM)
    )
    table = torch.randperm(pages).int().to(device)
    order = EvictionOrder("s", 0, Eviction(live, budget, live, live), [])
    wait(device)
    began = time.perf_counter()
    rows.remove(order, PagedStore(keys, values, table, live))
    host = time.perf_counter() - began
    wait(device)
    return 1000 * host, 1000 * (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--live", type=int, nargs="+", default=[4224, 33000])
    parser.add_argument("--budget", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    device = torch.device(given.device)
    print("| method | rows before | after | host, ms | until the device is done, ms |")
    print("|---|--:|--:|--:|--:|")
    for name in METHODS:
        for live in given.live:
            size = (name, live, given.budget, given.layers, device)
            times = [event_ms(*size) for _ in range(given.repeats + 1)][1:]  # the first warms up
            host, whole = (median(column) for column in zip(*times, strict=True))
            print(f"| {name} | {live:,} | {given.budget:,} | {host:.1f} | {whole:.1f} |")


if __name__ == "__main__":
    main()
