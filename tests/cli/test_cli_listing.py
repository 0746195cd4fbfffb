"""`kvbench ls`, `--dry-run`, `completion` and the environment twins."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from agentbench_kv import registry


def test_ls_methods_lists_presets_and_parameters(kvbench: Callable[..., Any]) -> None:
    rows = json.loads(kvbench("ls", "methods", "--json").stdout)
    by_name = {row["name"]: row for row in rows}
    assert set(by_name) >= {"full", "full-constrained", "agentkv", "snapkv", "streamingllm"}
    assert set(by_name["snapkv"]["presets"]) >= {"rkv", "kvpress"}
    window = next(p for p in by_name["snapkv"]["parameters"] if p["name"] == "window")
    assert window["allowed"] == "an integer >= 1"


def test_ls_methods_lists_what_the_plain_name_runs_with(kvbench: Callable[..., Any]) -> None:
    """`--method agentkv` is the default preset, not the class without one."""
    rows = json.loads(kvbench("ls", "methods", "--json").stdout)
    for row in rows:
        listed = {each["name"]: each["default"] for each in row["parameters"]}
        preset = row["presets"].get(row["default_preset"], {})
        assert listed == {**listed, **preset}
        assert row["name"] != "agentkv" or listed["keep_recent"] == 8


def test_ls_methods_says_what_an_engine_can_run(kvbench: Callable[..., Any]) -> None:
    rows = json.loads(kvbench("ls", "methods", "--engine", "scripted", "--json").stdout)
    # Policies that drop messages as text run wherever messages do.
    able = {
        "full", "full-constrained", "clear-tools", "random-tools", "oracle-tools", "turn-window",
        "summarise",
        "mem0",
        "graphiti",
    }  # fmt: skip
    assert {row["name"] for row in rows if row["on_scripted"]} == able


def test_dry_run_expands_the_grid_and_starts_nothing(
    kvbench: Callable[..., Any], tmp_path: Any
) -> None:
    args = ["--method", "full", "--method", "agentkv", "--budget", "64", "--budget", "128"]
    done = kvbench("run", *args, "--dry-run", "--json")
    plan = json.loads(done.stdout)
    cells = [(row["spec"]["method"], row["spec"]["budget"]) for row in plan]
    assert cells == [("full", None), ("agentkv", 64), ("agentkv", 128)]
    assert len({row["run_id"] for row in plan}) == 3
    assert not (tmp_path / "runs").exists()


def test_environment_twins(kvbench: Callable[..., Any]) -> None:
    done = kvbench("run", "--dry-run", "--json", KVBENCH_BUDGET="99", KVBENCH_METHOD="snapkv")
    (row,) = json.loads(done.stdout)
    assert (row["spec"]["method"], row["spec"]["budget"]) == ("snapkv", 99)


def test_same_command_same_run_id_whatever_the_order_of_settings(
    kvbench: Callable[..., Any],
) -> None:
    first = ["--set", "interval=64", "--set", "keep_recent=4"]
    second = ["--set", "keep_recent=4", "--set", "interval=64"]
    ids = [
        json.loads(kvbench("run", "--budget", "64", *pairs, "--dry-run", "--json").stdout)[0][
            "run_id"
        ]
        for pairs in (first, second)
    ]
    assert ids[0] == ids[1]


def test_completion_script(kvbench: Callable[..., Any]) -> None:
    assert "_KVBENCH_COMPLETE" in kvbench("completion", "bash").stdout


def test_a_broken_plug_in_is_named_and_the_others_are_listed(
    kvbench: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = registry._entry_points

    def with_broken(kind: str) -> dict[str, EntryPoint]:
        group = f"agentbench_kv.{kind}s"
        return known(kind) | {"mine": EntryPoint("mine", "no_such_module:Mine", group)}

    monkeypatch.setattr(registry, "_entry_points", with_broken)
    done = kvbench("ls", "methods", "--json")
    assert done.returncode == 0
    assert {"full", "agentkv"} <= {row["name"] for row in json.loads(done.stdout)}
    assert len(done.stderr.splitlines()) == 1
    assert "'mine' is left out" in done.stderr
    assert "no_such_module" in done.stderr
