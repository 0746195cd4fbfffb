"""Embedded engine on a real model: which share of this machine's limits it reaches.

    python benchmarks/embedded_limits.py MODEL [--dtype bfloat16] [--live 8192] [--sessions 8]

Limits are measured, not taken from a data sheet: bytes per second of reading and of copying a
gigabyte, operations per second of matrix products, of the model's own shapes or larger. A decode
step has to read every weight once and the keys and values of all sessions; a prefill has to do two
operations per weight and token, and those of causal attention. The shares are these over what the
engine took. `--profile` prints where a decode step's and a prefill's time goes instead.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from embedded import ConstantPhase, drain
from torch.profiler import ProfilerActivity, _ExperimentalConfig, profile

from agentbench_kv.engines.base import EngineOptions
from agentbench_kv.engines.embedded.engine import EmbeddedEngine
from agentbench_kv.engines.embedded.packed_weights import PackedLinear
from agentbench_kv.methods.base import Phase
from agentbench_kv.registry import make_method
from agentbench_kv.run.provenance import hardware
from agentbench_kv.serving_bench.hardware import (
    copy_speed,
    product_speed,
    read_speed,
    seconds,
)


@dataclass(frozen=True)
class Limits:
    """Of this machine: bytes and operations per second."""

    read: float
    copied: float
    multiplied: float


@dataclass(frozen=True)
class Work:
    """What the model has to do, whoever does it."""

    weights: int  # elements of all matrices that every token meets, without the embedding
    weight_bytes: int
    head: int  # elements of the output matrix, which only sampled tokens meet
    layers: int
    width: int  # of all query heads together


def linear_layers(model: torch.nn.Module) -> list[Any]:
    """Return the linear layers, packed or not, that every token meets: all but the last."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    kinds = (torch.nn.Linear, PackedLinear)
    return [each for each in model.modules() if isinstance(each, kinds) and each is not head]


def measure_limits(model: torch.nn.Module, dtype: torch.dtype, rows: int, repeats: int) -> Limits:
    """Measure reading, copying and the model's largest matrix product."""
    shapes = [(each.in_features, each.out_features) for each in linear_layers(model)]
    inner, outer = max(shapes, key=lambda shape: shape[0] * shape[1])
    # A small model's products are too short to show what the machine can do.
    products = [(rows, inner, outer), (2048, 2048, 2048)]
    multiplied = max(product_speed(dtype, shape, repeats) for shape in products)
    return Limits(read_speed(repeats), copy_speed(repeats), multiplied)


def work_of(model: torch.nn.Module) -> Work:
    """Count the matrices of a model."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    total = sum(each.in_features * each.out_features for each in linear_layers(model))
    read = total + head.in_features * head.out_features
    config = model.config.get_text_config()  # type: ignore[operator, union-attr]
    width = config.num_attention_heads * (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    size = read * model.dtype.itemsize  # type: ignore[union-attr, operator]
    return Work(total, size, read - total, config.num_hidden_layers, width)


def open_sessions(engine: EmbeddedEngine, names: list[str], live: int) -> list[float]:
    """Read a random prompt into each session; return how long each took, with its first token."""
    stream = torch.Generator().manual_seed(0)
    vocabulary = engine._model.network.get_input_embeddings().num_embeddings
    times = []
    for name in names:
        row = torch.randint(0, int(vocabulary), (live,), generator=stream).tolist()
        engine.open(name, ConstantPhase())
        engine.extend(name, row, [Phase.OTHERS] * live)
        began = time.perf_counter()
        drain(engine, [name], 1)
        times.append(time.perf_counter() - began)
    return times


def top(work: Callable[[], object]) -> None:
    """Print the operations that a piece of work spends its time in."""
    every = _ExperimentalConfig(profile_all_threads=True)  # the engine has one of its own
    with profile(activities=[ProfilerActivity.CPU], experimental_config=every) as found:
        work()
    print(found.key_averages().table(sort_by="self_cpu_time_total", row_limit=15))


def main() -> None:
    """Measure limits, prefill and decode; print a table last."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--live", type=int, default=8192)
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=16, help="decoded a session and repetition")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    options = EngineOptions(model=given.model, method=make_method("full", None), dtype=given.dtype)
    engine = EmbeddedEngine.create(options)
    network = engine._model.network
    work = work_of(network)
    limits = measure_limits(network, next(network.parameters()).dtype, 512, given.repeats)
    names = [f"s{number}" for number in range(given.sessions)]
    if given.profile:
        top(lambda: open_sessions(engine, names[:1], given.live))
        open_sessions(engine, names[1:], given.live)
        top(lambda: drain(engine, names, given.tokens))
        engine.shutdown()
        return
    prefill = statistics.median(open_sessions(engine, names, given.live))
    decode = seconds(lambda: drain(engine, names, given.tokens), given.repeats) / given.tokens
    live = statistics.fmean(engine.stats(name).live for name in names)
    engine_bytes = engine.bytes_per_token
    engine.shutdown()
    print(json.dumps({"hardware": hardware(), "args": vars(given)}))
    print(f"read {limits.read / 1e9:.1f} GB/s, copy {limits.copied / 1e9:.1f} GB/s, "
          f"multiply {limits.multiplied / 1e9:.0f} GFLOP/s")  # fmt: skip
    operations = 2 * work.weights * given.live + 2 * work.head
    operations += 2 * work.layers * work.width * given.live**2  # causal: half of all pairs
    moved = work.weight_bytes + engine_bytes * live * given.sessions
    rows = (
        ("prefill", f"{given.live / prefill:,.0f} tokens/s",
         operations / prefill / limits.multiplied, "multiply"),
        ("decode", f"{given.sessions / decode:,.1f} tokens/s",
         moved / decode / limits.read, "read"),
    )  # fmt: skip
    print("| | speed | share of | % |\n|---|--:|---|--:|")
    for name, speed, share, limit in rows:
        print(f"| {name} | {speed} | {limit} | {100 * share:.0f} |")


if __name__ == "__main__":
    main()
