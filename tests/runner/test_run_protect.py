"""`protect` through the command line: what the gateway counts reaches engine, record and table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from agentbench_kv.cli import kvbench
from agentbench_kv.engines.embedded.engine import EmbeddedEngine
from agentbench_kv.engines.embedded.model import model_path
from agentbench_kv.errors import UsageError
from agentbench_kv.phases import PhaseTable, TokenCodec, load_tokenizer
from agentbench_kv.results.run_reader import RunReader
from agentbench_kv.run.recordings import record_gold

TASK = "micro/recall-1k"


def call(*words: str) -> Any:
    return CliRunner().invoke(kvbench, list(words), catch_exceptions=False)


def run(out: Path, *more: str) -> RunReader:
    command = ("run", "--task", TASK, "--limit", "1", "--quiet", "--out", str(out), *more)
    result = call(*command)
    assert result.exit_code == 0, result.output
    (folder,) = [path.parent for path in out.glob("*/run.json")]
    return RunReader(folder)


def opening() -> tuple[int, int]:
    """Tokens of the system message and of the first prompt, from the text of the prompt."""
    (turn, *_) = record_gold(TASK, "micro", 1, {})[0].turns
    codec = TokenCodec(load_tokenizer(model_path("micro")))
    ids = [token for token, _ in turn.prompt]
    assert PhaseTable.for_tokenizer(codec).family.name == "chatml"
    text = codec.decode(ids)
    head = text[: text.index("<|im_start|>user")]
    assert head.startswith("<|im_start|>system")
    return len(codec.encode(head)), len(ids)


def test_a_run_protects_the_system_message_and_says_what_is_left(tmp_path: Path) -> None:
    system, _ = opening()
    reader = run(tmp_path, "--method", "random@system", "--budget", "600")
    (trial,) = reader.trials()
    assert trial.kv.protected == system
    assert (trial.kv.refused, trial.kv.refused_budget) == (0, None)
    assert trial.kv.events > 0
    said = json.loads((reader.path / "summary.json").read_text())
    assert said["validity"]["state"] == "valid"
    assert f"of the budget, 600 tokens, a median of {system} are protected: {600 - system}" in str(
        said["notes"]
    )
    table = call("report", str(tmp_path)).output
    assert "beyond protected" in table
    assert str(600 - system) in table


def test_a_run_without_room_is_not_valid_and_says_the_figures(tmp_path: Path) -> None:
    _, prompt = opening()
    budget = prompt + 8  # agentkv keeps the last 8
    reader = run(tmp_path, "--method", "agentkv@prompt", "--budget", str(budget))
    (trial,) = reader.trials()
    assert trial.kv.events == 0
    assert trial.kv.refused > 0
    said = json.loads((reader.path / "summary.json").read_text())["validity"]
    assert said["state"] == "budget_not_applied"
    assert f"protected {prompt} + recent 8 >= budget {budget}" in said["reasons"][0]
    assert not any("never triggered" in reason for reason in said["reasons"])


def test_fidelity_protects_the_same_tokens(tmp_path: Path) -> None:
    system, prompt = opening()
    arms = ("--method", "agentkv@system", "--method", "agentkv@prompt", "--budget", str(prompt))
    result = call("fidelity", "--task", TASK, "--limit", "1", "--out", str(tmp_path), *arms)
    assert result.exit_code == 0, result.output
    found = {}
    for path in tmp_path.glob("*/run.json"):
        reader = RunReader(path.parent)
        (trial,) = reader.trials()
        found[reader.info.spec["method"]] = trial.kv
    first, second = found["agentkv@system"], found["agentkv@prompt"]
    assert (first.protected, second.protected) == (system, prompt)
    assert first.events > 0 == second.events
    assert second.refused > 0 == first.refused


def test_a_number_that_fills_the_budget_is_refused_before_anything_starts(tmp_path: Path) -> None:
    command = ("run", "--task", TASK, "--method", "agentkv", "--budget", "256")
    with pytest.raises(UsageError, match=r"protected 250 \+ recent 8"):
        call(*command, "--set", "protect=250", "--out", str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_an_engine_that_cannot_know_is_refused_in_a_line(monkeypatch: Any) -> None:
    less = EmbeddedEngine.capabilities - {"protect_system"}
    monkeypatch.setattr(EmbeddedEngine, "capabilities", less)
    with pytest.raises(UsageError, match="'agentkv@system': it has no protect_system"):
        call("run", "--task", TASK, "--method", "agentkv@system", "--budget", "600")


def test_sessions_that_share_their_system_message_find_it(tmp_path: Path) -> None:
    """Two trials of a sample begin alike: one computes the beginning, the other finds it."""
    system, _ = opening()
    kept = ("--method", "agentkv@system", "--budget", "600", "--trials", "2")
    own = list(run(tmp_path / "own", *kept).trials())
    reader = run(tmp_path / "shared", *kept, "--set", "prefix=shared")
    shared = list(reader.trials())
    assert sorted(trial.kv.cached_tokens for trial in shared) == [0, system]
    assert [trial.kv.shared for trial in shared] == [system, system]
    assert [trial.kv.shared for trial in own] == [0, 0]
    # Whether its beginning is computed or found, a session is what it was.
    plain = [msgspec.structs.replace(t.kv, cached_tokens=0, shared=0) for t in shared]
    assert plain == [trial.kv for trial in own]
    assert [trial.score for trial in shared] == [trial.score for trial in own]
    assert '"prefix": "shared"' in (reader.path / "run.json").read_text()
    table = call("report", str(tmp_path / "shared"), "--table", "efficiency").output
    assert "of them cached" in table


def test_a_prefix_is_not_shared_by_who_cannot(tmp_path: Path) -> None:
    for more in (
        ("--engine", "scripted", "--model", "null"),
        ("--method", "evoke", "--set", "prefix=shared"),
    ):
        refused = CliRunner().invoke(
            kvbench,
            ["run", "--task", TASK, "--out", str(tmp_path), "--method", "full@prefix", *more],
        )
        assert isinstance(refused.exception, UsageError), refused.output
        assert "prefix" in str(refused.exception)
