"""Dense search with an encoder from a local folder; a corpus is embedded when it is imported."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from agentbench_kv.adapters.browser.search import best_first
from agentbench_kv.errors import PrerequisiteError

_WHOLE = 1 << 20
_EMBEDDINGS, _ABOUT = "embeddings.npy", "encoder.json"


class Encoder(Protocol):
    """What turns texts into vectors; a `sentence_transformers.SentenceTransformer` is one."""

    def encode(self, sentences: Sequence[str], /) -> Any:
        """Return an array of float, shape [texts, dimension]."""
        ...


def load_encoder(folder: Path) -> Encoder:
    """Load a sentence-transformers model from a folder; nothing is downloaded."""
    if not folder.is_dir():
        raise PrerequisiteError(f"no encoder in {folder}: name a sentence-transformers folder")
    if find_spec("sentence_transformers") is None:
        raise PrerequisiteError(
            "dense search needs sentence-transformers: pip install sentence-transformers"
        )
    from sentence_transformers import SentenceTransformer

    encoder: Encoder = SentenceTransformer(str(folder), local_files_only=True)
    return encoder


def encoder_sha(folder: Path) -> str:
    """Return a hash of an encoder: names and sizes of its files, contents of the small ones."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        size = path.stat().st_size
        digest.update(f"{path.relative_to(folder)} {size}\n".encode())
        if size <= _WHOLE:
            digest.update(path.read_bytes())
    return digest.hexdigest()


class DenseIndex:
    """Exact cosine search over embeddings of unit length, [documents, dimension].

    `sha` is the hash of the encoder that made them.
    """

    name = "dense"

    def __init__(self, embeddings: NDArray[np.float32], encoder: Encoder, sha: str) -> None:
        self._embeddings = embeddings
        self._encoder = encoder
        self._sha = sha

    @classmethod
    def build(cls, texts: Sequence[str], encoder: Encoder, sha: str) -> Self:
        """Embed texts; the n-th text is document n."""
        return cls(_unit(_call(encoder, "encode_document", list(texts))), encoder, sha)

    @classmethod
    def load(cls, folder: Path, encoder: Encoder, sha: str) -> Self:
        """Map embeddings into memory; PrerequisiteError if missing or by another encoder."""
        about = folder / _ABOUT
        if not about.is_file():
            raise PrerequisiteError(
                f"no embeddings in {folder}: import the corpus again with --encoder"
            )
        made_by = json.loads(about.read_text())["sha256"]
        if made_by != sha:
            raise PrerequisiteError(
                f"the embeddings in {folder} were made by another encoder ({made_by[:12]}, not "
                f"{sha[:12]}); import the corpus again with --encoder"
            )
        return cls(np.load(folder / _EMBEDDINGS, mmap_mode="r"), encoder, sha)

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / _EMBEDDINGS, self._embeddings)
        (folder / _ABOUT).write_text(json.dumps({"sha256": self._sha}))

    def search(self, query: str, count: int) -> list[int]:
        """Return the numbers of the `count` documents nearest to the query, best first."""
        (vector,) = _unit(_call(self._encoder, "encode_query", [query]))
        return [int(i) for i in best_first(self._embeddings @ vector, count)]


def _call(encoder: Encoder, name: str, texts: list[str]) -> Any:
    """Encode with the prompt an encoder has for queries or documents, if it knows any."""
    return getattr(encoder, name, encoder.encode)(texts)


def _unit(vectors: Any) -> NDArray[np.float32]:
    plain = np.asarray(vectors, np.float32)
    lengths = np.linalg.norm(plain, axis=1, keepdims=True)
    return np.asarray(plain / np.maximum(lengths, np.finfo(np.float32).tiny), np.float32)
