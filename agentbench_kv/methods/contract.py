"""What registration asks of a method class, so that a mistake shows before anything starts."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import MISSING, fields

from agentbench_kv.errors import UsageError
from agentbench_kv.methods.base import Method
from agentbench_kv.methods.spans import SpanMethod
from agentbench_kv.params import ParamSpec, param_specs, parse_settings

HOOKS = "score select recent_kept budget_at query_plan validate with_calibration"
TEXTS = ("name", "summary", "source", "default_preset")
FLAGS = (
    "compresses",
    "ordered",
    "treats_heads_alike",
    "needs_calibration",
    "needs_covariance",
    "offline",
    "spans",
    "messages",
)
_LATER = frozenset({"system"})  # arguments that plug-ins may not have: they came after 0.1
CLASS_ATTRIBUTES = (*TEXTS, *FLAGS, "presets")
PARAM_TYPES = (int, float, str)
DECORATOR = "@dataclass(frozen=True, kw_only=True)"


def contract_problem(cls: type[Method]) -> str:
    """Return what is wrong with a method class, to be read after its name; empty if nothing."""
    checks = (_no_score, _hooks, _attributes, _fields, _parameters, _presets)
    return next(filter(None, (check(cls) for check in checks)), "")


def expected_score() -> str:
    """Return `score` with its arguments, as a method must define it."""
    return _spelled("score", Method)


def _spelled(hook: str, cls: type) -> str:
    return f"{hook}{inspect.signature(getattr(cls, hook))}".replace("'", "")


def _no_score(cls: type[Method]) -> str:
    if issubclass(cls, SpanMethod):
        return "has no sessions" if cls.sessions is SpanMethod.sessions else ""
    if cls.compresses and cls.score is Method.score and cls.select is Method.select:
        return f"has no score; expected {expected_score()}"
    return ""


def _hooks(cls: type[Method]) -> str:
    """Check that what a class overrides takes what the base and the engines call it with."""
    for hook in HOOKS.split():
        if not callable(getattr(cls, hook)):
            return f"has a {hook} that is no function; expected {_spelled(hook, Method)}"
        own, expected = (inspect.signature(getattr(c, hook)) for c in (cls, Method))
        needed = [name for name in expected.parameters if name not in _LATER]
        if list(own.parameters) not in (needed, list(expected.parameters)):
            return f"defines {_spelled(hook, cls)}; expected {_spelled(hook, Method)}"
    if callable(inspect.getattr_static(cls, "per_query_head")):
        return "defines per_query_head as a function; put @property above it"
    return ""


def _attributes(cls: type[Method]) -> str:
    declared = {f.name for f in fields(cls)} & set(CLASS_ATTRIBUTES)
    if declared:
        name = min(declared)
        return f"declares {name} as a field; annotate it as {name}: ClassVar[...]"
    for names, kind, words in ((TEXTS, str, "text"), (FLAGS, bool, "True or False")):
        for name in names:
            if not isinstance(getattr(cls, name), kind):
                return f"has {name} = {getattr(cls, name)!r}; expected {words}"
    return "" if cls.name else "has no name; set name: ClassVar[str] = '...'"


def _fields(cls: type[Method]) -> str:
    lost = _lost_fields(cls)
    if lost:
        return f"declares {lost} but is no dataclass of its own; put {DECORATOR} above it"
    for each in fields(cls):
        if not each.kw_only:
            return f"takes {each.name} by position; put {DECORATOR} above it"
        if each.default is MISSING and each.default_factory is MISSING:
            return f"has no default for {each.name}; write {each.name}: ... = param(DEFAULT, DOC)"
    return ""


def _lost_fields(cls: type[Method]) -> str:
    """Return the first annotated field of a class that nothing made a dataclass."""
    for base in cls.__mro__:
        if not issubclass(base, Method) or "__dataclass_params__" in vars(base):
            continue
        for name, annotation in inspect.get_annotations(base).items():
            if "ClassVar" not in str(annotation):
                return name
    return ""


def _parameters(cls: type[Method]) -> str:
    # Text, whether the module postpones annotations or not.
    annotations = {
        f.name: f.type if isinstance(f.type, str) else getattr(f.type, "__name__", "")
        for f in fields(cls)
    }
    for spec in param_specs(cls).values():
        problem = _parameter(spec, annotations[spec.name])
        if problem:
            return f"has parameter {spec.name} {problem}"
    return ""


def _parameter(spec: ParamSpec, annotated: str) -> str:
    """Say why no `--set` could give a parameter its own default, or empty."""
    if spec.type not in PARAM_TYPES:
        return f"= {spec.default!r}; expected an int, a float or a str (on and off as text)"
    if annotated in ("int", "float", "str", "bool") and annotated != spec.type.__name__:
        return f"of type {annotated} with default {spec.default!r}, a {spec.type.__name__}"
    try:
        spec.parse(spec.default)
    except UsageError as error:
        return f"with a default it does not allow: {error}"
    return ""


def _presets(cls: type[Method]) -> str:
    presets = cls.presets
    if not isinstance(presets, Mapping):
        return f"has presets = {presets!r}; expected a mapping of names to settings"
    for preset, values in presets.items():
        if not isinstance(values, Mapping):
            return f"has preset {preset!r} = {values!r}; expected a mapping of settings"
        try:
            parse_settings(cls.name, cls, values)
        except UsageError as error:
            return f"has preset {preset!r} with wrong settings: {error}"
    if cls.default_preset and cls.default_preset not in presets:
        known = ", ".join(presets) or "none"
        return f"has default_preset {cls.default_preset!r}, which is not among its presets: {known}"
    return ""
