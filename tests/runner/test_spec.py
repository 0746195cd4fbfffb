"""Specs: names of runs, seeds of trials, the grid."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest

from agentbench_kv.budget import Budget
from agentbench_kv.errors import UsageError
from agentbench_kv.registry import load_method, make_method
from agentbench_kv.run.spec import RunSpec, default_methods, grid, resolve

SpecOf = Callable[..., RunSpec]
BASE = RunSpec(
    engine="embedded", model="micro", method="agentkv", budget=64, task="micro/recall-1k"
)


def other(value: Any) -> Any:
    """Return another value of the same kind."""
    if isinstance(value, str):
        return f"{value}x"
    if isinstance(value, dict):
        return {**value, "x": 1}
    if isinstance(value, Budget):
        return Budget(share=0.5)
    return 7 if value is None else value + 1


@pytest.mark.parametrize("name", [field.name for field in fields(RunSpec)])
def test_every_field_is_in_the_run_id(name: str) -> None:
    assert replace(BASE, **{name: other(getattr(BASE, name))}).id != BASE.id


def test_trial_seeds_depend_on_what_is_played_and_nothing_else() -> None:
    seed = BASE.trial_seed("a", 1)
    differ = [
        BASE.trial_seed("b", 1),
        BASE.trial_seed("a", 2),
        replace(BASE, seed=1).trial_seed("a", 1),
        replace(BASE, task="micro/recall-5k").trial_seed("a", 1),
    ]
    assert len({seed, *differ}) == 5
    same = {"method": "snapkv", "budget": 128, "engine": "scripted", "model": "gold", "trials": 9}
    assert {replace(BASE, **{k: v}).trial_seed("a", 1) for k, v in same.items()} == {seed}
    # What 31-bit samplers elsewhere can take.
    assert all(0 <= BASE.trial_seed(str(i), 0) < 2**31 for i in range(64))


def test_a_spec_is_what_it_records() -> None:
    for size in (64, "64", "1.5k", "25%", Budget(share=0.07), None):
        method = "full" if size is None else "snapkv"
        spec = resolve(replace(BASE, method=method, budget=size), {})
        assert RunSpec(**spec.document()) == spec
        assert RunSpec(**spec.document()).id == spec.id
    assert replace(BASE, budget="64") == BASE
    assert replace(BASE, budget="64").id == BASE.id == replace(BASE, budget=Budget(64)).id
    assert replace(BASE, budget="25.0%").document()["budget"] == "25%"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": 7}, r"damaged \(model: Expected `str`, got `int`\): take a whole copy"),
        ({"limit": "x"}, r"damaged \(limit: Expected `int \| null`"),
        ({"budget": {}}, "budget '{}': expected a number of tokens"),
        ({"later": 1}, "the run's spec has later, which this version"),
    ],
)
def test_a_damaged_record_is_no_spec(change: dict[str, Any], message: str) -> None:
    whole = replace(BASE, engine_args={"a": "b"}, temperature=0).document()
    assert RunSpec.of(whole).document() == whole
    with pytest.raises(UsageError, match=message):
        RunSpec.of({**whole, **change})
    for name in ("engine", "model", "method", "budget", "task"):
        with pytest.raises(UsageError, match=f"missing required field `{name}`"):
            RunSpec.of({key: value for key, value in whole.items() if key != name})


def test_a_run_builds_its_method_once(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []

    def make(name: str, *more: Any) -> Any:
        built.append(name)
        return make_method(name, *more)

    monkeypatch.setattr("agentbench_kv.run.spec.make_method", make)
    spec = resolve(BASE, {"interval": "32"})
    assert spec.built_method == make_method("agentkv", 64, {"interval": 32})
    assert spec.built_method is spec.built_method
    assert built == ["agentkv"]
    assert RunSpec(**spec.document()).built_method == spec.built_method


def test_a_resolved_spec_says_everything() -> None:
    full = resolve(replace(BASE, method="full"), {})
    assert (full.budget, full.params) == (None, {})
    cut = resolve(replace(BASE, method="snapkv"), {"interval": "32"})
    assert cut.params["interval"] == 32
    known = load_method("snapkv").parameters()
    assert set(cut.params) == {name for name, spec in known.items() if not spec.rare}
    default = f"snapkv@{load_method('snapkv').default_preset}"
    assert resolve(replace(BASE, method=default), {"interval": "32"}) == cut
    assert resolve(replace(BASE, limit=1, trials=1, concurrency=1, max_tokens=1), {}).limit == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task": "micro/recall-9k"}, "unknown task"),
        ({"engine": "embeded"}, "unknown engine"),
        ({"trials": 0}, "trials 0: expected at least 1"),
        ({"concurrency": 0}, "concurrency 0: expected at least 1"),
        ({"max_tokens": 0}, "max_tokens 0: expected at least 1"),
        ({"limit": 0}, "limit 0: expected at least 1 sample"),
        ({"temperature": -1.0}, "temperature -1.0: expected 0 to 100"),
        ({"temperature": float("nan")}, "temperature nan: expected 0 to 100"),
        ({"timeout_s": -3.0}, "timeout -3.0: expected seconds above 0"),
        ({"timeout_s": float("nan")}, "timeout nan: expected seconds above 0"),
    ],
)
def test_what_cannot_run_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        resolve(replace(BASE, **change), {})


def test_arguments_need_an_engine_that_takes_them() -> None:
    asked = replace(BASE, method="full", budget=None, engine_args={"dtype": "half"})
    with pytest.raises(UsageError, match="--engine-arg dtype: engine 'embedded' takes no"):
        resolve(asked, {})
    assert resolve(replace(asked, engine="vllm"), {}).engine_args == {"dtype": "half"}


def test_a_spelling_of_an_engines_argument_makes_no_other_run() -> None:
    asked = replace(BASE, engine="vllm", method="full", budget=None)
    one, other = (replace(asked, engine_args={name: "9"}) for name in ("a-b-c", "a_b-c"))
    assert resolve(one, {}).id == resolve(other, {}).id
    with pytest.raises(UsageError, match="--engine-arg a-b is given twice"):
        resolve(replace(asked, engine_args={"a-b": "9", "a_b": "9"}), {})
    # What was recorded before stays the run that it was.
    assert RunSpec.of(other.document()).id == other.id != one.id


def test_grid_keeps_order_and_runs_full_once() -> None:
    cells = grid(
        BASE, ["full", "snapkv"], [Budget(64), Budget(128)], ["micro/recall-1k"], [0, 1], {}
    )
    assert [(c.seed, c.method, c.budget and c.budget.tokens) for c in cells] == [
        (0, "full", None), (0, "snapkv", 64), (0, "snapkv", 128),
        (1, "full", None), (1, "snapkv", 64), (1, "snapkv", 128),
    ]  # fmt: skip


def test_the_default_method_compresses_where_the_engine_can() -> None:
    assert default_methods("embedded", ["64"]) == ("agentkv",)
    assert default_methods("embedded", []) == ("full",)
    assert default_methods("scripted", ["64"]) == ("full",)
