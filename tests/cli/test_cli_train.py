"""`kvbench train sidequest` as a user runs it, and the model that comes of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentbench_kv.engines.embedded.model import model_path
from agentbench_kv.training.sidequest.rows import read_rows, rows_sha

pytest.importorskip("peft", reason='peft is not installed: pip install "agentbench-kv[train]"')

TASK = "micro/recall-1k"
MICRO = model_path("micro")
SPEC = {"engine": "embedded", "model": "micro", "method": "full", "budget": None, "task": TASK}


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


def test_runs_are_what_they_hold(kvbench: Callable[..., Any], tmp_path: Path) -> None:
    runs, copy, out = tmp_path / "runs", tmp_path / "copy", tmp_path / "out"
    play = ["run", "--task", TASK, "--method", "full", "--out", str(runs), "-q"]
    for limit in ("2", "3"):
        assert kvbench(*play, "--limit", limit).returncode == 0
    shutil.copytree(runs, copy)
    whole = {path: path.read_bytes() for path in runs.glob("*/samples.jsonl")}
    longer = max(whole, key=lambda path: len(whole[path].splitlines()))
    longer.write_bytes(whole[longer].splitlines(keepends=True)[0])
    train = ["train", "sidequest", "--model", "micro", "--runs", str(runs), "--runs", str(copy)]
    train += ["--out", str(out), "--epochs", "1", "--batch", "1"]
    for _ in range(2):  # the second time nothing has changed
        trained = kvbench(*train, "--steps", "1")
        assert trained.returncode == 0, trained.stderr
        # 2 and 1 of a run that is under way, and 2 and 3 of the copies.
        assert "right traces of 3 (5 repeated ones are left out), " in trained.stderr
    card = json.loads((out / "data.json").read_text())
    assert (card["played"], card["repeated"]) == (3, 5)
    samples = [row.sample for row in read_rows(out / "data.jsonl")]
    assert len(set(samples)) == len(samples) == card["sessions"] > 0
    longer.write_bytes(whole[longer])
    made_of = {name: of for name, of in card["made_of"].items() if name != "trials"}
    older = shutil.copytree(out, tmp_path / "older")  # as a version made it that kept no trials
    (older / "data.json").write_text(json.dumps({**card, "made_of": made_of}))
    unknown = kvbench(*train, "--steps", "1", "--out", str(older))
    assert "from before trials were kept: whether the runs grew is unknown" in unknown.stderr
    grown = kvbench(*train, "--steps", "2")
    assert (grown.returncode, grown.stdout) == (2, "")
    assert grown.stderr == (
        f"kvbench: {out} holds rows of another model, other runs or settings (what changed: "
        "trials); choose another --out\n"
    )


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({}, "the run's spec is damaged (Object missing required field `engine`): take a whole"),
        ({**SPEC, "model": 7}, "the run's spec is damaged (model: Expected `str`, got `int`): "),
        ({**SPEC, "task_params": []}, "the run's spec is damaged (task_params: Expected `obj"),
        ({**SPEC, "budget": [1]}, "budget '[1]': expected a number of tokens"),
        ({**SPEC, "later": 7}, "the run's spec has later, which this version of kvbench does not"),
    ],
)
def test_a_damaged_spec_is_said(
    spec: dict[str, Any], said: str, kvbench: Callable[..., Any], tmp_path: Path
) -> None:
    facts = {"status": "complete", "created": 0, "heartbeat": 0, "pid": 1, "host": "h"}
    record = {"run_id": "r", "spec": spec, "owner": "o", **facts}
    (tmp_path / "run.json").write_text(json.dumps(record))
    train = ["train", "sidequest", "--model", "micro", "--runs", str(tmp_path), "--out", "out"]
    refused = kvbench(*train)
    assert (refused.returncode, len(refused.stderr.splitlines())) == (2, 1)
    assert f"kvbench: {tmp_path}: {said}" in refused.stderr


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
