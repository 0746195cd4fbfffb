"""Embeddings of token spans: from the model's own table, from a sentence encoder, from a hash."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from agentbench_kv.errors import PrerequisiteError
from agentbench_kv.methods.spans import SpanCache

TOKENS, HASH = "tokens", "hash"
HASH_SIZE = 64

Vector = NDArray[np.float32]


class Encoder(Protocol):
    """Makes one vector of a span; equal ids give equal vectors."""

    def encode(self, tokens: Sequence[int], cache: SpanCache) -> Vector:
        """Return the embedding [size] of some ids of a session."""


class TokenEncoder:
    """The mean of the model's own input embeddings, each less what all ids have in common."""

    def encode(self, tokens: Sequence[int], cache: SpanCache) -> Vector:
        mean: Vector = cache.embed(tokens).mean(0)
        return mean


class HashEncoder:
    """The mean of a random vector per id; needs no model. For tests."""

    def encode(self, tokens: Sequence[int], cache: SpanCache) -> Vector:  # noqa: ARG002
        mean: Vector = np.stack([_hashed(token) for token in tokens]).mean(0)
        return mean


class SentenceEncoder:
    """A sentence-transformers model in a local folder. It reads the text, nobody else does."""

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            raise PrerequisiteError(
                f"encoder {str(path)!r} is no folder; give {TOKENS}, {HASH} or the folder of a "
                "sentence-transformers model"
            )
        self._model = _sentence_model(path)
        self._lock = threading.Lock()

    def encode(self, tokens: Sequence[int], cache: SpanCache) -> Vector:
        text = cache.text(tokens)
        with self._lock:
            vector: Vector = self._model.encode([text], show_progress_bar=False)[0]
        return vector


def _sentence_model(path: Path) -> Any:
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError:
        raise PrerequisiteError(
            "a sentence encoder needs sentence-transformers; pip install sentence-transformers, "
            f"or --set encoder={TOKENS}"
        ) from None
    return SentenceTransformer(str(path), local_files_only=True)


@lru_cache(maxsize=65536)
def _hashed(token: int) -> Vector:
    return np.random.default_rng(token).standard_normal(HASH_SIZE, dtype=np.float32)
