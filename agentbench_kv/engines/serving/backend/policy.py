"""What a backend is told when it starts: the method, the model, where to write traces."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Self

from agentbench_kv.methods.base import Method
from agentbench_kv.methods.calibration import Calibration
from agentbench_kv.phases.codec import TokenCodec, load_tokenizer
from agentbench_kv.phases.decoding import StopMatcher

VARIABLE = "KVBENCH_BACKEND"  # environment variable with the path of the policy's JSON file


@dataclass(frozen=True)
class Policy:
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
        return cls(
            method=method_from(document["method"]),
            model_path=Path(document["model_path"]),
            control=Path(document["control"]),
            trace=None if trace is None else Path(trace),
        )

    def with_method(self, document: dict[str, Any]) -> Policy:
        """Return the policy with another method."""
        return replace(self, method=method_from(document))

    def stop_matcher(self, document: dict[str, Any]) -> StopMatcher:
        """Return a matcher of the texts that end a generation, given as `StopMatcher.document`."""
        return StopMatcher.from_document(document, _codec(self.model_path))


def method_document(method: Method, folder: Path) -> dict[str, Any]:
    """Describe a method so that `method_from` builds an equal one in another process.

    A calibration goes to a file in `folder`.
    """
    cls = type(method)
    calibration: Calibration | None = getattr(method, "calibration", None)
    path = None
    if calibration is not None:
        path = folder / f"calibration-{id(calibration):x}.safetensors"
        calibration.save(path)
    own = ("budget", "share", "preset")
    given = {each.name: getattr(method, each.name) for each in fields(method) if each.init}
    # What a method is made of, parameters or not, as far as JSON holds it.
    settings = {k: v for k, v in given.items() if k not in own and isinstance(v, int | float | str)}
    return {
        "class": f"{cls.__module__}:{cls.__qualname__}",
        "budget": method.budget,
        "share": method.share,
        "preset": method.preset,
        "settings": settings,
        "calibration": None if path is None else str(path),
    }


def method_from(document: dict[str, Any]) -> Method:
    """Build the method of a document."""
    module, _, name = document["class"].partition(":")
    cls = getattr(import_module(module), name)
    method: Method = cls(
        budget=document["budget"],
        share=document["share"],
        preset=document["preset"],
        **document["settings"],
    )
    if document["calibration"] is not None:
        method = method.with_calibration(Calibration.load(Path(document["calibration"])))
    return method


@cache
def _codec(model_path: Path) -> TokenCodec:
    return TokenCodec(load_tokenizer(model_path))
