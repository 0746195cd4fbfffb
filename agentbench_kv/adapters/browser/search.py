"""Search of a corpus, ties broken by document number, so that results never move.

BM25 (bm25s), or dense with one of `agentbench_kv.encoders`: then a corpus is embedded at import.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from agentbench_kv.encoders.loading import FittedEncoder, TextEncoder
from agentbench_kv.errors import PrerequisiteError, UsageError

_WORD = re.compile(r"\w+")
_EMBEDDINGS, _ABOUT, _WEIGHTS = "embeddings.npy", "encoder.json", "weights.npy"


def words(text: str) -> list[str]:
    plain = unicodedata.normalize("NFKD", text.casefold())
    return _WORD.findall("".join(c for c in plain if not unicodedata.combining(c)))


def best_first(scores: NDArray[Any], count: int) -> NDArray[np.int64]:
    """Return the indices of the at most `count` highest `scores`, of equal ones the lower first."""
    count = min(count, len(scores))
    if count < 1:
        return np.empty(0, np.int64)
    candidates = np.flatnonzero(scores >= np.partition(scores, -count)[-count])
    return candidates[np.argsort(-scores[candidates], kind="stable")][:count]


def need_bm25s() -> None:
    if find_spec("bm25s") is None:
        raise PrerequisiteError(
            "searching a corpus needs bm25s, from the extra [browser]: in the clone, "
            'pip install ".[browser]"; elsewhere, pip install bm25s'
        )


class Bm25Index:
    """BM25 in Lucene's variant, k1 = 1.5, b = 0.75.

    Source: Lù, "BM25S: Orders of magnitude faster lexical search via eager sparse scoring", 2024.
    """

    name = "bm25"

    def __init__(self, retriever: Any) -> None:
        self._retriever = retriever

    @classmethod
    def build(cls, texts: Iterable[str]) -> Self:
        """Index texts in memory; the n-th text is document n. UsageError if none holds a word."""
        need_bm25s()
        import bm25s

        # Numbered in the order of the texts: bm25s numbers words in an order of the process.
        vocabulary = {"": 0}
        ids = [
            [vocabulary.setdefault(word, len(vocabulary)) for word in words(text)] for text in texts
        ]
        if len(vocabulary) == 1:
            raise UsageError("no document of the corpus holds a word to search for")
        retriever = bm25s.BM25(method="lucene", k1=1.5, b=0.75)
        retriever.index(bm25s.tokenization.Tokenized(ids, vocabulary), show_progress=False)
        return cls(retriever)

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Map a saved index into memory; PrerequisiteError if it cannot be read."""
        need_bm25s()
        import bm25s

        try:
            return cls(bm25s.BM25.load(str(folder), mmap=True, show_progress=False))
        except (OSError, ValueError, KeyError) as error:
            raise PrerequisiteError(
                f"the search index {folder} cannot be read ({error}); import the corpus again"
            ) from error

    def save(self, folder: Path) -> None:
        self._retriever.save(str(folder), show_progress=False)

    def search(self, query: str, count: int) -> list[int]:
        """Return the numbers of at most `count` documents with a word of the query, best first."""
        known = [word for word in words(query) if word in self._retriever.vocab_dict]
        if not known:
            return []
        scores = np.asarray(self._retriever.get_scores(known))
        return [int(i) for i in best_first(scores, count) if scores[i] > 0]


class DenseIndex:
    """Exact cosine search over embeddings of unit length, [documents, dimension].

    `sha` is the hash of the encoder that made them.
    """

    name = "dense"

    def __init__(self, embeddings: NDArray[np.float32], encoder: TextEncoder, sha: str) -> None:
        self._embeddings = embeddings
        self._encoder = encoder
        self._sha = sha

    @classmethod
    def build(cls, texts: Sequence[str], encoder: TextEncoder, sha: str) -> Self:
        """Embed texts; the n-th text is document n. An encoder that can is fitted to them."""
        if isinstance(encoder, FittedEncoder):
            encoder = encoder.fitted(texts)
        return cls(_unit(_call(encoder, "encode_document", list(texts))), encoder, sha)

    @classmethod
    def load(cls, folder: Path, encoder: TextEncoder, sha: str) -> Self:
        """Map embeddings into memory; PrerequisiteError if missing or by another encoder."""
        about = folder / _ABOUT
        if not about.is_file():
            raise PrerequisiteError(
                f"no embeddings in {folder}: import the corpus again with --encoder"
            )
        try:
            made_by = str(json.loads(about.read_text())["sha256"])
            embeddings = np.load(folder / _EMBEDDINGS, mmap_mode="r")
            if isinstance(encoder, FittedEncoder):
                encoder = encoder.weighted(np.load(folder / _WEIGHTS))
        except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
            raise PrerequisiteError(
                f"the embeddings in {folder} are damaged ({error}); import the corpus again "
                "with --encoder"
            ) from None
        if made_by != sha:
            raise PrerequisiteError(
                f"the embeddings in {folder} were made by another encoder ({made_by[:12]}, not "
                f"{sha[:12]}); import the corpus again with --encoder"
            )
        return cls(embeddings, encoder, sha)

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / _EMBEDDINGS, self._embeddings)
        if isinstance(self._encoder, FittedEncoder):
            np.save(folder / _WEIGHTS, self._encoder.weights)
        (folder / _ABOUT).write_text(json.dumps({"sha256": self._sha}))

    def search(self, query: str, count: int) -> list[int]:
        """Return the numbers of the `count` documents nearest to the query, best first."""
        (vector,) = _unit(_call(self._encoder, "encode_query", [query]))
        return [int(i) for i in best_first(self._embeddings @ vector, count)]


def _call(encoder: TextEncoder, name: str, texts: list[str]) -> Any:
    """Encode with the prompt an encoder has for queries or documents, if it knows any."""
    return getattr(encoder, name, encoder.encode)(texts)


def _unit(vectors: Any) -> NDArray[np.float32]:
    plain = np.asarray(vectors, np.float32)
    lengths = np.linalg.norm(plain, axis=1, keepdims=True)
    return np.asarray(plain / np.maximum(lengths, np.finfo(np.float32).tiny), np.float32)
