"""Measures saving, evicting and restoring a block against computing it again; prints JSON lines.

Run with the environment's interpreter. One thread computes; times are that thread's processor time,
because the machine may be busy with something else.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from agentbench_kv.engines.llamacpp.gguf import MID, make_model
from agentbench_kv.engines.llamacpp.models import ROW_TYPES
from agentbench_kv.engines.llamacpp.restore_bench import PROTOCOLS
from agentbench_kv.engines.llamacpp.server.context import Batch, Context
from agentbench_kv.engines.llamacpp.server.rows import Cells, SequenceRows

CONTEXT_TOKENS = 2048


BLOCK_START = 256


BATCH = 512


ROUNDS = 5  # restores per prefill: they take a hundredth of the time


class Bench:
    """One session of random tokens over a model."""

    def __init__(self, path: Path, cells: int, row_type: str) -> None:
        self.context = Context(
            path, cells=cells, sequences=2, row_type=ROW_TYPES[row_type], batch=BATCH, threads=1
        )
        self.cells = Cells(self.context)
        draw = torch.Generator().manual_seed(3)
        words = self.context.shape.vocabulary
        self.tokens = torch.randint(0, words, (CONTEXT_TOKENS,), generator=draw).tolist()
        self.rows = SequenceRows(self.cells)

    def feed(self, tokens: list[int]) -> None:
        """Compute tokens behind the last one."""
        for first in range(0, len(tokens), BATCH):
            part = tokens[first : first + BATCH]
            start, count = self.rows.next, len(part)
            positions = list(range(start, start + count))
            self.context.decode(Batch(part, positions, [0] * count, [count - 1]))
            self.rows.append(self.context.watch.cells(), start)


def measure(bench: Bench, protocol: str, tokens: int, repeats: int) -> dict[str, Any]:
    """Return the medians of one size as the fields of a `RestoreTimes`.

    Every step is repeated on warm caches; the first repetition does not count.
    """
    start, context = (0, tokens) if protocol == "empty" else (BLOCK_START, CONTEXT_TOKENS)
    bench.rows.free()
    bench.rows.sequence = 0
    bench.feed(bench.tokens[:context])
    moved = 0 if protocol == "empty" else context - start
    rounds = [
        _there_and_back(bench.rows, start, tokens, moved) for _ in range(ROUNDS * repeats + 1)
    ]
    bench.rows.drop((bench.rows.rope >= start) & (bench.rows.rope < start + tokens))
    prefills = [_prefill(bench, start, tokens, start + moved) for _ in range(repeats + 1)]
    return {
        "protocol": protocol,
        "tokens": tokens,
        **{step: statistics.median(times[step] for times in rounds[1:]) for step in rounds[0]},
        "prefill": statistics.median(prefills[1:]),
        "first_restore": rounds[0]["restore"],
        "load_average": os.getloadavg()[0],
    }


def _there_and_back(rows: SequenceRows, start: int, tokens: int, moved: int) -> dict[str, float]:
    """Time saving, evicting and restoring a block, in ms; leave the session as it was."""
    times: dict[str, float] = {}
    end = rows.next
    block = (rows.rope >= start) & (rows.rope < start + tokens)
    logical = rows.logical[block]
    with _timed(times, "save"):
        blob = rows.save(block)
    with _timed(times, "evict"):
        rows.drop(block)
    with _timed(times, "restore"):
        if moved:
            blob.rotate(moved)
        rows.restore(blob, logical)
    if moved:
        rows.next = end
        rows.drop(rows.rope >= end)
        blob.rotate(-moved)
        rows.restore(blob, logical)
    return times


def _prefill(bench: Bench, start: int, tokens: int, at: int) -> float:
    """Time computing a block's tokens at a position behind the session's first ones, in ms."""
    times: dict[str, float] = {}
    bench.rows.next = at
    bench.rows.drop(bench.rows.rope >= at)
    with _timed(times, "prefill"):
        bench.feed(bench.tokens[start : start + tokens])
    return times["prefill"]


@contextmanager
def _timed(times: dict[str, float], step: str) -> Iterator[None]:
    began = time.thread_time()
    yield
    times[step] = 1e3 * (time.thread_time() - began)


def _rows(asked: dict[str, Any], path: Path) -> Iterator[dict[str, Any]]:
    bench = Bench(path, asked["cells"], asked["dtype"])
    shape = bench.context.shape
    yield {
        "model": asked["model"] or "random weights",
        "architecture": shape.architecture,
        "layers": shape.layers,
        "kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "bytes_per_token": shape.bytes_per_token(asked["dtype"]),
        "dtype": asked["dtype"],
        "cells": bench.context.cells,
        "threads": 1,
    }
    for protocol in PROTOCOLS:
        for tokens in asked["tokens"]:
            yield measure(bench, protocol, tokens, asked["repeats"])


def main() -> int:
    """Measure what the JSON object in the first argument asks for."""
    asked = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="kvbench-") as place, torch.inference_mode():
        made = Path(place) / "made.gguf"
        path = Path(asked["model"]) if asked["model"] else make_model(made, MID, 1)
        for row in _rows(asked, path):
            print(json.dumps(row), flush=True)  # noqa: T201  the parent process reads it
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
