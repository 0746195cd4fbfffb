"""Calibrations of models: made once, kept by model hash, found again by every run."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentbench_kv.adapters.micro.generate import PROFILES, generate, train_seed
from agentbench_kv.engines.embedded.calibrate import calibrate
from agentbench_kv.engines.embedded.model import LoadedModel, load_model
from agentbench_kv.environments.locations import home
from agentbench_kv.methods.base import Method
from agentbench_kv.methods.calibration import Calibration
from agentbench_kv.phases.tokens import TokenCodec, load_tokenizer
from agentbench_kv.training.micro.conversation import whole_session

logger = logging.getLogger(__name__)
MICRO_SESSIONS = 8
MICRO_SOURCE = "the micro task's text"


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
