"""Memory backends without files: snapshots come in with the request and go out with the answer.

The worker may not write, and a snapshot that lives with the caller survives a worker that dies.
What the model sees is untouched: only loading and saving are replaced.
"""

from __future__ import annotations

import hashlib
import importlib
import re
import sys
import types
from collections.abc import Sequence
from typing import Any

HASH_ENCODER = "hash"
_DIMENSION = 384


def backend_of(name: str) -> str:
    """Return the memory backend in the name of a category, a question or a conversation."""
    rest = name.removeprefix("memory_")
    return next(backend for backend in ("kv", "vector", "rec_sum") if rest.startswith(backend))


def prepare(backends: Sequence[str], modules: dict[str, str], encoder: str) -> None:
    """Import the official backends and take their files away.

    `modules` is the official table from class name to module; `encoder` is `hash` or a
    sentence-transformers folder.
    """
    if "vector" in backends:
        _choose_encoder(encoder)
    for backend in backends:
        name = f"MemoryAPI_{backend}"
        store: Any = getattr(importlib.import_module(modules[name]), name)
        store._prepare_snapshot = lambda _, initial_config: initial_config["snapshot"]
        # The caller asks for `contents` when the conversation is over.
        store._flush_memory_to_local_file = lambda _: None


def contents(store: Any) -> dict[str, Any]:
    """Return what an instance would save, in the form of the official snapshot file."""
    if hasattr(store, "memory"):
        return {"memory": store.memory}
    parts = {"core_memory": store.core_memory, "archival_memory": store.archival_memory}
    return {k: v.export() if hasattr(v, "export") else v for k, v in parts.items()}


class HashEncoder:
    """Sentence vectors by feature hashing of words: for checks without a model, not for results."""

    def get_sentence_embedding_dimension(self) -> int:
        return _DIMENSION

    def encode(self, texts: Sequence[str], normalize_embeddings: bool = True) -> Any:
        """Return float32 `[texts, dimension]`, rows of length 1 if `normalize_embeddings`."""
        import numpy as np

        rows = np.zeros((len(texts), _DIMENSION), dtype=np.float32)
        for row, text in zip(rows, texts, strict=True):
            for word in re.findall(r"\w+", str(text).lower()):
                digest = hashlib.blake2b(word.encode("utf-8", "replace"), digest_size=8).digest()
                number = int.from_bytes(digest, "little")
                row[number % _DIMENSION] += 1 if number >> 40 & 1 else -1
        lengths = np.linalg.norm(rows, axis=1, keepdims=True)
        return rows / np.maximum(lengths, 1e-9) if normalize_embeddings else rows


def _choose_encoder(encoder: str) -> None:
    """Make the official module, which names a model of the hub at import, get ours instead."""
    if encoder == HASH_ENCODER:
        module: Any = types.ModuleType("sentence_transformers")
        module.SentenceTransformer = lambda *_args, **_options: HashEncoder()
        sys.modules["sentence_transformers"] = module
        return
    real: Any = importlib.import_module("sentence_transformers")
    official = real.SentenceTransformer
    real.SentenceTransformer = lambda *_args, **_options: official(encoder, device="cpu")
