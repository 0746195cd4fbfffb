"""Models that were trained for a method: which are, and on which samples they say nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentbench_kv.adapters.base import Sample
from agentbench_kv.errors import UsageError
from agentbench_kv.methods.base import Method
from agentbench_kv.methods.dropping.sidequest import TRAINED, SideQuest


def check_trained(model: str, method: Method) -> None:
    """Refuse SideQuest on a model that was not trained for it."""
    if isinstance(method, SideQuest) and not _mark(model):
        raise UsageError(
            f"model {model!r} was not trained for sidequest (no {TRAINED} in its folder); train "
            "it: kvbench train sidequest, or use --method sidequest-prompted"
        )


def refuse_trained_on(model: str, samples: Sequence[Sample]) -> None:
    """Refuse samples that a model was trained on, whatever the method."""
    known = set(_mark(model).get("samples", ()))
    seen = [sample.id for sample in samples if sample.id in known]
    if seen:
        raise UsageError(
            f"{model} was trained on {len(seen)} of these {len(samples)} samples, such as "
            f"{seen[0]}: what it does there says nothing about others; choose another --seed"
        )


def _mark(model: str) -> dict[str, Any]:
    """Return what a model's folder says of its training; empty without a word."""
    path = Path(model).expanduser() / TRAINED
    try:
        if not path.is_file():
            return {}
        found = json.loads(path.read_bytes())
        if isinstance(found, dict) and isinstance(found.get("samples"), list):
            return found
    except (OSError, ValueError, RecursionError):
        pass
    raise UsageError(f"{path} is damaged: it names no samples; train again, or take a whole copy")
