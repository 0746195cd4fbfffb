"""`kvbench convert` and `kvbench bench restore`, in the environment that has llama.cpp."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from agentbench_kv.cli import kvbench
from agentbench_kv.environments import python_of
from agentbench_kv.errors import PrerequisiteError, UsageError


@pytest.fixture
def environment() -> None:
    try:
        python_of("llamacpp")
    except PrerequisiteError as error:
        pytest.skip(str(error))


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.usefixtures("environment")
def test_the_shipped_model_is_converted(tmp_path: Path) -> None:
    out = tmp_path / "micro.gguf"
    done = CliRunner().invoke(kvbench, ["convert", "micro", str(out), "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.output) == {
        "path": str(out),
        "bytes": out.stat().st_size,
        "architecture": "qwen3",
    }


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    done = CliRunner().invoke(kvbench, ["convert", str(tmp_path), str(tmp_path / "out.gguf")])
    assert isinstance(done.exception, (PrerequisiteError, UsageError))
    assert "config.json" in str(done.exception)
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.usefixtures("environment")
def test_restore_is_measured_for_both_protocols() -> None:
    options = ["--tokens", "20", "--tokens", "40", "--repeats", "1", "--json"]
    done = CliRunner().invoke(kvbench, ["bench", "restore", *options])
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    rows = found["cells_measured"]
    assert found["threads"] == 1
    assert [(row["protocol"], row["tokens"]) for row in rows] == [
        ("empty", 20), ("empty", 40), ("tail", 20), ("tail", 40),
    ]  # fmt: skip
    for row in rows:
        assert row["speedup"] == pytest.approx(row["prefill"] / row["restore"])
        assert row["load_average"] >= 0


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.usefixtures("environment")
def test_the_published_table_stands_beside_the_measured_one() -> None:
    options = ["--tokens", "20", "--repeats", "1"]
    done = CliRunner().invoke(kvbench, ["bench", "restore", *options])
    assert done.exit_code == 0, done.output
    assert "| empty | 20 |" in done.output
    assert "| tail | 20 |" in done.output
    assert done.output.count("RTX 4070 Ti SUPER") == 5
    assert "| 20 | 1.1 | 0.48 | 11.9 | 25x |" in done.output
