"""Whatever a user gets wrong is one clear line and exit code 2."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

WRONG = [
    (["--budget", "0"], "budget '0': expected a number of tokens"),
    (["--budget", "many"], "budget 'many': expected a number of tokens"),
    (["--method", "agentkv"], "agentkv needs a budget: add --budget"),
    (
        ["--context-limit", "1000000", "--budget", "64"],
        "--context-limit 1000000: YaRN is described",
    ),
    (["--context-limit", "8", "--budget", "64"], "--context-limit 8: expected at least 16"),
    (["--engine", "scripted", "--context-limit", "64"], "'scripted' has no KV cache of its own"),
    (["--engine", "scripted", "--max-live-tokens", "64"], "has no KV cache of its own"),
    (["--method", "agentk", "--budget", "64"], "did you mean 'agentkv'"),
    (["--method", "snapkv@rvk", "--budget", "64"], "did you mean 'rkv'"),
    (["--method", "snapkv", "--budget", "32"], "always keeps"),
    (["--task", "micro/recall5k", "--budget", "64"], "did you mean 'micro/recall-5k'"),
    (["--engine", "embeded", "--budget", "64"], "did you mean 'embedded'"),
    (["--model", "mikro", "--budget", "64"], "did you mean 'micro'"),
    (["--model", "./nowhere", "--budget", "64"], "does not exist"),
    (["--model", "nowhere.gguf", "--budget", "64"], "there is no GGUF file nowhere.gguf"),
    (["--dtype", "float31", "--budget", "64"], "did you mean 'float32'"),
    (["--set", "window=3", "--budget", "64"], "unknown agentkv parameter 'window'"),
    (["--set", "gqa=median", "--budget", "64"], "expected one of mean_prob, max_prob, max_logit"),
    (["--set", "interval", "--budget", "64"], "expected key=value"),
    (["--set", "interval=0", "--budget", "64"], "expected an integer >= 1"),
    (["--timeout", "-3", "--budget", "64"], "timeout -3.0: expected seconds above 0"),
    (["--limit", "0", "--budget", "64"], "limit 0: expected at least 1"),
    (["--trials", "-1", "--budget", "64"], "trials -1: expected at least 1"),
    (["--engine", "scripted", "--method", "agentkv", "--budget", "64"], "does not compress"),
    (["--engine", "scripted", "--model", "golden"], "did you mean 'gold'"),
    (["--budget", "1" * 400], "budget '1111"),
    (["--budget", "9" * 300], "expected a number of tokens"),
    (["--budget", "0.0000001%"], "expected a number of tokens"),
    (["--budget", "64", "--seed", "9" * 400], "is no number of 64 bits"),
    (["--budget", "64", "--timeout", "inf"], "is no number of 64 bits"),
    (["--budget", "64", "--timeout", "nan"], "is no number of 64 bits"),
    (["--budget", "64", "--timeout", "1e12"], "timeout 1000000000000.0: expected seconds above 0"),
    (["--budget", "64", "--trials", "1000000000"], "expected at least 1, at most 10,000"),
    (["--budget", "64", "--set", "interval=" + "9" * 400], "expected an integer >= 1"),
    (["--budget", "64", "--model", "m" * 300], "File name too long"),
    (["--bugdet", "64"], "No such option"),
]


@pytest.mark.parametrize(("args", "message"), WRONG, ids=[" ".join(w[0]) or "-" for w in WRONG])
def test_one_line_and_exit_code_two(
    args: list[str], message: str, kvbench: Callable[..., Any], tmp_path: Path
) -> None:
    done = kvbench("run", *args)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""
    assert not list(tmp_path.glob("runs/*"))


def test_nothing_else_reaches_the_terminal(kvbench_process: Callable[..., Any]) -> None:
    """Libraries that warn on import, interpreters that end noisily: only a process tells."""
    done = kvbench_process("run", "--model", "mikro", "--budget", "64")
    assert done.returncode == 2
    assert "did you mean 'micro'" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""


def test_unreadable_model_folder(kvbench: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{ not json")
    done = kvbench("run", "--budget", "64", "--model", "./model")
    assert done.returncode == 2
    assert "cannot read" in done.stderr
    assert "Traceback" not in done.stderr


def test_names_of_more_than_255_bytes(kvbench: Callable[..., Any]) -> None:
    for line in (["show", "x" * 300], ["report", "x" * 300], ["compare", "x" * 300, "y" * 300]):
        done = kvbench(*line)
        assert done.returncode == 2
        assert len(done.stderr.strip().splitlines()) == 1
        assert "x" * 40 in done.stderr


def test_read_only_output(kvbench: Callable[..., Any]) -> None:
    done = kvbench("run", "--budget", "64", "--out", "/proc/nowhere")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "/proc/nowhere" in done.stderr


@pytest.mark.parametrize("command", [["serve"], ["browser", "serve"]], ids=" ".join)
def test_a_port_there_is_not_is_refused(command: list[str], kvbench: Callable[..., Any]) -> None:
    done = kvbench(*command, "--port", "99999")
    assert done.returncode == 2
    assert "99999 is not in the range" in done.stderr
    assert "0<=x<=65535" in kvbench(*command, "--help").stdout
