"""`kvbench train sidequest` as a user runs it, and the model that comes of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentbench_kv.engines.embedded.model import model_path
from agentbench_kv.training.sidequest.rows import rows_sha

pytest.importorskip("peft", reason='peft is not installed: pip install "agentbench-kv[train]"')

TASK = "micro/recall-1k"
MICRO = model_path("micro")


def test_train_then_run(kvbench: Callable[..., Any], tmp_path: Path) -> None:
    out = tmp_path / "quest"
    train = [
        "train", "sidequest", "--gold", TASK, "--limit", "12", "--model", "micro", "--every", "4",
        "--epochs", "1", "--out", str(out),
    ]  # fmt: skip
    stopped = kvbench(*train, "--steps", "1")
    assert stopped.returncode == 0, stopped.stderr
    assert "stopped at step 1 of" in stopped.stdout
    assert not (out / "model").exists()
    done = kvbench(*train, "-q")
    assert done.returncode == 0, done.stderr
    assert "loss of answers" in done.stdout
    card = json.loads((out / "data.json").read_text())
    assert card["sha"] == rows_sha(out / "data.jsonl")
    assert card["sessions"] == 12
    run = ["run", "--task", TASK, "--limit", "1", "--out", str(tmp_path / "runs")]
    trained = [*run, "--model", str(out / "model"), "--limit", "12"]
    played = kvbench(*trained, "--method", "sidequest", "--seed", "1", "--limit", "1")
    assert played.returncode == 0, played.stderr
    # On what it was trained on its figures say nothing, under any method.
    for method in ("sidequest", "full"):
        seen = kvbench(*trained, "--method", method)
        assert seen.returncode == 2
        assert "was trained on" in seen.stderr
        assert "of these 12 samples, such as recall-1k-" in seen.stderr
    mark = out / "model" / "sidequest.json"
    mark.write_bytes(mark.read_bytes()[:-20])
    assert "is damaged: it names no samples" in kvbench(*trained, "--method", "sidequest").stderr
    refused = kvbench(*run, "--method", "sidequest")
    assert refused.returncode == 2
    assert "was not trained for sidequest" in refused.stderr
    # What is there is not taken for what is asked.
    other = kvbench(*train, "--seed", "1")
    assert other.returncode == 2
    assert "other runs or settings" in other.stderr
    (out / "data.jsonl").write_bytes((out / "data.jsonl").read_bytes()[:-200])
    assert "is not what data.json says" in kvbench(*train).stderr


def test_traces_that_are_none(kvbench: Callable[..., Any], tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    play = ["run", "--task", TASK, "--limit", "1", "--out", str(runs), "-q"]
    train = ["train", "sidequest", "--model", "micro", "--out", str(tmp_path / "out")]
    assert "name the traces" in kvbench(*train).stderr
    assert kvbench(*play, "--method", "random", "--budget", "200").returncode == 0
    assert "those of a full cache" in kvbench(*train, "--runs", str(runs)).stderr
    other = kvbench("train", "sidequest", "--model", str(MICRO), "--out", "x", "--runs", str(runs))
    assert "is a run of micro, not of" in other.stderr
    asked = [*train, "--gold", TASK, "--limit", "1", "--annotator"]
    assert "expected URL#MODEL" in kvbench(*asked, "nobody").stderr
    refused = kvbench(*asked, "http://127.0.0.1:9#m")
    assert refused.returncode == 2
    assert "the annotating model at http://127.0.0.1:9 did not answer" in refused.stderr
