"""Encoders by name: `wordllama`, `hash`, or the folder of a model."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, Self, runtime_checkable

from agentbench_kv.encoders.folder import load_folder
from agentbench_kv.encoders.words import HASH_SIZE, HashedWords, WordLlamaEncoder, wordllama_files
from agentbench_kv.errors import PrerequisiteError

HASH, WORDLLAMA = "hash", "wordllama"
NAMES = f"{WORDLLAMA}, {HASH} (tests only), or the folder of a local encoder"
_WHOLE = 1 << 20


class TextEncoder(Protocol):
    """What turns texts into vectors; a `sentence_transformers.SentenceTransformer` is one."""

    def encode(self, sentences: Sequence[str], /) -> Any:
        """Return an array of float, shape [texts, dimension]."""
        ...


@runtime_checkable
class FittedEncoder(TextEncoder, Protocol):
    """One that searches better once it knows what is searched among."""

    weights: Any  # an array that says so, to be kept with the embeddings; None before

    def fitted(self, texts: Sequence[str]) -> Self:
        """Return it for a search among some texts."""
        ...

    def weighted(self, weights: Any) -> Self:
        """Return it as it was when it had these weights."""
        ...


def load_encoder(name: str | Path) -> TextEncoder:
    """Return an encoder; PrerequisiteError, with what mends it, if it is not on this machine."""
    if str(name) == HASH:
        return HashedWords()
    if str(name) == WORDLLAMA:
        return WordLlamaEncoder.load()
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise PrerequisiteError(f"no encoder in {folder}: name {NAMES}")
    return load_folder(folder)


def encoder_sha(name: str | Path) -> str:
    """Return a hash of an encoder: names and sizes of its files, contents of the small ones."""
    digest = hashlib.sha256()
    if str(name) == HASH:
        return hashlib.sha256(f"{HASH} {HASH_SIZE}".encode()).hexdigest()
    if str(name) == WORDLLAMA:
        for path in wordllama_files():
            digest.update(path.read_bytes())
        return digest.hexdigest()
    folder = Path(name).expanduser()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        size = path.stat().st_size
        digest.update(f"{path.relative_to(folder)} {size}\n".encode())
        if size <= _WHOLE:
            digest.update(path.read_bytes())
    return digest.hexdigest()
