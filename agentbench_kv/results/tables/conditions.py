"""What a task was run with and its name does not say: route, corpus, encoder, simulated user."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from agentbench_kv.results.runs import Run

SHOWN = ("route", "web", "encoder", "corpus", "user", "user_model", "judge", "ingest")
"""Keys of a task's provenance or settings that a reader must see beside its scores."""


def conditions(runs: Iterable[Run]) -> list[str]:
    """Return a line for each condition of some runs, with all values it has among them."""
    known = list(runs)
    lines = []
    for name in SHOWN:
        values = sorted({value for run in known if (value := _value(run, name))})
        if values:
            lines.append(f"{name.replace('_', ' ')}: {'; '.join(values)}")
    return lines


def _value(run: Run, name: str) -> str:
    task = run.info.provenance.get("task")
    recorded = task.get(name) if isinstance(task, Mapping) else None
    settings = run.spec.get("task_params")
    given = settings.get(name) if isinstance(settings, Mapping) else None
    value = given if recorded is None else recorded
    if isinstance(value, Mapping):
        parts = (
            str(value.get("name") or value.get("model") or ""),
            str(value.get("sha256", ""))[:12],
        )
        words = "@".join(filter(None, parts))
        return f"{words} (synthetic)" if value.get("synthetic") else words
    return "" if value is None else str(value)
