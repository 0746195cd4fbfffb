"""Restoring a block against computing it again, measured in the environment's interpreter."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentbench_kv.engines.llamacpp.models import lines_of

PROTOCOLS = {
    "empty": "empty cache, block at [0, n), back to where it was",
    "tail": "context of 2,048 tokens, block re-anchored at its end",
}


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
    asked = {
        "model": "" if model is None else str(model.absolute()),
        "dtype": dtype,
        "tokens": list(tokens),
        "cells": cells,
        "repeats": repeats,
    }
    module = "agentbench_kv.engines.llamacpp.server.restore_bench"
    for line in lines_of(python, module, [json.dumps(asked)]):
        row = json.loads(line)
        yield RestoreTimes(**row) if "protocol" in row else row
