"""How long a context may become: what the model was trained for, less, or more by YaRN.

Qwen's publishers describe the latter for Qwen 2.5 and 3: RoPE scaled by YaRN, factor 4 at most. No
other family is known to stay itself, so others are refused.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentbench_kv.environments import home
from agentbench_kv.errors import PrerequisiteError, UsageError

_STRETCHED = ("qwen2", "qwen3", "qwen3_moe", "qwen3moe")
_MOST = 4.0
# Qwen3's 40,960 positions are 32,768 of context and 8,192 of answer; YaRN counts from the former.
_ORIGINAL = {40_960: 32_768}
_SMALLEST = 16


@dataclass(frozen=True)
class Yarn:
    """A longer context by YaRN."""

    factor: float
    original: int  # positions it counts from

    def parameters(self) -> dict[str, Any]:
        """Return what transformers, vLLM and SGLang call it."""
        return {
            "rope_type": "yarn",
            "factor": self.factor,
            "original_max_position_embeddings": self.original,
        }


def stretch(family: str, trained: int, rope_type: str, asked: int) -> Yarn | None:
    """Return how a model gets `asked` positions, None if it has them; UsageError if it cannot."""
    if asked and asked < _SMALLEST:
        raise UsageError(f"--context-limit {asked}: expected at least {_SMALLEST} tokens")
    if asked <= trained:
        return None
    if family not in _STRETCHED or rope_type not in ("default", "none"):
        what = family if family not in _STRETCHED else f"RoPE {rope_type!r}"
        raise UsageError(
            f"--context-limit {asked}: the model was trained for {trained} positions, and {what} "
            f"is not known to go further; give {trained} or less"
        )
    original = _ORIGINAL.get(trained, trained)
    if asked > _MOST * original:
        raise UsageError(
            f"--context-limit {asked}: YaRN is described up to {_MOST:g} times {original}; give "
            f"{int(_MOST * original)} or less"
        )
    return Yarn(asked / original, original)


def stretched_folder(folder: Path, asked: int) -> Path:
    """Return a model folder whose configuration has `asked` positions: `folder`, or links to it."""
    document = _document(folder)
    nested = document.get("text_config")
    config: dict[str, Any] = nested if isinstance(nested, dict) else document
    rope = rope_of(config)
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    family, trained = str(config.get("model_type")), int(config.get("max_position_embeddings", 0))
    yarn = stretch(family, trained, kind, asked)
    if yarn is None:
        return folder
    theta = rope.get("rope_theta", config.get("rope_theta"))
    config.pop("rope_scaling", None)
    config["max_position_embeddings"] = asked
    config["rope_parameters"] = yarn.parameters() | ({} if theta is None else {"rope_theta": theta})
    # Older readers look here.
    config["rope_scaling"] = config["rope_parameters"]
    return _links(folder, json.dumps(document, indent=2), asked)


def rope_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return rope if isinstance(rope, dict) else {}


def _document(folder: Path) -> dict[str, Any]:
    try:
        document = json.loads((folder / "config.json").read_text("utf-8"))
        return dict(document)
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise PrerequisiteError(f"cannot read {folder / 'config.json'}: {error}") from None


def _links(folder: Path, config: str, asked: int) -> Path:
    """Make a folder of links to a model's files, but for its configuration."""
    place = home() / "contexts"
    try:
        place.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(dir=place))
        for file in folder.resolve().iterdir():
            if file.name != "config.json":
                (draft / file.name).symlink_to(file)
        (draft / "config.json").write_text(config, "utf-8")
        digest = hashlib.sha256(f"{folder.resolve()}\n{config}".encode()).hexdigest()
        target = place / f"{folder.resolve().name}-{asked}-{digest[:12]}"
        try:
            draft.rename(target)
        except OSError:  # it is there already, perhaps in use
            shutil.rmtree(draft)
    except OSError as error:
        raise PrerequisiteError(f"cannot write {place}: {error.strerror}") from None
    return target
