"""The model's input embeddings, read from its file."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

PART = 4096  # rows that are float32 at the same time


class Embeddings:
    """Rows of `token_embd.weight`, turned into float32 one by one: it may be quantised."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def rows(self, tokens: Sequence[int]) -> list[list[float]]:
        """Return embeddings [tokens, hidden] less their mean over all ids."""
        found: list[list[float]] = (self._plain(list(tokens)) - self._mean).tolist()
        return found

    def _plain(self, tokens: Any) -> NDArray[np.float32]:
        from gguf.quants import dequantize

        rows: NDArray[np.float32] = dequantize(self._tensor.data[tokens], self._tensor.tensor_type)
        return rows.astype(np.float32)

    @cached_property
    def _mean(self) -> NDArray[np.float64]:
        count = len(self._tensor.data)
        parts = (slice(first, first + PART) for first in range(0, count, PART))
        sums = [self._plain(part).sum(0, dtype=np.float64) for part in parts]
        return np.asarray(np.stack(sums).sum(0) / count)

    @cached_property
    def _tensor(self) -> Any:
        from gguf import GGUFReader

        tensors = GGUFReader(self._path).tensors
        return next(each for each in tensors if each.name == "token_embd.weight")
