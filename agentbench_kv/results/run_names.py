"""What runs and their transcripts are called."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from agentbench_kv.errors import UsageError

_UNSAFE = re.compile(r"[^A-Za-z0-9._@+-]+")
_PART_LENGTH = 40
_PREFIX_LENGTH = 160


def prefix_parts(spec: Mapping[str, Any]) -> list[str]:
    """Return what a run is called for people: task, method, budget, model name, seed."""
    budget = spec.get("budget")
    return [
        str(spec.get("task", "task")),
        str(spec.get("method", "method")),
        "bnone" if budget is None else f"b{budget}".replace("%", "pct"),
        str(spec.get("model", "model")).rstrip("/").rsplit("/", 1)[-1],
        f"s{spec.get('seed', 0)}",
    ]


def run_id(parts: Sequence[str], spec: Mapping[str, Any]) -> str:
    """Name a run: readable parts, then 10 hex digits of the SHA-256 of the spec as canonical JSON.

    The same spec gives the same name in every process and on every machine, whatever the order
    of its keys; so the same command finds its own directory. `parts` are words for people, see
    `prefix_parts`. A UsageError if the spec holds something JSON has no exact form for.
    """
    try:
        canonical = json.dumps(spec, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UsageError(f"the spec cannot be written as JSON: {error}") from error
    safe = [_UNSAFE.sub("_", part).strip("._-")[:_PART_LENGTH] for part in parts]
    prefix = "-".join(part for part in safe if part)[:_PREFIX_LENGTH] or "run"
    return f"{prefix}-{hashlib.sha256(canonical.encode()).hexdigest()[:10]}"


def transcript_name(sample_id: str, trial: int) -> str:
    """Return the path of a trial's transcript; a hash keeps sample ids apart that look alike."""
    slug = re.sub(r"[^A-Za-z0-9._-]+", "_", sample_id).strip("._")[:80] or "sample"
    digest = hashlib.sha256(sample_id.encode("utf-8", "replace")).hexdigest()
    return f"transcripts/{slug}-{digest[:8]}-t{trial}.json"
