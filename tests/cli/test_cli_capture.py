"""capture, calibrate, ablate and analyze evidence, through the command line."""

from __future__ import annotations

import json

import numpy as np
import pytest


def test_capture_then_select(kvbench):
    made = kvbench("capture", "--out", "c.npz", "--layers", "1", "--json")
    assert made.returncode == 0
    assert "MB per 1,000 tokens" in made.stderr
    found = json.loads(made.stdout)
    with np.load("c.npz") as file:
        arrays = dict(file)
    assert arrays["q"].shape[-2] == found["tokens"]
    picked = kvbench(
        "select", "--method", "rkv", "--budget", "64", "--capture", "c.npz", "--out", "o.npz"
    )
    assert picked.returncode == 0
    with np.load("o.npz") as file:
        assert file["kept"].shape[-1] == 64


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--out", "c.txt"), ".npz"),
        (("--out", "c.npz", "--layers", "x"), "expected numbers such as"),
        (("--out", "c.npz", "--layers", "9"), "the model has 4"),
        (("--out", "c.npz", "--sample", "77"), "sample 77"),
        (("--out", "c.npz", "--method", "oracle", "--budget", "64"), "no engine can run it"),
        (("--out", "c.npz", "--engine", "scripted"), "embedded"),
    ],
)
def test_wrong_captures_are_one_line(kvbench, args, message):
    result = kvbench("capture", *args)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_calibrate_takes_a_text(kvbench, tmp_path):
    (tmp_path / "t.txt").write_text("some words, and more words.\n" * 80)
    result = kvbench("calibrate", "--text", "t.txt", "--json", KVBENCH_HOME=str(tmp_path))
    assert result.returncode == 0
    assert json.loads(result.stdout)["source"] == "t.txt"
    missing = kvbench("calibrate", "--text", "no.txt", KVBENCH_HOME=str(tmp_path))
    assert missing.returncode == 2
    assert "cannot read no.txt" in missing.stderr


def test_calibrate_asks_which_text(kvbench, tmp_path):
    for given in ((), ("--text", "t.txt", "--task", "micro/recall-1k")):
        asked = kvbench("calibrate", *given, KVBENCH_HOME=str(tmp_path))
        assert asked.returncode == 2
        assert "--text FILE, or --task micro/recall-5k" in asked.stderr
    foreign = kvbench("calibrate", "--task", "locomo/qa", KVBENCH_HOME=str(tmp_path))
    assert foreign.returncode == 2
    assert "kvbench calibrate --model micro --text FILE" in foreign.stderr


@pytest.mark.slow
def test_a_run_names_its_calibration_and_another_text_is_another_run(kvbench, tmp_path):
    home = {"KVBENCH_HOME": str(tmp_path / "home")}
    command = ("run", "--method", "triattention", "--budget", "256", "--limit", "1", "--quiet")
    task = ("--task", "micro/recall-1k", "--json")
    refused = kvbench(*command, *task, "--dry-run", **home)
    assert refused.returncode == 2
    assert "kvbench calibrate --model micro --task micro/recall-1k" in refused.stderr
    first = kvbench(*command, *task, **home)
    assert first.returncode == 0
    (planned,) = json.loads(kvbench(*command, *task, "--dry-run", **home).stdout)
    (made,) = json.loads(first.stdout)
    assert made["run_id"] == planned["run_id"]
    (tmp_path / "t.txt").write_text("some words, and more words.\n" * 80)
    found = json.loads(kvbench("calibrate", "--text", "t.txt", "--json", **home).stdout)
    (planned,) = json.loads(kvbench(*command, *task, "--dry-run", **home).stdout)
    assert planned["run_id"] != made["run_id"]
    assert planned["spec"]["calibration"] == found["sha256"]


def test_ablate_and_evidence(kvbench):
    command = (
        "ablate", "--budget", "256", "--task", "micro/recall-1k", "--limit", "2",
        "--axis", "representatives=8,16", "--metric", "recurring", "--json",
    )  # fmt: skip
    result = kvbench(*command)
    assert result.returncode == 0
    arms = json.loads(result.stdout)
    assert [arm["value"] for arm in arms] == ["", "8", "16"]
    assert all(arm["difference"]["n"] == 2 for arm in arms[1:])
    table = kvbench(*command[:-1])
    assert "p (Holm)" in table.stdout
    run = arms[0]["run_id"]
    # More sessions than the run has are all of them.
    shown = kvbench("analyze", "evidence", "--run", run, "--limit", "5", "--out", "t.npz", "--json")
    assert (shown.returncode, shown.stderr) == (0, "")
    sessions = json.loads(shown.stdout)["sessions"]
    assert len({session["sample"] for session in sessions}) == len(sessions) == 2
    for session in sessions:
        assert {fact["source"] for fact in session["facts"]} == {"think", "act", "tool", "others"}
    line = kvbench("analyze", "timeline", "--trace", "t.npz")
    assert line.returncode == 0
