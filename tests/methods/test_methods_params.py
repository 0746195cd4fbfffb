"""What a user can get wrong: presets, parameters, values, budgets, plug-in signatures."""

# ruff: noqa: ARG002  plug-in methods below have the contract's arguments

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from agentbench_kv import registry
from agentbench_kv.errors import UsageError
from agentbench_kv.methods.base import Method
from agentbench_kv.registry import load_method, make_method


def message(spec, budget, **settings):
    """The line a user sees."""
    with pytest.raises(UsageError) as caught:
        make_method(spec, budget, settings)
    line = str(caught.value)
    assert line
    assert "\n" not in line
    return line


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("agentkw", "agentkv"), ("snap-kv", "snapkv"), ("streaming", "streamingllm")],
)
def test_unknown_method_names_the_near_match(typed, meant):
    assert f"{meant!r}" in message(typed, 512)


def test_unknown_preset_names_the_near_match():
    assert "'kvpress'" in message("snapkv@kvpres", 512)
    assert "'paper'" in message("agentkv@papers", 512)


def test_unknown_preset_without_a_near_match_lists_what_exists():
    line = message("snapkv@zzz", 512)
    assert "kvpress" in line
    assert "rkv" in line


@pytest.mark.parametrize(
    ("spec", "typed", "meant"),
    [
        ("agentkv", "representative", "representatives"),
        ("agentkv", "droph_phase", "drop_phase"),
        ("snapkv", "windo", "window"),
        ("streamingllm", "sink", "sinks"),
    ],
)
def test_unknown_parameter_names_the_near_match(spec, typed, meant):
    assert f"{meant!r}" in message(spec, 512, **{typed: "1"})


def test_a_rare_parameter_is_recorded_where_it_is_set():
    """Runs and submissions made before it was there stay the same runs."""
    plain = make_method("agentkv", 64)
    assert "closing" not in plain.settings()
    assert make_method("agentkv", 64, {"closing": "own"}).settings() == plain.settings()
    changed = make_method("agentkv", 64, {"closing": "next"})
    assert changed.settings() == {**plain.settings(), "closing": "next"}
    assert make_method("agentkv", 64, changed.settings()) == changed
    assert (plain.closing_markers, changed.closing_markers) == ("own", "next")


@pytest.mark.parametrize("spec", ["snapkv@kvpres", "agentkv"])
def test_unknown_names_point_to_a_command_that_exists(spec):
    """There are `kvbench ls methods|engines|tasks`, no `ls agentkv parameters`."""
    settings = {} if "@" in spec else {"gq": "mean_prob"}
    line = message(spec, 512, **settings)
    assert "kvbench ls agentkv" not in line
    assert "kvbench ls snapkv" not in line


@pytest.mark.parametrize(
    ("spec", "key", "value"),
    [
        ("agentkv", "interval", "0"),
        ("agentkv", "interval", "-3"),
        ("agentkv", "interval", "1.5"),
        ("agentkv", "interval", "many"),
        ("agentkv", "interval", ""),
        ("agentkv", "trigger", "sometimes"),
        ("agentkv", "kept_set", "all"),
        ("agentkv", "gqa", "mean"),
        ("agentkv", "drop_phase", "thinking"),
        ("agentkv", "representatives", "30"),
        ("agentkv", "representatives", "0"),
        ("agentkv", "sinks", "-1"),
        ("agentkv", "keep_recent", "-1"),
        ("agentkv", "positions", "paged"),
        ("snapkv", "window", "0"),
        ("snapkv", "kernel", "4"),
        ("snapkv", "kernel", "-1"),
        ("snapkv", "pool", "median"),
        ("snapkv", "columns", "some"),
    ],
)
def test_wrong_value_is_named_with_what_is_right(spec, key, value):
    line = message(spec, 512, **{key: value})
    assert key in line
    assert "expected" in line


def test_typed_values_that_are_not_whole_are_refused():
    assert "interval" in message("agentkv", 512, interval=1.5)


@pytest.mark.parametrize("value", [None, True])
def test_typed_values_of_another_type_are_refused(value):
    assert "interval" in message("agentkv", 512, interval=value)


@pytest.mark.parametrize("spec", ["agentkv", "snapkv", "streamingllm"])
@pytest.mark.parametrize("budget", [None, 0, -5])
def test_missing_or_empty_budget_is_refused(spec, budget):
    assert "budget" in message(spec, budget)


@pytest.mark.parametrize(
    ("spec", "settings", "always"),
    [
        ("streamingllm", {}, 4),
        ("snapkv@rkv", {}, 32),
        ("snapkv@kvpress", {}, 64),
        ("agentkv", {}, 8),
        ("agentkv@paper", {"sinks": "3", "keep_recent": "9"}, 12),
        ("snapkv@rkv", {"keep_recent": "40", "sinks": "4"}, 44),
    ],
)
def test_budget_must_be_above_what_is_always_kept(spec, settings, always):
    line = message(spec, always, **settings)
    assert str(always) in line
    assert "--budget" in line
    assert make_method(spec, always + 1, settings).budget == always + 1


def test_values_from_the_command_line_are_typed():
    method = make_method("agentkv", 512, {"interval": "64", "gqa": "max_prob"})
    assert (method.interval, method.gqa) == (64, "max_prob")


def test_settings_override_the_preset():
    method = make_method("snapkv@kvpress", 512, {"window": "16"})
    assert (method.window, method.kernel) == (16, 5)


def test_settings_report_every_parameter():
    method = make_method("agentkv", 512)
    known = type(method).parameters()
    rare = {name for name, spec in known.items() if spec.rare}
    assert set(method.settings()) == known.keys() - rare
    # What was added after 0.1 is recorded where it is set, so that older runs keep their ids.
    assert "chunk" in rare
    chunked = make_method("agentkv", 512, {"chunk": 4})
    assert chunked.settings() == {**method.settings(), "chunk": 4}
    assert make_method("agentkv", 512, method.settings()) == method


@pytest.mark.parametrize(
    ("spec", "label"),
    [
        ("agentkv", "agentkv"),
        ("agentkv@default", "agentkv"),
        ("agentkv@paper", "agentkv@paper"),
        ("snapkv@rkv", "snapkv"),
        ("snapkv@kvpress", "snapkv@kvpress"),
    ],
)
def test_label_names_the_preset_unless_it_is_the_default(spec, label):
    assert make_method(spec, 512).label == label


def test_methods_are_immutable():
    with pytest.raises(AttributeError):
        make_method("agentkv", 512).budget = 3


# -- third-party methods


@dataclass(frozen=True, kw_only=True)
class Good(Method):
    name: ClassVar[str] = "third"

    def score(self, queries, keys, context):
        return context.positions.float()


class WrongNames(Good):
    def score(self, q, k, ctx):
        return ctx.positions.float()


class TooFew(Good):
    def score(self, queries, keys):
        return keys[..., 0]


class NotAMethod:
    pass


class Point:
    """A stand-in for an entry point."""

    def __init__(self, name: str, target: Any) -> None:
        self.name, self._target = name, target

    def load(self) -> Any:
        return self._target


@pytest.fixture
def plug_in(monkeypatch):
    """Register `target` as the method `third`."""

    def register(target):
        monkeypatch.setattr(registry, "entry_points", lambda **_: [Point("third", target)])

    return register


def test_third_party_method_loads(plug_in):
    plug_in(Good)
    assert load_method("third") is Good
    assert make_method("third", 16).budget == 16


@pytest.mark.parametrize("cls", [WrongNames, TooFew])
def test_third_party_score_of_another_signature_is_refused(plug_in, cls):
    plug_in(cls)
    with pytest.raises(UsageError, match=r"'third' defines score\(self.*expected score\(self, q"):
        load_method("third")


@pytest.mark.parametrize("target", [NotAMethod, Good(), 3])
def test_third_party_target_that_is_no_method_class_is_refused(plug_in, target):
    plug_in(target)
    with pytest.raises(UsageError, match=r"'third'.*not a subclass of Method"):
        load_method("third")


def test_third_party_method_without_score_is_refused(plug_in):
    """A compressing method that forgot `score` must not fail in the middle of a run."""

    @dataclass(frozen=True, kw_only=True)
    class NoScore(Method):
        name: ClassVar[str] = "no-score"

    plug_in(NoScore)
    with pytest.raises(UsageError, match="score"):
        load_method("third")


def test_a_number_that_is_too_large_is_told_the_largest() -> None:
    with pytest.raises(UsageError, match=r"expected an integer >= 1 and <= 9\.22337e\+18$"):
        make_method("memart", None, {"topk": str(10**21)})
    with pytest.raises(UsageError, match=r"expected an integer >= 1$"):
        make_method("memart", None, {"topk": "0"})
