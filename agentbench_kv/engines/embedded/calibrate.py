"""Statistics of a model's pre-RoPE queries, taken from prefills of plain text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from agentbench_kv.engines.base import PhaseLabeller, Sampling
from agentbench_kv.engines.embedded.engine import EmbeddedEngine
from agentbench_kv.engines.embedded.model import LoadedModel
from agentbench_kv.engines.embedded.observer import FedRows, Observer
from agentbench_kv.errors import UsageError
from agentbench_kv.methods.base import Phase
from agentbench_kv.methods.calibration import Calibration, as_complex, rotate
from agentbench_kv.methods.full import Full

MAX_TOKENS = 32768
MIN_TOKENS = 256


def calibrate(model: LoadedModel, documents: Iterable[Sequence[int]]) -> Calibration:
    """Average a model's queries over documents of token ids, each from position 0.

    Queries are taken from attention, so after the q-norm of models that have one, and turned back
    to position 0 (methods.md, section triattention). At most 32,768 tokens are read; what is longer
    than the model's context is cut. UsageError if there are fewer than 256.
    """
    parts = list(_parts(documents, min(MAX_TOKENS, model.context_limit - 2)))
    found = sum(map(len, parts))
    if found < MIN_TOKENS:
        raise UsageError(f"the text has {found} tokens; calibration needs at least {MIN_TOKENS}")
    averages = _Averages(model)
    engine = EmbeddedEngine(model, Full(), recorder=averages)
    try:
        for index, part in enumerate(parts):
            session = str(index)
            engine.open(session, _Unlabelled())
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


class _Unlabelled(PhaseLabeller):
    def label(self, token: int) -> Phase:  # noqa: ARG002
        return Phase.OTHERS


class _Averages(Observer):
    """Sums of queries as complex pairs, and of their sizes, in float64."""

    def __init__(self, model: LoadedModel) -> None:
        shape = (model.shape.layers, model.query_heads, model.shape.head_dim // 2)
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
