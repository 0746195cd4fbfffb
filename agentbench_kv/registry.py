"""Plug-in discovery: methods, engines and tasks come from entry points, ours and third parties'."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, cast

from agentbench_kv.adapters.base import Task
from agentbench_kv.engines.base import Engine
from agentbench_kv.errors import PrerequisiteError, UsageError, unknown_name
from agentbench_kv.methods.base import Method

_BASES: dict[str, type] = {"method": Method, "engine": Engine, "task": Task}
_SCORE_ARGS = ("self", "queries", "keys", "context")


def names(kind: str) -> list[str]:
    """Return the registered names of a kind: `method`, `engine` or `task`."""
    return sorted(_entry_points(kind))


def load_method(name: str) -> type[Method]:
    """Return the class registered for a method name (without preset)."""
    return cast("type[Method]", _load("method", name))


def load_engine(name: str) -> Any:
    """Return the class registered for an engine; it has a `create(options)` class method."""
    return _load("engine", name)


def load_task(name: str) -> type[Task]:
    """Return the class registered for a task."""
    return cast("type[Task]", _load("task", name))


def make_method(spec: str, budget: int | None, settings: Mapping[str, Any] | None = None) -> Method:
    """Build a method from `name` or `name@preset`, a budget and `--set` overrides.

    Raises
    ------
    UsageError
        If name, preset, parameter or value is wrong; the message says what is right.
    """
    name, _, preset = spec.partition("@")
    return load_method(name).create(preset, budget, settings)


def _entry_points(kind: str) -> dict[str, EntryPoint]:
    found = entry_points(group=f"agentbench_kv.{kind}s")
    return {point.name: point for point in found}


def _load(kind: str, name: str) -> type:
    points = _entry_points(kind)
    if not points:
        raise PrerequisiteError(
            "agentbench_kv is not installed (no entry points); install it with: pip install ."
        )
    if name not in points:
        raise unknown_name(kind, name, points)
    cls = points[name].load()
    _check(kind, name, cls)
    return cast("type", cls)


def _check(kind: str, name: str, cls: Any) -> None:
    """Refuse a plug-in that does not fulfil its contract, before anything starts."""
    base = _BASES[kind]
    if not (isinstance(cls, type) and issubclass(cls, base)):
        raise UsageError(f"{kind} {name!r} ({cls!r}) is not a subclass of {base.__name__}")
    missing = sorted(getattr(cls, "__abstractmethods__", ()))
    if missing:
        raise UsageError(f"{kind} {name!r} does not implement: {', '.join(missing)}")
    if issubclass(cls, Method):
        _check_score(name, cls)


def _check_score(name: str, cls: type[Method]) -> None:
    if cls.compresses and cls.score is Method.score and cls.select is Method.select:
        raise UsageError(
            f"method {name!r} has no score; expected score{inspect.signature(Method.score)}"
        )
    if tuple(inspect.signature(cls.score).parameters) != _SCORE_ARGS:
        raise UsageError(
            f"method {name!r} defines score{inspect.signature(cls.score)}; "
            f"expected score{inspect.signature(Method.score)}"
        )
