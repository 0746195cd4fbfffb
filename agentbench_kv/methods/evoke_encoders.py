"""Embeddings of token spans: from the model's own table, from a sentence encoder, from a hash."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from agentbench_kv.errors import PrerequisiteError
from agentbench_kv.methods.spans import SpanCache

TOKENS, HASH = "tokens", "hash"
HASH_SIZE = 64

Vector = NDArray[np.float32]
# Makes one vector [size] of some ids of a session; equal ids give equal vectors.
Encoder = Callable[[Sequence[int], SpanCache], Vector]


def token_encoder(tokens: Sequence[int], cache: SpanCache) -> Vector:
    """Return the mean of the model's own input embeddings, less what all ids have in common."""
    mean: Vector = cache.embed(tokens).mean(0)
    return mean


def hash_encoder(tokens: Sequence[int], cache: SpanCache) -> Vector:  # noqa: ARG001
    """Return the mean of a random vector [64] per id; needs no model. For tests."""
    mean: Vector = np.stack([_hashed(token) for token in tokens]).mean(0)
    return mean


def sentence_encoder(path: Path) -> Encoder:
    """Load a sentence-transformers model of a local folder. It reads the text, nobody else does."""
    if not path.is_dir():
        raise PrerequisiteError(
            f"encoder {str(path)!r} is no folder; give {TOKENS}, {HASH} or the folder of a "
            "sentence-transformers model"
        )
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError:
        raise PrerequisiteError(
            "a sentence encoder needs sentence-transformers; pip install sentence-transformers, "
            f"or --set encoder={TOKENS}"
        ) from None
    model, lock = SentenceTransformer(str(path), local_files_only=True), threading.Lock()

    def encode(tokens: Sequence[int], cache: SpanCache) -> Vector:
        text = cache.text(tokens)
        with lock:
            vector: Vector = model.encode([text], show_progress_bar=False)[0]
        return vector

    return encode


def make_encoder(name: str) -> Encoder:
    """Return the encoder that `--set encoder=` names; a sentence model is loaded now."""
    known: dict[str, Encoder] = {TOKENS: token_encoder, HASH: hash_encoder}
    return known.get(name) or sentence_encoder(Path(name))


@lru_cache(maxsize=65536)
def _hashed(token: int) -> Vector:
    return np.random.default_rng(token).standard_normal(HASH_SIZE, dtype=np.float32)
