"""Calibrations: what a method must know of a model's queries, and which one a run scores with.

A run's calibration is made from a text that the user gave to `kvbench calibrate`, else from text of
the run's own task, never from another's. The hash of its numbers is in the run's spec, so another
calibration is another run.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from agentbench_kv.adapters.micro.generate import PROFILES, generate, train_seed
from agentbench_kv.engines.base import Sampling
from agentbench_kv.engines.embedded.engine import EmbeddedEngine
from agentbench_kv.engines.embedded.model import (
    LoadedModel,
    load_model,
    model_sha,
    pick_device,
)
from agentbench_kv.engines.embedded.observer import FedRows, Observer
from agentbench_kv.environments.locations import home
from agentbench_kv.errors import PrerequisiteError, UsageError
from agentbench_kv.methods.base import Method, Phase
from agentbench_kv.methods.calibration import Calibration, as_complex, rotate
from agentbench_kv.methods.full import Full
from agentbench_kv.phases import TokenPhases
from agentbench_kv.phases.tokens import TokenCodec, load_tokenizer
from agentbench_kv.run.spec import RunSpec
from agentbench_kv.training.micro.conversation import whole_session

logger = logging.getLogger(__name__)
MICRO = "micro/"
MICRO_SESSIONS = 8
MAX_TOKENS = 32768
MIN_TOKENS = 256


def identified(spec: RunSpec, *, make: bool = True, task: str | None = None) -> RunSpec:
    """Return a resolved spec with its calibration: the hash in it, the numbers in its method.

    A spec that names one, as a recorded one does, gets that very one. Without `make`, or where the
    task has no text of its own, a PrerequisiteError says how to make what is missing. `task` is
    another one than the spec's whose sessions are played.
    """
    method = spec.built_method
    if not method.needs_calibration or _held(method) is not None:
        return spec
    if spec.calibration:
        found = _with_hash(spec.model, spec.calibration, method)
    else:
        found = _fitting(_kept(spec.model), method, spec.model) or _of_task(
            spec, spec.task if task is None else task, make=make
        )
    named = replace(spec, calibration=found.sha256)
    vars(named)["built_method"] = method.with_calibration(found.to(pick_device(spec.device)))
    return named


def recorded(spec: RunSpec) -> RunSpec:
    """Return the spec of a run that is to be played again, with the calibration it had.

    UsageError if it does not say which: runs of version 0.1 do not.
    """
    if spec.built_method.needs_calibration and not spec.calibration:
        raise UsageError(
            f"the run of {spec.method} does not say what it was calibrated on, so it cannot be "
            "played again; run it anew with kvbench run"
        )
    return identified(spec)


def calibrated(method: Method, model: str, device: str) -> Method:
    """Give a method that needs one the calibration its user made of the model.

    For what is no run: a server has no task, so nothing is made here.
    """
    if not method.needs_calibration or _held(method) is not None:
        return method
    found = _fitting(_kept(model), method, model)
    if found is None:
        raise PrerequisiteError(
            f"method {method.label} needs a calibration of model {model}; make one from a text "
            f"like what it will read: {_command(model)} --text FILE"
        )
    return method.with_calibration(found.to(pick_device(device)))


def calibration_used(method: Method) -> dict[str, Any]:
    """Describe the calibration a run scores with, for its provenance; empty if it needs none."""
    held = _held(method)
    return {} if held is None else {"calibration": {"sha256": held.sha256, **held.meta}}


def calibration_path(model: str, task: str = "", dtype: str = "") -> Path:
    """Return where a calibration is kept: the one from the user's text, or a task's own."""
    own = "-" + re.sub(r"[^A-Za-z0-9.-]+", "_", f"{task}-{dtype}") if task else ""
    return _folder() / f"{_sha(model)[:16]}{own}.safetensors"


def make_calibration(
    model: LoadedModel, texts: Sequence[str], source: str, path: Path
) -> Calibration:
    """Calibrate a model on at most 32,768 tokens of `texts` and keep the result at `path`.

    What was there before stays beside it, for the runs it was used in.
    """
    codec = TokenCodec(load_tokenizer(model.path))
    made = calibrate(model, (codec.encode(text) for text in texts))
    digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()
    made = replace(made, meta={**made.meta, "source": source, "text_sha256": digest})
    before = _readable(path)
    try:
        if before is not None and before.sha256 != made.sha256:
            path.rename(path.with_suffix(f".{before.sha256[:12]}.safetensors"))
        made.save(path)
    except (OSError, SafetensorError) as error:
        raise PrerequisiteError(
            f"cannot write the calibration {path} ({error}); free space, or set KVBENCH_HOME to a "
            "folder that can be written"
        ) from None
    return Calibration.load(path)


def own_texts(task: str) -> list[str]:
    """Return text like a task's sessions that holds none of its samples; empty if there is none."""
    profile = PROFILES.get(task.removeprefix(MICRO)) if task.startswith(MICRO) else None
    if profile is None:
        return []
    return [whole_session(generate(train_seed(i), profile)).text for i in range(MICRO_SESSIONS)]


def calibrate_on_task(model: str, task: str, dtype: str, device: str) -> Calibration:
    """Calibrate on a task's own text, for its runs; PrerequisiteError if it has none."""
    texts = own_texts(task)
    if not texts:
        raise PrerequisiteError(
            f"task {task} writes no sessions beyond its samples to calibrate {model} on; give a "
            f"text like what the agent will read: {_command(model)} --text FILE"
        )
    path = calibration_path(model, task, dtype)
    source = f"sessions of {task} that are no samples"
    return make_calibration(load_model(model, dtype, device), texts, source, path)


def _of_task(spec: RunSpec, task: str, *, make: bool) -> Calibration:
    method = spec.built_method
    found = _kept(spec.model, task, spec.dtype)
    if found is not None and (found.covariance is not None or not method.needs_covariance):
        return _needed(found, method)
    if make or not own_texts(task):
        made = calibrate_on_task(spec.model, task, spec.dtype, spec.device)
        logger.warning(
            "calibrated model %s on %s tokens of %s (kvbench calibrate --text takes another text)",
            *(spec.model, made.meta["tokens"], made.meta["source"]),
        )
        return _needed(made, method)
    raise PrerequisiteError(
        f"{spec.method} on {task}: the id of the run depends on a calibration that is not "
        f"made yet; make it: {_command(spec.model)} --task {task} --dtype {spec.dtype}"
    )


def _needed(found: Calibration, method: Method) -> Calibration:
    """Return the part of a calibration that a method scores with, and a run names."""
    return found if method.needs_covariance else found.without_covariance()


def _fitting(found: Calibration | None, method: Method, model: str) -> Calibration | None:
    """Return what a method needs of a calibration; PrerequisiteError if it lacks some of it."""
    if found is not None and found.covariance is None and method.needs_covariance:
        raise PrerequisiteError(
            f"method {method.label} needs the covariance of queries, which the calibration of "
            f"model {model}, made by an earlier version, does not hold; make it again: "
            f"{_command(model)} --text FILE"
        )
    return None if found is None else _needed(found, method)


def _with_hash(model: str, sha256: str, method: Method) -> Calibration:
    candidates = sorted(_folder().glob(f"{_sha(model)[:16]}*.safetensors"))
    for found in map(_readable, candidates):
        if found is not None and _needed(found, method).sha256 == sha256:
            return _needed(found, method)
    raise PrerequisiteError(
        f"the run's calibration of model {model} ({sha256[:12]}) is not in {_folder()}; put its "
        f"file there, or make it again from its text, which the run's provenance names"
    )


def _kept(model: str, task: str = "", dtype: str = "") -> Calibration | None:
    """Read a calibration if there is one; one from before texts were recorded does not count."""
    path = calibration_path(model, task, dtype)
    if not path.exists():
        return None
    found = Calibration.load(path)
    if found.meta.get("model_sha") != _sha(model):
        raise PrerequisiteError(f"{path} is the calibration of another model than {model}; move it")
    if "text_sha256" in found.meta:
        return found
    logger.warning("%s does not say what text it was made from: it is not used any more", path)
    return None


def _readable(path: Path) -> Calibration | None:
    try:
        return Calibration.load(path)
    except PrerequisiteError:
        return None


def _held(method: Method) -> Calibration | None:
    return getattr(method, "calibration", None)


def _command(model: str) -> str:
    return f"kvbench calibrate --model {model}"


def _folder() -> Path:
    return home() / "calibration"


@lru_cache(maxsize=8)
def _sha(model: str) -> str:
    return model_sha(model)


def calibrate(model: LoadedModel, documents: Iterable[Sequence[int]]) -> Calibration:
    """Average a model's queries over documents of token ids, each from position 0.

    Queries are taken from attention, so after the q-norm of models that have one, and turned back
    to position 0. At most 32,768 tokens are read; what is longer
    than the model's context is cut. UsageError if there are fewer than 256.
    """
    model.attention.check_calibration("a calibration")
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
    """Sums of queries as complex pairs, of their sizes and products, in float64."""

    def __init__(self, model: LoadedModel) -> None:
        shape = (model.shape.layers, model.shape.q_heads, model.shape.head_dim // 2)
        device = model.shape.device
        self._model = model
        self._sum = torch.zeros(shape, dtype=torch.complex128, device=device)
        self._size = torch.zeros(shape, dtype=torch.float64, device=device)
        square = (*shape[:2], 2 * shape[2], 2 * shape[2])
        self._products = torch.zeros(square, dtype=torch.float64, device=device)
        self._seen = 0
        self._first = 0

    def on_rows(self, rows: FedRows) -> None:
        self._first = rows.position
        self._seen += len(rows.tokens)

    def on_attention(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> None:  # noqa: ARG002
        rows = torch.arange(query.shape[1], device=query.device)
        plain = rotate(query.float(), -(self._first + rows), self._model.frequencies)
        plain = plain / self._model.rope_scale
        pairs = as_complex(plain)
        self._products[layer] += (plain.transpose(1, 2) @ plain).double()
        self._sum[layer] += pairs.to(torch.complex128).sum(1)
        self._size[layer] += pairs.abs().double().sum(1)

    def result(self) -> Calibration:
        mean = torch.cat((self._sum.real, self._sum.imag), -1) / self._seen
        covariance = self._products / self._seen - mean[..., :, None] * mean[..., None, :]
        return Calibration(
            covariance=covariance.float(),
            mean=(self._sum / self._seen).to(torch.complex64),
            abs_mean=(self._size / self._seen).float(),
            frequencies=self._model.frequencies.float(),
            scale=self._model.rope_scale,
            meta={"model_sha": self._model.sha, "tokens": str(self._seen)},
        )
