"""Plug-in discovery: methods, engines and tasks come from entry points, ours and third parties'."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, cast

from agentbench_kv.adapters.base import Task
from agentbench_kv.budget import Budget
from agentbench_kv.engines.base import Engine
from agentbench_kv.errors import KVBenchError, PrerequisiteError, UsageError, unknown_name
from agentbench_kv.methods.base import Method
from agentbench_kv.methods.contract import contract_problem, expected_score
from agentbench_kv.methods.kvpress import PREFIX as KVPRESS
from agentbench_kv.methods.kvpress import press_method

_BASES: dict[str, type] = {"method": Method, "engine": Engine, "task": Task}


def names(kind: str) -> list[str]:
    """Return the registered names of a kind: `method`, `engine` or `task`."""
    return sorted(_entry_points(kind))


def distribution(kind: str, name: str) -> str | None:
    """Return name and version of the distribution that registers a name; None if none does."""
    point = _entry_points(kind).get(name)
    found = point.dist if point else None
    return f"{found.name} {found.version}" if found else None


def load_method(name: str) -> type[Method]:
    """Return the class of a method name without preset: registered, or `kvpress:PRESS(...)`.

    Raises
    ------
    UsageError, PrerequisiteError
        If there is none, it does not import or it does not fulfil the contract.
    """
    if name.startswith(KVPRESS):
        return press_method(name.removeprefix(KVPRESS))
    return cast("type[Method]", _load("method", name))


def load_class(spec: str) -> type[Method]:
    """Return the class of a method by its name, or at a path `package.module:Class`.

    A path need not be installed; it is looked for in the current folder too.

    Raises
    ------
    UsageError
        If there is no such method, module or class, or if it does not fulfil the contract.
    """
    module, separator, name = spec.partition(":")
    if not separator or spec.startswith(KVPRESS):
        return load_method(spec)
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    found = _imported(f"import {module!r}", lambda: import_module(module))
    if not hasattr(found, name):
        classes = [key for key, value in vars(found).items() if isinstance(value, type)]
        raise unknown_name(f"class in {module}:", name, classes)
    _check("method", spec, getattr(found, name))
    return cast("type[Method]", getattr(found, name))


def load_engine(name: str) -> Any:
    """Return the class registered for an engine; it has a `create(options)` class method."""
    return _load("engine", name)


def load_task(name: str) -> type[Task]:
    """Return the class registered for a task."""
    return cast("type[Task]", _load("task", name))


def make_method(
    spec: str, budget: Budget | int | str | None, settings: Mapping[str, Any] | None = None
) -> Method:
    """Build a method from `name`, `name@preset` or `kvpress:PRESS(...)`, a budget and settings.

    Settings of its own follow a name after commas, `name@preset,key=value`, and come before those
    that are given.

    Raises
    ------
    UsageError
        If name, preset, parameter or value is wrong; the message says what is right.
    """
    chosen, own = split_settings(spec)
    # A press has no presets, and its arguments may hold any text.
    name, _, preset = (spec, "", "") if spec.startswith(KVPRESS) else chosen.partition("@")
    return load_method(name).create(preset, budget, {**(settings or {}), **own})


def split_settings(spec: str) -> tuple[str, dict[str, str]]:
    """Split `name@preset,key=value,...` into `name@preset` and settings.

    A kvpress press keeps its commas. UsageError for what is no setting.
    """
    if spec.startswith(KVPRESS):
        return spec, {}
    name, *pairs = spec.split(",")
    settings = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise UsageError(f"--method {spec}: expected METHOD,KEY=VALUE, found {pair!r}")
        settings[key] = value
    return name, settings


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
    cls = _imported(f"load {kind} {name!r}", points[name].load)
    _check(kind, name, cls)
    return cast("type", cls)


def _imported(what: str, load: Callable[[], Any]) -> Any:
    """Run somebody's module; whatever it raises becomes one line."""
    try:
        return load()
    except KVBenchError:
        raise
    except Exception as error:
        raise UsageError(f"cannot {what}: {type(error).__name__}: {error}") from error


def _check(kind: str, name: str, cls: Any) -> None:
    """Refuse a plug-in that does not fulfil its contract, before anything starts."""
    base = _BASES[kind]
    if not (isinstance(cls, type) and issubclass(cls, base)):
        needs = f"; expected a class with {expected_score()}" if base is Method else ""
        raise UsageError(f"{kind} {name!r} ({cls!r}) is not a subclass of {base.__name__}{needs}")
    missing = sorted(getattr(cls, "__abstractmethods__", ()))
    if missing:
        raise UsageError(f"{kind} {name!r} does not implement: {', '.join(missing)}")
    if issubclass(cls, Method):
        _check_method(name, cls)


def _check_method(name: str, cls: type[Method]) -> None:
    problem = contract_problem(cls)
    if problem:
        raise UsageError(f"method {name!r} {problem}")
    # Records hold a method under its own name, and a run is built again from its record.
    if ":" not in name and cls.name != name:
        raise UsageError(f"method {name!r} calls itself {cls.name!r}; the entry point must agree")
