"""Restoring a block against computing it again, measured in the environment's interpreter.

`python -m` this module measures what the JSON object in its first argument asks for, and prints
JSON lines. One thread computes; times are that thread's processor time, because the machine may be
busy with something else.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from agentbench_kv.engines.llamacpp.gguf import MID, make_model
from agentbench_kv.engines.llamacpp.models import ROW_TYPES, lines_of
from agentbench_kv.engines.llamacpp.server.cells import Cells
from agentbench_kv.engines.llamacpp.server.context import Context, DecodeBatch
from agentbench_kv.engines.llamacpp.server.rows import SequenceRows

PROTOCOLS = {
    "empty": "empty cache, block at [0, n), back to where it was",
    "tail": "context of 2,048 tokens, block re-anchored at its end",
}
CONTEXT_TOKENS = 2048
BLOCK_START = 256
BATCH = 512
ROUNDS = 5  # restores per prefill: they take a hundredth of the time


@dataclass(frozen=True)
class RestoreTimes:
    """Medians of one size, in milliseconds of one thread's processor time, on warm caches."""

    protocol: str  # one of `PROTOCOLS`
    tokens: int  # of the block
    save: float
    evict: float
    restore: float
    prefill: float  # computes the same tokens again
    first_restore: float  # the first one after the context was computed
    load_average: float  # of the machine, over a minute

    @property
    def speedup(self) -> float:
        """How much longer computing takes than restoring."""
        return self.prefill / self.restore

    @property
    def both_speedup(self) -> float:
        """How much longer computing takes than saving and restoring."""
        return self.prefill / (self.save + self.restore)


def measure_restore(
    python: Path, model: Path | None, dtype: str, tokens: Sequence[int], cells: int, repeats: int
) -> Iterator[dict[str, Any] | RestoreTimes]:
    """Yield what is measured on, then the times of every protocol and block size in `tokens`.

    `python` is the interpreter of the environment `llamacpp`; without a GGUF file as `model`,
    weights are random (8 layers of 512). `repeats` counts prefills; each has five restores.
    """
    asked = {"dtype": dtype, "tokens": list(tokens), "cells": cells, "repeats": repeats}
    asked["model"] = "" if model is None else str(model.absolute())
    for line in lines_of(python, __name__, [json.dumps(asked)]):
        row = json.loads(line)
        yield RestoreTimes(**row) if "protocol" in row else row


class BenchSession:
    """One session of random tokens over a model."""

    def __init__(self, path: Path, cells: int, row_type: int) -> None:
        self.context = Context(
            path, cells=cells, sequences=2, row_type=row_type, batch=BATCH, threads=1
        )
        draw = torch.Generator().manual_seed(3)
        words = self.context.shape.vocabulary
        self.tokens = torch.randint(0, words, (CONTEXT_TOKENS,), generator=draw).tolist()
        self.rows = SequenceRows(Cells(self.context))

    def feed(self, tokens: list[int]) -> None:
        for first in range(0, len(tokens), BATCH):
            part = tokens[first : first + BATCH]
            start, count = self.rows.next, len(part)
            positions = list(range(start, start + count))
            self.context.decode(DecodeBatch(part, positions, [0] * count, [count - 1]))
            self.rows.append(self.context.watch.cells(), start)

    def measure(self, protocol: str, tokens: int, repeats: int) -> dict[str, Any]:
        """Return the medians of one size, for a `RestoreTimes`; the first repetition warms up."""
        start, context = (0, tokens) if protocol == "empty" else (BLOCK_START, CONTEXT_TOKENS)
        self.rows.free()
        self.rows.sequence = 0
        self.feed(self.tokens[:context])
        moved = 0 if protocol == "empty" else context - start
        rounds = [self._round(start, tokens, moved) for _ in range(ROUNDS * repeats + 1)]
        self.rows.drop((self.rows.rope >= start) & (self.rows.rope < start + tokens))
        prefills = [self._prefill(start, tokens, start + moved) for _ in range(repeats + 1)]
        return {
            "protocol": protocol,
            "tokens": tokens,
            **{step: statistics.median(times[step] for times in rounds[1:]) for step in rounds[0]},
            "prefill": statistics.median(prefills[1:]),
            "first_restore": rounds[0]["restore"],
            "load_average": os.getloadavg()[0],
        }

    def _round(self, start: int, tokens: int, moved: int) -> dict[str, float]:
        """Time saving, evicting and restoring a block, in ms; leave the session as it was."""
        rows = self.rows
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

    def _prefill(self, start: int, tokens: int, at: int) -> float:
        """Time computing a block's tokens at a position behind the session's first ones, in ms."""
        times: dict[str, float] = {}
        self.rows.next = at
        self.rows.drop(self.rows.rope >= at)
        with _timed(times, "prefill"):
            self.feed(self.tokens[start : start + tokens])
        return times["prefill"]


@contextmanager
def _timed(times: dict[str, float], step: str) -> Iterator[None]:
    began = time.thread_time()
    yield
    times[step] = 1e3 * (time.thread_time() - began)


def _measured(asked: dict[str, Any], path: Path) -> Iterator[dict[str, Any]]:
    session = BenchSession(path, asked["cells"], ROW_TYPES[asked["dtype"]])
    shape = session.context.shape
    own = ("architecture", "layers", "kv_heads", "head_dim")
    yield {
        "model": asked["model"] or "random weights",
        **{name: getattr(shape, name) for name in own},
        "bytes_per_token": shape.bytes_per_token(asked["dtype"]),
        "dtype": asked["dtype"],
        "cells": session.context.cells,
        "threads": 1,
    }
    for protocol in PROTOCOLS:
        for tokens in asked["tokens"]:
            yield session.measure(protocol, tokens, asked["repeats"])


def main() -> int:
    asked = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="kvbench-") as place, torch.inference_mode():
        made = Path(place) / "made.gguf"
        path = Path(asked["model"]) if asked["model"] else make_model(made, MID, 1)
        for row in _measured(asked, path):
            print(json.dumps(row), flush=True)  # noqa: T201  the parent process reads it
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
