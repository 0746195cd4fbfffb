"""Models that were trained for a method: which are, and on which samples they say nothing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentbench_kv.adapters.base import Sample
from agentbench_kv.adapters.probe.questions import session_of
from agentbench_kv.errors import UsageError
from agentbench_kv.methods.base import Method
from agentbench_kv.methods.dropping.sidequest import TRAINED, SideQuest

# Samples by the name of their task; those of which nobody knows the task by an empty name.
TrainedOn = dict[str, list[str]]

_PROBES = "probe/"  # questions about the sessions of another task
_FILE = "file"  # a probe of sessions of any task


def check_trained(model: str, method: Method) -> None:
    """Refuse SideQuest on a model that was not trained for it."""
    if isinstance(method, SideQuest) and not _mark(model):
        raise UsageError(
            f"model {model!r} was not trained for sidequest (no {TRAINED} in its folder); train "
            "it: kvbench train sidequest, or use --method sidequest-prompted"
        )


def refuse_trained_on(model: str, task: str, samples: Sequence[Sample]) -> None:
    """Refuse samples of a task that a model was trained on, whatever the method."""
    known = {
        sample
        for name, found in trained_on(model).items()
        if _may_be_one(name, task)
        for sample in found
    }
    seen = [sample.id for sample in samples if session_of(sample.id) in known]
    if seen:
        raise UsageError(
            f"{model} was trained on {len(seen)} of these {len(samples)} samples, such as "
            f"{seen[0]}: what it does there says nothing about others; choose another --seed"
        )


def trained_on(model: str) -> TrainedOn:
    """Return the samples that a model's folder says it was trained on; none without a word."""
    mark = _mark(model)
    # Marks from before tasks were kept have a list alone.
    found: TrainedOn = mark.get("trained_on", {"": mark.get("samples", [])})
    return found


def joined(*parts: Mapping[str, Iterable[str]]) -> TrainedOn:
    """Return all samples of several trainings."""
    found: dict[str, set[str]] = {}
    for part in parts:
        for task, samples in part.items():
            found.setdefault(task, set()).update(map(session_of, samples))
    return {task: sorted(samples) for task, samples in sorted(found.items()) if samples}


def _may_be_one(one: str, other: str) -> bool:
    """Whether two tasks may hold the same sessions: a probe those of the task it asks about."""
    names = [name.removeprefix(_PROBES) for name in (one, other)]
    if not one or _FILE in names:
        return True
    short, long = sorted(names, key=len)
    return long == short or long.startswith(f"{short}/")


def _mark(model: str) -> dict[str, Any]:
    """Return what a model's folder says of its training; empty without a word."""
    from agentbench_kv.engines.embedded.model import SHIPPED, model_path

    path = (model_path(model) if model in SHIPPED else Path(model).expanduser()) / TRAINED
    try:
        if not path.is_file():
            return {}
        found = json.loads(path.read_bytes())
        if isinstance(found, dict) and _lists(found.get("samples"), found.get("trained_on", {})):
            return found
    except (OSError, ValueError, RecursionError):
        pass
    raise UsageError(f"{path} is damaged: it names no samples; train again, or take a whole copy")


def _lists(samples: Any, by_task: Any) -> bool:
    parts = [samples, *(by_task.values() if isinstance(by_task, dict) else [None])]
    return all(isinstance(p, list) and all(isinstance(s, str) for s in p) for p in parts)
