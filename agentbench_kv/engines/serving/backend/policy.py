"""What a backend is told when it starts: the method, the model, where to write traces."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Self

from agentbench_kv.methods.base import Method
from agentbench_kv.methods.calibration import Calibration

VARIABLE = "KVBENCH_BACKEND"
"""Environment variable with the path of the policy's JSON file."""


@dataclass(frozen=True)
class Policy:
    """A backend's instructions."""

    method: Method
    model_path: Path  # folder with config and tokenizer
    control: Path  # unix socket to answer on
    trace: Path | None = None  # folder to write every event's kept positions to

    def document(self, folder: Path) -> dict[str, Any]:
        """Return a JSON object; a calibration goes to a file in `folder`."""
        return {
            "method": method_document(self.method, folder),
            "model_path": str(self.model_path),
            "control": str(self.control),
            "trace": None if self.trace is None else str(self.trace),
        }

    def save(self, folder: Path) -> Path:
        """Write the document and return its path, the value of `VARIABLE`."""
        path = folder / "policy.json"
        path.write_text(json.dumps(self.document(folder)))
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


def method_document(method: Method, folder: Path) -> dict[str, Any]:
    """Describe a method so that `method_from` builds an equal one in another process."""
    cls = type(method)
    calibration: Calibration | None = getattr(method, "calibration", None)
    path = None
    if calibration is not None:
        path = folder / f"calibration-{id(calibration):x}.safetensors"
        calibration.save(path)
    return {
        "class": f"{cls.__module__}:{cls.__qualname__}",
        "budget": method.budget,
        "share": method.share,
        "preset": method.preset,
        "settings": _plain_fields(method),
        "calibration": None if path is None else str(path),
    }


def _plain_fields(method: Method) -> dict[str, Any]:
    """Return what a method is made of, parameters or not, as far as JSON holds it."""
    given = {each.name: getattr(method, each.name) for each in fields(method) if each.init}
    kept = ("budget", "share", "preset")
    return {k: v for k, v in given.items() if k not in kept and isinstance(v, int | float | str)}


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
