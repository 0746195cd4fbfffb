"""Runs of methods that drop messages, through the command line: verdicts, records and tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from agentbench_kv.cli import kvbench
from agentbench_kv.environments import python_of
from agentbench_kv.errors import PrerequisiteError, UsageError
from agentbench_kv.results.run_reader import RunReader

TASK = "micro/recall-1k"


def call(*words: str) -> Any:
    return CliRunner().invoke(kvbench, list(words), catch_exceptions=False)


def run(out: Path, *more: str) -> RunReader:
    command = ("run", "--task", TASK, "--limit", "1", "--quiet", "--out", str(out), *more)
    result = call(*command)
    assert result.exit_code == 0, result.output
    (folder,) = [path.parent for path in out.glob("*/run.json")]
    return RunReader(folder)


def validity(reader: RunReader) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((reader.path / "summary.json").read_text())["validity"]
    return found


@pytest.mark.parametrize(("keep", "state"), [("1", "valid"), ("50", "budget_not_applied")])
def test_a_trigger_without_a_budget_is_a_bound(tmp_path: Path, keep: str, state: str) -> None:
    settings = ("trigger=500", f"keep={keep}", "clear_inputs=on", "keep_thoughts=1")
    words = [word for each in settings for word in ("--set", each)]
    reader = run(tmp_path, "--method", "clear-tools", *words)
    (trial,) = reader.trials()
    kv = trial.kv
    assert kv.events > 0
    verdict = validity(reader)
    assert verdict["state"] == state, verdict
    assert (kv.peak_live <= 500 + kv.longest_prefill) == (state == "valid")
    if state != "valid":
        bound = f"over the bound 500 + {kv.longest_prefill} (trigger + longest prefill)"
        assert bound in verdict["reasons"][0]


def test_the_oracle_loses_nothing_that_clearing_the_oldest_does(tmp_path: Path) -> None:
    """The golden agent's results stay as long as it needs them, for any agent on a micro task."""
    right = {}
    for method in ("clear-tools", "oracle-tools"):
        words = ("--method", method, "--budget", "800", "--set", "exec=span", "--limit", "3")
        reader = run(tmp_path / method, *words)
        trials = list(reader.trials())
        assert all(trial.kv.evicted > 100 for trial in trials)
        right[method] = sum(int(trial.metrics["tool_right"] or 0) for trial in trials)
        asked = sum(int(trial.metrics["tool_asked"] or 0) for trial in trials)
    assert right["clear-tools"] < right["oracle-tools"] == asked


@pytest.mark.parametrize("agent", ["gold", "corrupt"])
def test_the_oracle_with_a_scripted_agent(tmp_path: Path, agent: str) -> None:
    words = ("--engine", "scripted", "--model", agent, "--budget", "600", "--limit", "3")
    trials = list(run(tmp_path, "--method", "oracle-tools", *words).trials())
    assert {trial.score for trial in trials} == {1.0 if agent == "gold" else 0.0}
    assert all(trial.kv.rewrites for trial in trials)


@pytest.mark.parametrize(
    "words",
    [
        ("run", "--task", "bfcl/multi_turn_base", "--engine", "embedded"),
        ("run", "--task", "bfcl/multi_turn_base", "--engine", "scripted", "--model", "null"),
        ("run", "--task", "locomo/qa", "--engine", "scripted", "--model", "gold", "--dry-run"),
        ("serve", "--model", "micro"),
    ],
)
def test_the_oracle_is_refused_where_nobody_knows_the_future(words: tuple[str, ...]) -> None:
    result = CliRunner().invoke(kvbench, [*words, "--method", "oracle-tools", "--budget", "500"])
    assert isinstance(result.exception, UsageError)
    told = str(result.exception)
    assert "must know which results are needed later" in told
    assert "use it in kvbench run" in told or "use micro/recall-1k, micro/recall-5k" in told


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("--method", "turn-window", "--budget", "500"), "method 'turn-window' drops messages"),
        (("--method", "sidequest-prompted"), "method 'sidequest-prompted' drops messages"),
        (("--engine", "api", "--model", "http://127.0.0.1:9/v1#m", "--method", "full"), "'api'"),
    ],
)
def test_raw_completions_are_refused_before_anything_starts(
    tmp_path: Path, words: tuple[str, ...], found: str
) -> None:
    out = tmp_path / "runs"
    command = ["run", "--task", "bfcl/multi_turn_base", "--out", str(out), *words]
    result = CliRunner().invoke(kvbench, command)
    assert isinstance(result.exception, UsageError)
    assert found in str(result.exception)
    assert str(result.exception).endswith("use --set route=chat")
    assert not out.exists()


@pytest.mark.engine
def test_raw_completions_teach_no_dropping(tmp_path: Path) -> None:
    """SideQuest's cursors are those of messages: of raw traces nothing could be learnt."""
    try:
        python_of("bfcl")
    except PrerequisiteError:
        pytest.skip("bfcl environment absent: kvbench env create bfcl")
    command = ["train", "sidequest", "--gold", "bfcl/multi_turn_base", "--model", "micro"]
    result = CliRunner().invoke(kvbench, [*command, "--out", str(tmp_path / "quest")])
    assert isinstance(result.exception, UsageError)
    assert "sent raw completions, and SideQuest is trained on messages" in str(result.exception)


@pytest.mark.engine
def test_the_oracle_with_a_benchmarks_golden_agent(tmp_path: Path) -> None:
    try:
        python_of("bfcl")
    except PrerequisiteError:
        pytest.skip("bfcl environment absent: kvbench env create bfcl")
    words = ("--engine", "scripted", "--model", "gold", "--limit", "3", "--set", "route=chat")
    out = tmp_path / "runs"
    task = ("--task", "bfcl/multi_turn_base", "--quiet", "--out", str(out))
    result = call("run", *task, *words, "--method", "oracle-tools", "--budget", "1500")
    assert result.exit_code == 0, result.output
    (folder,) = [path.parent for path in out.glob("*/run.json")]
    trials = list(RunReader(folder).trials())
    assert [trial.score for trial in trials] == [1.0] * 3
