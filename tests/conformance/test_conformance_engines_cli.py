"""`kvbench selftest engine`: its table, its document, its exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner, Result

import agentbench_kv.conformance.engines as suite
from agentbench_kv.cli.selftest import selftest
from agentbench_kv.conformance import CheckResult
from agentbench_kv.errors import PrerequisiteError, UsageError


def call(*arguments: str) -> Result:
    return CliRunner().invoke(selftest, ["engine", *arguments])


@pytest.fixture
def outcome(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that decides what the suite finds."""

    def decide(*results: CheckResult) -> None:
        def played(*_: Any, report: Any, **__: Any) -> dict[str, list[CheckResult]]:
            report("leaks", list(results))
            return {"leaks": list(results)}

        monkeypatch.setattr(suite, "engine_suite", played)

    return decide


@pytest.mark.slow
def test_the_embedded_engine_passes_quickly() -> None:
    result = call("embedded", "--quick", "--method", "streamingllm", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert (document["engine"], document["ok"]) == ("embedded", True)
    parts = {check["part"] for check in document["checks"]}
    assert parts == {
        "qwen3, streamingllm", "endings, streamingllm", "small pool, full-constrained",
        "small pool, streamingllm", "leaks", "forks, streamingllm", "forks, full-constrained",
        "tree of forks, streamingllm", "tree of forks, full-constrained",
        "shared prefix, streamingllm", "memory, sets=layer",
    }  # fmt: skip
    assert "endings, streamingllm: ok" in result.stderr


def test_a_failed_check_is_exit_code_one(outcome: Callable[..., None]) -> None:
    outcome(CheckResult("memory comes back", False, "3 blocks"), CheckResult("other", True))
    result = call("embedded")
    assert result.exit_code == 1
    assert "FAILED" in result.stdout
    assert "embedded: 1 of 2 checks failed" in result.stdout
    assert "leaks: 1 of 2 checks failed" in result.stderr


def test_skipped_checks_are_counted_apart(outcome: Callable[..., None]) -> None:
    outcome(CheckResult("memory", True, "says nothing", skipped=True), CheckResult("other", True))
    result = call("embedded")
    assert result.exit_code == 0
    assert "1 checks passed, 1 skipped" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["vlm"], "did you mean 'vllm'"),
        (["scripted"], "no KV cache"),
        (["embedded", "--method", "agentk"], "did you mean 'agentkv'"),
        (["embedded", "--engine-arg", "x"], "--engine-arg 'x'"),
    ],
)
def test_what_cannot_be_checked_is_refused(arguments: list[str], says: str) -> None:
    result = call(*arguments)
    assert isinstance(result.exception, UsageError)
    assert says in str(result.exception)


def test_a_missing_environment_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("KVBENCH_HOME", str(tmp_path))
    result = call("vllm", "--quick")
    assert isinstance(result.exception, PrerequisiteError)
    assert "kvbench env create vllm" in str(result.exception)
