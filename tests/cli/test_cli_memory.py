"""Methods with a memory, where they cannot run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentbench_kv.results.store import RunStore


def test_a_memory_needs_a_past(kvbench: Callable[..., Any], tmp_path: Path) -> None:
    refused = kvbench("run", "--method", "memart", "--limit", "1", "--out", str(tmp_path))
    assert refused.returncode == 2
    assert "has none; use micro/memory, probe/locomo" in refused.stderr
    served = kvbench("serve", "--method", "memart")
    assert served.returncode == 2
    assert "no client can say which" in served.stderr


@pytest.mark.parametrize("method", ["mem0", "graphiti"])
def test_a_package_that_is_not_there_is_one_line(
    kvbench: Callable[..., Any], tmp_path: Path, method: str
) -> None:
    asked = ("run", "--method", method, "--task", "probe/locomo", "--limit", "1")
    refused = kvbench(*asked, "--out", str(tmp_path), KVBENCH_HOME=str(tmp_path / "empty"))
    assert refused.returncode == 2
    assert f"kvbench env create {method}" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_banks_are_for_methods_that_keep_them(kvbench: Callable[..., Any], tmp_path: Path) -> None:
    folder = tmp_path / "banks"
    asked = ("run", "--method", "full", "--task", "micro/memory", "--limit", "1")
    refused = kvbench(*asked, "--out", str(tmp_path), "--banks", str(folder))
    assert refused.returncode == 2
    assert "no method of this run reads a past into banks; use --method memart" in refused.stderr
    assert not folder.exists()
    # What the environment says is for runs that have a use for it.
    dry = kvbench(*asked, "--dry-run", KVBENCH_BANKS=str(folder))
    assert dry.returncode == 0, dry.stderr


def test_a_second_run_finds_what_the_first_has_read(
    kvbench: Callable[..., Any], tmp_path: Path
) -> None:
    asked = ("run", "--method", "memart", "--task", "micro/memory", "--limit", "1", "--quiet")
    for topk in ("8", "48"):
        place = {"KVBENCH_BANKS": str(tmp_path / "banks"), "KVBENCH_OUT": str(tmp_path / "runs")}
        done = kvbench(*asked, "--set", f"topk={topk}", "--max-tokens", "16", **place)
        assert done.returncode == 0, done.stderr
    found = [json.loads(path.read_text()) for path in tmp_path.glob("runs/*/samples.jsonl")]
    files = sorted(each["metrics"].get("ingest_files", 0) for each in found)
    assert files == [0, len([*(tmp_path / "banks").glob("*.safetensors")])]
    assert len({each["metrics"]["ingest_tokens"] for each in found}) == 1


def test_a_sweep_and_an_ablation_read_a_past_once(
    kvbench: Callable[..., Any], tmp_path: Path
) -> None:
    banks, task = tmp_path / "banks", ("--task", "micro/memory", "--limit", "1")
    grid = ("sweep", "--method", "memart,topk=8", "--method", "memart,topk=24", *task)
    place = ("--banks", str(banks), "--out", str(tmp_path / "swept"), "--workers", "1")
    done = kvbench(*grid, *place, "--json")
    assert done.returncode == 0, done.stderr
    files = {path: path.stat().st_mtime_ns for path in banks.glob("*.safetensors")}
    records = [
        record.metrics
        for name in RunStore(tmp_path / "swept").names()
        for record in RunStore(tmp_path / "swept").find(name).trials()
    ]
    # One of the two has read it all, the other one nothing.
    assert sorted(each.get("ingest_files", 0) for each in records) == [0, len(files)]
    ablation = ("ablate", "--method", "memart,topk=8", "--axis", "topk=16,24")
    again = kvbench(*ablation, *task, "--banks", str(banks), "--out", str(tmp_path / "ablated"))
    assert again.returncode == 0, again.stderr
    assert {path: path.stat().st_mtime_ns for path in banks.glob("*.safetensors")} == files
    for command in (grid[:1], ablation[:1]):
        refused = kvbench(*command, "--method", "agentkv", "--budget", "256", "--banks", str(banks))
        assert refused.returncode == 2
        assert "no method of this run reads a past into banks" in refused.stderr
