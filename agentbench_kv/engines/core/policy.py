"""What an engine's own process is told before it starts: the method, the model, where to answer."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from agentbench_kv.methods.base import Method
from agentbench_kv.methods.calibration import Calibration
from agentbench_kv.phases.tokens import StopMatcher, TokenCodec, load_tokenizer

VARIABLE = "KVBENCH_BACKEND"  # environment variable with the path of the policy's JSON file


@dataclass(frozen=True)
class BackendPolicy:
    """A backend's instructions."""

    method: Method
    model_path: Path  # folder with config and tokenizer
    control: Path  # Unix socket to answer on
    trace: Path | None = None  # folder to write every event's kept positions to

    def save(self, folder: Path) -> Path:
        """Write the policy, and a calibration it has; return its path, the value of `VARIABLE`."""
        document = {
            "method": method_document(self.method, folder),
            "model_path": str(self.model_path),
            "control": str(self.control),
            "trace": None if self.trace is None else str(self.trace),
        }
        path = folder / "policy.json"
        path.write_text(json.dumps(document))
        return path

    @classmethod
    def load(cls) -> Self:
        """Read the policy this process was started with; KeyError if it was not."""
        document = json.loads(Path(os.environ[VARIABLE]).read_text())
        trace = document["trace"]
        paths = (Path(document["model_path"]), Path(document["control"]))
        return cls(method_from(document["method"]), *paths, None if trace is None else Path(trace))

    def with_method(self, document: dict[str, Any]) -> BackendPolicy:
        return replace(self, method=method_from(document))

    def stop_matcher(self, document: dict[str, Any]) -> StopMatcher:
        """Return a matcher of the texts that end a generation, given as `StopMatcher.document`."""
        return StopMatcher.from_document(document, _codec(self.model_path))


_SIZE = ("budget", "share", "preset")  # fields of every method, beside its settings


def method_document(method: Method, folder: Path) -> dict[str, Any]:
    """Describe a method for another process; a calibration goes to a file in `folder`."""
    cls = type(method)
    calibration: Calibration | None = getattr(method, "calibration", None)
    path = None
    if calibration is not None:
        path = folder / f"calibration-{id(calibration):x}.safetensors"
        calibration.save(path)
    given = {each.name: getattr(method, each.name) for each in fields(method) if each.init}
    # What a method is made of, parameters or not, as far as JSON holds it.
    settings = {
        k: v for k, v in given.items() if k not in _SIZE and isinstance(v, int | float | str)
    }
    return {
        "class": f"{cls.__module__}:{cls.__qualname__}",
        **{name: getattr(method, name) for name in _SIZE},
        "settings": settings,
        "calibration": None if path is None else str(path),
    }


def method_from(document: dict[str, Any]) -> Method:
    module, _, name = document["class"].partition(":")
    cls = getattr(import_module(module), name)
    size = {name: document[name] for name in _SIZE}
    method: Method = cls(**size, **document["settings"])
    if document["calibration"] is not None:
        method = method.with_calibration(Calibration.load(Path(document["calibration"])))
    return method


@cache
def _codec(model_path: Path) -> TokenCodec:
    return TokenCodec(load_tokenizer(model_path))


def rope_frequencies(policy: BackendPolicy) -> Tensor:
    """Return inverse frequencies [head_dim / 2], float32, by which keys would turn.

    Of a decoder with standard RoPE; none where a config gives none and keys stay where they are.
    A backend may be given another method later, so they are read whatever the method.
    """
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config: Any = AutoConfig.from_pretrained(policy.model_path, local_files_only=True)
    try:
        frequencies: Tensor = LlamaRotaryEmbedding(config).inv_freq
    except Exception:
        if policy.method.positions == "cache":
            raise
        return torch.empty(0)
    return frequencies
