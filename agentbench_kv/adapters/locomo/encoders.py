"""The metrics by a model: cosine similarity and BERTScore, from folders the user names.

They are computed with the named model or not at all: another model gives figures that look alike
and mean something else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from agentbench_kv.adapters.locomo.metrics import normalised
from agentbench_kv.errors import PrerequisiteError, UsageError

Compare = Callable[[str, str], float]
"""From answer and gold answer to a figure."""


class _Encoder:
    """A model that is loaded at the first comparison and used by one thread at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._model: Any = None
        self._lock = threading.Lock()

    def __call__(self, answer: str, gold: str) -> float:
        if not answer.strip():
            return 0.0  # an empty answer
        with self._lock:
            self._model = self._model or self._load()
            return self._compare(answer, gold)

    def _load(self) -> Any:
        raise NotImplementedError

    def _compare(self, answer: str, gold: str) -> float:
        raise NotImplementedError


class Similarity(_Encoder):
    """Cosine of two sentence-transformers embeddings, in [-1, 1]; Mem0 uses all-MiniLM-L6-v2."""

    def __init__(self, folder: Path) -> None:
        _require("similarity_model", folder, "sentence_transformers", "sentence-transformers")
        super().__init__(folder)

    def _load(self) -> Any:
        from sentence_transformers import SentenceTransformer

        return SentenceTransformer(str(self._folder), device="cpu", local_files_only=True)

    def _compare(self, answer: str, gold: str) -> float:
        pair = self._model.encode(
            [answer, gold], normalize_embeddings=True, show_progress_bar=False
        )
        return min(1.0, float(pair[0] @ pair[1]))


class BertScore(_Encoder):
    """BERTScore F1 as LoCoMo's authors use it: rescaled with the English baseline, at least 0.

    The folder's name (`roberta-large`) says which layer and which baseline count.
    """

    def __init__(self, folder: Path) -> None:
        _require("bertscore_model", folder, "bert_score", "bert-score")
        super().__init__(folder)
        self._baseline = _baseline(folder.name)

    def _load(self) -> Any:
        from bert_score import BERTScorer
        from bert_score.utils import model2layers

        return BERTScorer(
            model_type=str(self._folder),
            num_layers=model2layers[self._folder.name],
            lang="en",
            rescale_with_baseline=True,
            baseline_path=str(self._baseline),
            device="cpu",
        )

    def _compare(self, answer: str, gold: str) -> float:
        said, wanted = normalised(answer), normalised(gold)
        if not said or not wanted:
            return 0.0
        *_, found = self._model.score([said], [wanted])
        return min(1.0, max(0.0, float(found[0])))


def _require(setting: str, folder: Path, module: str, package: str) -> None:
    if find_spec(module) is None:
        raise PrerequisiteError(f"{setting} needs {package}: pip install {package}")
    if not folder.is_dir():
        raise PrerequisiteError(f"{setting}={folder}: no such folder; name a local copy of a model")


def _baseline(model: str) -> Path:
    (package,) = find_spec("bert_score").submodule_search_locations  # type: ignore[union-attr,misc]
    folder = Path(package) / "rescale_baseline" / "en"
    path = folder / f"{model}.tsv"
    if not path.is_file():
        raise UsageError(
            f"bertscore_model: bert-score has no English baseline for a model named {model!r}; "
            "name a folder such as roberta-large"
        )
    return path
