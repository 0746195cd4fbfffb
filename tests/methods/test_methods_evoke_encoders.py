"""Embeddings of spans; the sentence model is a stand-in that sees what it would be given."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from agentbench_kv.errors import PrerequisiteError
from agentbench_kv.methods.evoke.scoring import (
    cosine,
    hash_encoder,
    make_encoder,
    sentence_encoder,
    token_encoder,
)
from agentbench_kv.registry import make_method


class Cache:
    """The two things an encoder may ask of a session."""

    def embed(self, tokens: Any) -> np.ndarray:
        return np.array([[token, 1.0] for token in tokens], np.float32)

    def text(self, tokens: Any) -> str:
        return " ".join(f"t{token}" for token in tokens)


def test_token_embeddings_are_averaged() -> None:
    assert token_encoder([1, 2, 6], Cache()).tolist() == [3.0, 1.0]


def test_hashes_are_alike_by_shared_tokens() -> None:
    ids = ([1, 2, 3, 4], [4, 3, 2, 1], [1, 2, 8, 9], [5, 6, 7, 8])
    one, same, half, other = (hash_encoder(each, Cache()) for each in ids)
    assert cosine(one, same) == pytest.approx(1.0)
    assert cosine(one, same) > cosine(one, half) > cosine(one, other)


@pytest.fixture
def sentence_model(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []

    class SentenceTransformer:
        def __init__(self, path: str, device: str, local_files_only: bool) -> None:
            calls.append((path, device, local_files_only))

        def encode(self, texts: list[str], show_progress_bar: bool) -> np.ndarray:
            assert not show_progress_bar
            calls.append(texts)
            return np.ones((1, 3), np.float32)

    module = ModuleType("sentence_transformers")
    module.SentenceTransformer = SentenceTransformer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sentence_transformers", module)
    return calls


def test_a_sentence_model_reads_the_spans_text(sentence_model: list[Any], tmp_path: Path) -> None:
    method = make_method("evoke", 1024, {"encoder": str(tmp_path)})
    assert make_encoder(method.encoder)([7, 8], Cache()).tolist() == [1.0, 1.0, 1.0]
    assert sentence_model == [(str(tmp_path), "cpu", True), ["t7 t8"]]
    assert "embed_tokens" not in method.needs


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(PrerequisiteError, match=r"no encoder in .*nothing: name wordllama"):
        sentence_encoder(str(tmp_path / "nothing"))
    with pytest.raises(PrerequisiteError, match="holds no sentence-transformers encoder"):
        sentence_encoder(str(tmp_path))


def test_wordllama_reads_the_spans_text() -> None:
    if find_spec("wordllama") is None:
        pytest.skip("wordllama absent: pip install 'agentbench-kv[encoder]'")

    class Words(Cache):
        def text(self, tokens: Any) -> str:
            return " ".join({1: "car", 2: "automobile", 3: "soup"}[token] for token in tokens)

    method = make_method("evoke", 1024, {"encoder": "wordllama"})
    encode = make_encoder(method.encoder)
    car, automobile, soup = (encode([token], Words()) for token in (1, 2, 3))
    assert car.shape == (256,)
    assert cosine(car, automobile) > 2 * abs(cosine(car, soup))
