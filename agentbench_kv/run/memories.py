"""Methods with a memory run on tasks that have past sessions to tell."""

from __future__ import annotations

from agentbench_kv.errors import UsageError
from agentbench_kv.methods.base import Method
from agentbench_kv.registry import load_task, names
from agentbench_kv.run.spec import RunSpec


def check_memory(spec: RunSpec) -> None:
    """Refuse a method with a memory on a task without a past: UsageError."""
    if spec.built_method.remembers and not load_task(spec.task).remembers:
        known = ", ".join(name for name in names("task") if load_task(name).remembers)
        raise UsageError(
            f"method {spec.method!r} brings back past sessions, and task {spec.task!r} has none; "
            f"use {known}"
        )


def refuse_memory(method: Method) -> None:
    """Refuse a method with a memory where nobody tells it what is past: UsageError."""
    if method.remembers:
        raise UsageError(
            f"method {method.label!r} brings back past sessions, and no client can say which; use "
            "it in kvbench run"
        )
