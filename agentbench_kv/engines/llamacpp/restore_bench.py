"""Restoring a block against computing it again, measured in the environment's interpreter."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentbench_kv.engines.llamacpp.elsewhere import lines_of

__all__ = ["PROTOCOLS", "RestoreTimes", "measure_restore"]

_MODULE = "agentbench_kv.engines.llamacpp.backend.bench_restore"
PROTOCOLS = {
    "empty": "empty cache, block at [0, n), back to where it was",
    "tail": "context of 2,048 tokens, block re-anchored at its end",
}


@dataclass(frozen=True)
class RestoreTimes:
    """Medians of one size, in milliseconds of one thread's processor time.

    Attributes
    ----------
    protocol : str
        One of `PROTOCOLS`.
    tokens : int
        Of the block.
    save, evict, restore, prefill : float
        On warm caches; `prefill` computes the same tokens again.
    first_restore : float
        The first restore after the context was computed.
    load_average : float
        Of the machine, over a minute.
    """

    protocol: str
    tokens: int
    save: float
    evict: float
    restore: float
    prefill: float
    first_restore: float
    load_average: float

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
    """Yield what is measured on, then the times of every protocol and size.

    Parameters
    ----------
    python : Path
        Interpreter of the environment `llamacpp`.
    model : Path or None
        GGUF file; random weights (8 layers of 512) if not given.
    dtype : str
        Of cached rows.
    tokens : sequence of int
        Sizes of blocks.
    cells : int
        Of the cache.
    repeats : int
        Prefills of each size; five restores for each.

    Raises
    ------
    KVBenchError
        If the backend fails.
    """
    asked = {
        "model": "" if model is None else str(model.absolute()),
        "dtype": dtype,
        "tokens": list(tokens),
        "cells": cells,
        "repeats": repeats,
    }
    for line in lines_of(python, _MODULE, [json.dumps(asked)]):
        row = json.loads(line)
        yield _times(row) if "protocol" in row else row


def _times(row: dict[str, Any]) -> RestoreTimes:
    steps = {step: row[f"{step}_ms"] for step in ("save", "evict", "restore", "prefill")}
    return RestoreTimes(
        row["protocol"],
        row["tokens"],
        **steps,
        first_restore=row["first_restore_ms"],
        load_average=row["load_average"],
    )
