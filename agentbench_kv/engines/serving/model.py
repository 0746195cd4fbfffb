"""What a Hugging Face model folder says about the model, read without its weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentbench_kv.errors import PrerequisiteError

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class ModelFacts:
    """Shapes and limits of a decoder."""

    family: str
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    context_limit: int  # last position + 1
    eos_token_ids: tuple[int, ...]

    def bytes_per_token(self, dtype: str) -> int:
        """Return bytes of keys and values of one token, all layers and heads."""
        return 2 * self.layers * self.kv_heads * self.head_dim * _BYTES[dtype]


def read_model(path: Path) -> ModelFacts:
    """Read a model folder's config; PrerequisiteError if it lacks what a decoder's config has."""
    config = _json(path / "config.json")
    try:
        heads = int(config["num_attention_heads"])
        return ModelFacts(
            family=str(config["model_type"]),
            layers=int(config["num_hidden_layers"]),
            q_heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or int(config["hidden_size"]) // heads),
            context_limit=int(config["max_position_embeddings"]),
            eos_token_ids=_eos_ids(path, config),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise PrerequisiteError(
            f"{path / 'config.json'} is not a decoder's ({error}); give a Hugging Face model folder"
        ) from None


def _eos_ids(path: Path, config: dict[str, Any]) -> tuple[int, ...]:
    generation = path / "generation_config.json"
    found = _json(generation).get("eos_token_id") if generation.exists() else None
    found = config.get("eos_token_id") if found is None else found
    if found is None:
        return ()
    return tuple(found) if isinstance(found, list) else (int(found),)


def _json(path: Path) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise PrerequisiteError(f"cannot read {path}: {error}; give a model folder") from None
    return document
