"""Calibrations of models: made once from plain text, kept by model hash, found by every run."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentbench_kv.adapters.micro.generate import PROFILES, generate, train_seed
from agentbench_kv.engines.base import Sampling
from agentbench_kv.engines.embedded.engine import EmbeddedEngine
from agentbench_kv.engines.embedded.model import LoadedModel, load_model
from agentbench_kv.engines.embedded.observer import FedRows, Observer
from agentbench_kv.environments.locations import home
from agentbench_kv.errors import UsageError
from agentbench_kv.methods.base import Method, Phase
from agentbench_kv.methods.calibration import Calibration, as_complex, rotate
from agentbench_kv.methods.full import Full
from agentbench_kv.phases import TokenPhases
from agentbench_kv.phases.tokens import TokenCodec, load_tokenizer
from agentbench_kv.training.micro.conversation import whole_session

logger = logging.getLogger(__name__)
MICRO_SESSIONS = 8
MICRO_SOURCE = "the micro task's text"
MAX_TOKENS = 32768
MIN_TOKENS = 256


def calibration_path(model_sha: str) -> Path:
    """Return where the calibration of a model is kept."""
    return home() / "calibration" / f"{model_sha[:16]}.safetensors"


def make_calibration(model: LoadedModel, texts: Sequence[str], source: str) -> Path:
    """Calibrate a model on at most 32,768 tokens of `texts` and keep it for every later run."""
    codec = TokenCodec(load_tokenizer(model.path))
    made = calibrate(model, (codec.encode(text) for text in texts))
    path = calibration_path(model.sha)
    replace(made, meta={**made.meta, "source": source}).save(path)
    return path


def calibrate(model: LoadedModel, documents: Iterable[Sequence[int]]) -> Calibration:
    """Average a model's queries over documents of token ids, each from position 0.

    Queries are taken from attention, so after the q-norm of models that have one, and turned back
    to position 0. At most 32,768 tokens are read; what is longer
    than the model's context is cut. UsageError if there are fewer than 256.
    """
    parts = list(_parts(documents, min(MAX_TOKENS, model.context_limit - 2)))
    found = sum(map(len, parts))
    if found < MIN_TOKENS:
        raise UsageError(f"the text has {found} tokens; calibration needs at least {MIN_TOKENS}")
    averages = _QueryAverages(model)
    engine = EmbeddedEngine(model, Full(), recorder=averages)
    try:
        for index, part in enumerate(parts):
            session = str(index)
            engine.open(session, TokenPhases())
            engine.extend(session, part, [Phase.OTHERS] * len(part))
            list(engine.generate(session, Sampling(max_tokens=1)))
            engine.close(session)
    finally:
        engine.shutdown()
    return averages.result()


def _parts(documents: Iterable[Sequence[int]], longest: int) -> Iterator[list[int]]:
    room = MAX_TOKENS
    for document in documents:
        for first in range(0, len(document), longest):
            part = list(document[first : first + min(longest, room)])
            room -= len(part)
            if part:
                yield part


class _QueryAverages(Observer):
    """Sums of queries as complex pairs, and of their sizes, in float64."""

    def __init__(self, model: LoadedModel) -> None:
        shape = (model.shape.layers, model.shape.q_heads, model.shape.head_dim // 2)
        device = model.shape.device
        self._model = model
        self._sum = torch.zeros(shape, dtype=torch.complex128, device=device)
        self._size = torch.zeros(shape, dtype=torch.float64, device=device)
        self._seen = 0
        self._first = 0

    def on_rows(self, rows: FedRows) -> None:
        self._first = rows.position
        self._seen += len(rows.tokens)

    def on_attention(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> None:  # noqa: ARG002
        rows = torch.arange(query.shape[1], device=query.device)
        plain = rotate(query.float(), -(self._first + rows), self._model.frequencies)
        pairs = as_complex(plain / self._model.rope_scale)
        self._sum[layer] += pairs.to(torch.complex128).sum(1)
        self._size[layer] += pairs.abs().double().sum(1)

    def result(self) -> Calibration:
        return Calibration(
            mean=(self._sum / self._seen).to(torch.complex64),
            abs_mean=(self._size / self._seen).float(),
            frequencies=self._model.frequencies.float(),
            scale=self._model.rope_scale,
            meta={"model_sha": self._model.sha, "tokens": str(self._seen)},
        )


def calibrated(method: Method, model: str, dtype: str, device: str) -> Method:
    """Give a method its model's calibration, making it from the micro task's text if need be."""
    if not method.needs_calibration:
        return method
    loaded = load_model(model, dtype, device)
    path = calibration_path(loaded.sha)
    if not path.exists():
        logger.warning(
            "no calibration of model %s yet: made from %s (kvbench calibrate takes another text)",
            model,
            MICRO_SOURCE,
        )
        make_calibration(loaded, micro_texts(), MICRO_SOURCE)
    return method.with_calibration(Calibration.load(path).to(loaded.shape.device))


def calibration_used(method: Method, model_sha: str) -> dict[str, Any]:
    """Describe the calibration a run used, for its provenance; empty if it needed none."""
    if not method.needs_calibration:
        return {}
    path = calibration_path(model_sha)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return {"calibration": {"sha256": digest, **Calibration.load(path).meta}}


def micro_texts() -> list[str]:
    """Return sessions of the micro task, from seeds no test uses."""
    profile = PROFILES["recall-5k"]
    return [whole_session(generate(train_seed(i), profile)).text for i in range(MICRO_SESSIONS)]
