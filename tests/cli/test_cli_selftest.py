"""`kvbench selftest method`: registered methods, classes by path, and what is wrong with them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

MODULE = '''
from dataclasses import dataclass
from typing import ClassVar

import torch

from agentbench_kv.methods.base import Method


@dataclass(frozen=True, kw_only=True)
class Newest(Method):
    """Keep the newest tokens."""

    name: ClassVar[str] = "newest"

    def score(self, queries, keys, context):
        return context.positions.float()


class Leaky(Newest):
    """Remembers how often it was asked."""

    name: ClassVar[str] = "leaky"
    asked: ClassVar[list] = []

    def score(self, queries, keys, context):
        self.asked.append(1)
        return torch.rand(keys.shape[:2], generator=torch.Generator().manual_seed(len(self.asked)))


class Breaks(Newest):
    """Raises where an engine has more than two heads' worth of layers."""

    name: ClassVar[str] = "breaks"

    def score(self, queries, keys, context):
        if context.now > 300:
            raise ZeroDivisionError("boom")
        return context.positions.float()


class NoScore(Method):
    """Forgot to score."""


class Other:
    """Not a method."""
'''
WRONG = [
    (["agentk"], "did you mean 'agentkv'"),
    (["snapkv@rvk"], "did you mean 'rkv'"),
    (["no_such_module:Newest"], "cannot import 'no_such_module'"),
    (["my_module:Newst"], "did you mean 'Newest'"),
    (["my_module:Other"], "not a subclass of Method"),
    (["my_module:NoScore"], "has no score"),
    (["my_module:Newest@small"], "unknown newest preset 'small'"),
    (["broken_module:Any"], "cannot import 'broken_module': SyntaxError"),
    (["agentkv", "--budget", "8"], "always keeps"),
    (["agentkv", "--budget", "25%"], "takes a number of tokens"),
    (["agentkv", "--budget", "none"], "expected a number of tokens"),
    (["agentkv", "--set", "windo=3"], "unknown agentkv parameter"),
    ([], "Missing argument 'NAME'"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "my_module.py").write_text(MODULE)
    (tmp_path / "broken_module.py").write_text("def (")
    return tmp_path


@pytest.mark.slow
def test_a_registered_method_passes_every_part(kvbench: Callable[..., Any]) -> None:
    done = kvbench("selftest", "method", "streamingllm@paper", "--set", "sinks=2", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert (document["method"], document["ok"]) == ("streamingllm@paper", True)
    parts = {check["part"] for check in document["checks"]}
    assert parts == {
        "selection", "masked cache, qwen3", "masked cache, llama", "replay", "sessions"
    }  # fmt: skip
    assert len(document["checks"]) >= 40
    assert all(check["ok"] for check in document["checks"])


@pytest.mark.slow
def test_a_class_in_this_folder_passes(kvbench: Callable[..., Any], folder: Path) -> None:
    assert folder.is_dir()
    done = kvbench("selftest", "method", "my_module:Newest", "--budget", "100")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "checks passed" in done.stdout
    assert "masked-cache equality" in done.stdout
    assert "FAILED" not in done.stdout


@pytest.mark.slow
def test_failed_checks_are_named_and_exit_code_one(
    kvbench: Callable[..., Any], folder: Path
) -> None:
    assert folder.is_dir()
    done = kvbench("selftest", "method", "my_module:Leaky", "--json")
    assert done.returncode == 1
    document = json.loads(done.stdout)
    failed = {check["name"] for check in document["checks"] if not check["ok"]}
    assert not document["ok"]
    assert "has no memory and changes nothing" in failed
    assert "a session after others is as alone" in failed
    assert "only: kept sets replayed" in failed


@pytest.mark.slow
def test_a_method_that_raises_is_a_failure_and_no_traceback(
    kvbench: Callable[..., Any], folder: Path
) -> None:
    assert folder.is_dir()
    done = kvbench("selftest", "method", "my_module:Breaks")
    assert done.returncode == 1
    assert "ZeroDivisionError: boom" in done.stdout
    assert "Traceback" not in done.stderr
    assert "checks failed" in done.stdout


@pytest.mark.parametrize(("args", "message"), WRONG, ids=[" ".join(w[0]) or "-" for w in WRONG])
def test_wrong_names_are_one_line_and_exit_code_two(
    args: list[str], message: str, kvbench: Callable[..., Any], folder: Path
) -> None:
    assert folder.is_dir()
    done = kvbench("selftest", "method", *args)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""


def test_offline_methods_are_checked_without_an_engine(kvbench: Callable[..., Any]) -> None:
    done = kvbench("selftest", "method", "oracle", "--json")
    assert done.returncode == 0
    assert {check["part"] for check in json.loads(done.stdout)["checks"]} == {"selection"}
