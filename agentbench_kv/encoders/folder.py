"""An encoder from a local folder: a sentence-transformers model, or any Hugging Face encoder."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentbench_kv.errors import PrerequisiteError

_BATCH = 32
_LONGEST = 8192  # tokens, of models that do not say
_SIMPLE = ("Transformer", "Pooling", "Normalize")
_INSTALL = "pip install sentence-transformers"


class FolderEncoder:
    """Mean or first token of a model's last states, without sentence-transformers.

    It is what that library computes for folders whose parts are a transformer, such a pooling and
    perhaps a normalisation. Folders without a list of parts are pooled by their mean, as there.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModel, AutoTokenizer

        self._pooling, self._unit = _parts(folder)
        settings = _document(folder / "sentence_bert_config.json")
        self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self._model = AutoModel.from_pretrained(folder, local_files_only=True).float().eval()
        positions = getattr(self._model.config, "max_position_embeddings", _LONGEST)
        limits = (settings.get("max_seq_length"), self._tokenizer.model_max_length, positions)
        self._longest = min(int(limit) for limit in limits if limit)
        self._lock = threading.Lock()

    def encode(self, sentences: Sequence[str], /) -> NDArray[np.float32]:
        """Return vectors [texts, dimension]; what is too long for the model is cut."""
        batches = [sentences[at : at + _BATCH] for at in range(0, len(sentences), _BATCH)]
        with self._lock:
            return np.concatenate([self._pooled(list(batch)) for batch in batches])

    def _pooled(self, texts: list[str]) -> NDArray[np.float32]:
        import torch

        how = {"padding": True, "truncation": True, "max_length": self._longest}
        given = self._tokenizer(texts, return_tensors="pt", **how)
        with torch.inference_mode():
            states = self._model(**given).last_hidden_state
            mask = given["attention_mask"].unsqueeze(-1).float()
            if self._pooling == "cls":
                pooled = states[:, 0]
            else:
                pooled = (states * mask).sum(1) / mask.sum(1).clamp(min=1e-9)
            if self._unit:
                pooled = torch.nn.functional.normalize(pooled, dim=1)
        found: NDArray[np.float32] = pooled.numpy()
        return found


class SentenceTransformersEncoder:
    """A folder as sentence-transformers reads it, one thread at a time."""

    def __init__(self, folder: Path) -> None:
        from sentence_transformers import SentenceTransformer

        self._model: Any = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
        self._lock = threading.Lock()

    def encode(self, sentences: Sequence[str], /) -> Any:
        """Return vectors [texts, dimension]."""
        return self._call("encode", sentences)

    def encode_query(self, sentences: Sequence[str], /) -> Any:
        """Encode with the prompt the model has for queries, if it knows any."""
        return self._call("encode_query", sentences)

    def encode_document(self, sentences: Sequence[str], /) -> Any:
        """Encode with the prompt the model has for documents, if it knows any."""
        return self._call("encode_document", sentences)

    def _call(self, name: str, sentences: Sequence[str]) -> Any:
        encode = getattr(self._model, name, self._model.encode)
        with self._lock:
            return encode(list(sentences), show_progress_bar=False)


def load_folder(folder: Path) -> FolderEncoder | SentenceTransformersEncoder:
    """Load an encoder, with sentence-transformers if it is there; PrerequisiteError if not one."""
    library = _has_library()
    try:
        return SentenceTransformersEncoder(folder) if library else FolderEncoder(folder)
    except PrerequisiteError:
        raise
    except Exception as error:  # whatever a folder that is none makes it stumble over
        why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        more = "" if library else f" (other forms need sentence-transformers: {_INSTALL})"
        raise PrerequisiteError(
            f"{folder} holds no sentence-transformers encoder: {why}{more}"
        ) from error


def _has_library() -> bool:
    try:
        return find_spec("sentence_transformers") is not None
    except ValueError:  # a module without a specification, as a test puts one there
        return True


def _parts(folder: Path) -> tuple[str, bool]:
    """Return how states are pooled, and whether vectors are brought to unit length."""
    kinds = [str(each.get("type", "")).rpartition(".")[2] for each in _list(folder)]
    if kinds[:2] not in ([], [*_SIMPLE[:2]]) or not set(kinds) <= set(_SIMPLE):
        raise _needs_library(folder, f"its parts are {', '.join(kinds)}")
    prompts = _document(folder / "config_sentence_transformers.json").get("prompts") or {}
    if any(prompts.values()):
        raise _needs_library(folder, "it has prompts for queries and documents")
    config = _document(folder / "1_Pooling" / "config.json")
    modes = {
        name.removeprefix("pooling_mode_").removesuffix("_tokens").removesuffix("_token")
        for name, value in config.items()
        if name.startswith("pooling_mode_") and value is True
    } or {str(config.get("pooling_mode", "mean"))}
    if not modes <= {"mean", "cls"} or len(modes) != 1:
        raise _needs_library(folder, f"its pooling is {', '.join(sorted(modes))}")
    return modes.pop(), "Normalize" in kinds


def _needs_library(folder: Path, why: str) -> PrerequisiteError:
    return PrerequisiteError(f"{folder} needs sentence-transformers ({why}): {_INSTALL}")


def _document(path: Path) -> Mapping[str, Any]:
    found = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    return found if isinstance(found, dict) else {}


def _list(folder: Path) -> list[Mapping[str, Any]]:
    path = folder / "modules.json"
    found = json.loads(path.read_text("utf-8")) if path.is_file() else []
    return [each for each in found if isinstance(each, dict)]
