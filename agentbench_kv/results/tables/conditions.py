"""What a task was run with and its name does not say: route, corpus, encoder, simulated user."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentbench_kv.results.tables.measured import Measured

__all__ = ["conditions"]

SHOWN = ("route", "web", "encoder", "corpus", "user", "user_model", "judge", "ingest")
"""Keys of a task's provenance or settings that a reader must see beside its scores."""


def conditions(runs: Sequence[Measured]) -> list[str]:
    """Return a line for each condition of a cell's runs; runs that differ in one are told apart."""
    lines = []
    for name in SHOWN:
        values = sorted({value for run in runs if (value := _value(run, name))})
        if values:
            lines.append(f"{name.replace('_', ' ')}: {'; '.join(values)}")
    return lines


def _value(run: Measured, name: str) -> str:
    task = run.arm.info.provenance.get("task")
    recorded = task.get(name) if isinstance(task, Mapping) else None
    settings = run.arm.spec.get("task_params")
    given = settings.get(name) if isinstance(settings, Mapping) else None
    return _words(given if recorded is None else recorded)


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        name = value.get("name") or value.get("model") or ""
        parts = [str(name), str(value.get("sha256", ""))[:12]]
        words = "@".join(part for part in parts if part)
        return f"{words} (synthetic)" if value.get("synthetic") else words
    return "" if value is None else str(value)
