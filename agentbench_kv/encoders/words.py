"""Encoders without a network: the mean of a vector for every word, or every token, of a text."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from agentbench_kv.errors import PrerequisiteError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Vectors = NDArray[np.float32]
HASH_SIZE = 256
_WORD = re.compile(r"\w+")
_WEIGHTS = "weights/l2_supercat_256.safetensors"
_TOKENIZER = "tokenizers/l2_supercat_tokenizer_config.json"
_INSTALL = "pip install 'agentbench-kv[encoder]'"


class HashedWords:
    """A random vector per lower-case word, the same everywhere. For tests: it knows no meaning."""

    def encode(self, sentences: Sequence[str], /) -> Vectors:
        """Return the mean of the words' vectors [texts, 256]; zeros for a text without words."""
        words = [_WORD.findall(text.casefold()) for text in sentences]
        return _means(words, HASH_SIZE, lambda found: np.stack([_hashed(word) for word in found]))


class WordLlamaEncoder:
    """Mean of token vectors [256] that the package `wordllama` carries.

    Source: D. L. Miller, WordLlama, 2024 (MIT; weights from the input embeddings of Llama 2 and
    models with its tokenizer, trained further). The package's own loader is not used: in 0.4.0 it
    looks for its tokenizer where it is not, and then downloads it, and to import it sets up the
    log of the whole process. The files are read instead, and the result is the same.
    """

    def __init__(
        self, table: Vectors, tokenizer: Tokenizer, weights: Vectors | None = None
    ) -> None:
        self._table = table
        self._tokenizer = tokenizer
        self.weights = weights  # of every token in a mean [tokens]; None: all alike

    @classmethod
    def load(cls) -> Self:
        """Read the package's files; PrerequisiteError if they are not there."""
        from safetensors.numpy import load_file
        from tokenizers import Tokenizer

        weights, tokenizer = wordllama_files()
        table = load_file(weights)["embedding.weight"].astype(np.float32)
        made = Tokenizer.from_file(str(tokenizer))
        made.no_padding()
        made.no_truncation()
        return cls(table, made)

    def encode(self, sentences: Sequence[str], /) -> Vectors:
        """Return the mean of the tokens' vectors [texts, 256]; zeros for an empty text."""
        weights = self.weights
        size = self._table.shape[1]
        if weights is None:
            return _means(self._ids(sentences), size, lambda found: self._table[found])
        return _means(
            self._ids(sentences), size, lambda found: self._table[found] * weights[found, None]
        )

    def weighted(self, weights: Vectors) -> Self:
        """Return this encoder with weights that `fitted` made."""
        return type(self)(self._table, self._tokenizer, np.asarray(weights, np.float32))

    def fitted(self, texts: Sequence[str]) -> Self:
        """Return this encoder for a search among some texts: tokens of few of them weigh more.

        A token's weight is log((n + 1) / (h + 1/2)), `h` of the `n` texts having it, at least 0.
        Without it little words drown the others: see docs/locomo.md for what that is worth.
        """
        holding = np.zeros(len(self._table), np.float32)
        for ids in self._ids(texts):
            holding[np.unique(ids)] += 1
        return self.weighted(np.log((len(texts) + 1) / (holding + 0.5)).clip(min=0))

    def _ids(self, sentences: Sequence[str]) -> list[NDArray[np.int64]]:
        batch = self._tokenizer.encode_batch(list(sentences), add_special_tokens=False)
        last = len(self._table) - 1
        return [np.minimum(np.array(each.ids, np.int64), last) for each in batch]


def wordllama_files() -> tuple[Path, Path]:
    """Return the weights and the tokenizer of the installed package `wordllama`."""
    found = find_spec("wordllama")
    if found is None or not found.submodule_search_locations:
        raise PrerequisiteError(f"the encoder wordllama needs the package of that name: {_INSTALL}")
    folder = Path(found.submodule_search_locations[0])
    files = folder / _WEIGHTS, folder / _TOKENIZER
    for each in files:
        if not each.is_file():
            raise PrerequisiteError(f"wordllama has no {each.name} in {folder}: {_INSTALL}")
    return files


def _means(parts: Sequence[Any], size: int, vectors: Callable[[Any], Vectors]) -> Vectors:
    rows = np.zeros((len(parts), size), np.float32)
    for row, part in zip(rows, parts, strict=True):
        if len(part):
            row[:] = vectors(part).mean(0)
    return rows


@lru_cache(maxsize=65536)
def _hashed(word: str) -> Vectors:
    seed = int.from_bytes(hashlib.sha256(word.encode("utf-8", "replace")).digest()[:8])
    return np.random.default_rng(seed).standard_normal(HASH_SIZE, dtype=np.float32)
