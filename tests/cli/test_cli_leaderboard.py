"""`kvbench leaderboard` through its commands."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass

import pytest

from agentbench_kv.cli import main
from agentbench_kv.results.submissions import Label, labels
from agentbench_kv.run.runner import run_one
from agentbench_kv.run.spec import RunSpec, resolve


@dataclass
class Told:
    """What a command came to."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def kvbench(capsys, monkeypatch):
    """Return a function that runs the command line in this process: torch is loaded but once."""

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["kvbench", *map(str, args)])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        return Told(int(ended.value.code or 0), printed.out, printed.err)

    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Play a run of two samples, which nobody writes to."""
    spec = RunSpec("scripted", "gold", "full", None, "micro/recall-1k", limit=2)
    resolved = resolve(spec, {})
    root = tmp_path_factory.mktemp("runs")
    run_one(resolved, root, lambda *_: None)
    return root / resolved.id


@pytest.fixture
def made(kvbench, run, tmp_path):
    """Pack the run through the command line."""
    folder = tmp_path / "made"
    packed = kvbench("leaderboard", "pack", run, "--to", folder, "--who", "Ann", "--method", "full")
    assert (packed.returncode, packed.stderr) == (0, "")
    assert packed.stdout.splitlines() == [f"{run.name}: re-scored", f"{folder}: 1 runs, valid"]
    return folder


def test_validate_add_and_rerun(kvbench, run, made, tmp_path):
    board = tmp_path / "board"
    checked = kvbench("leaderboard", "validate", made, "--json")
    document = {"valid": True, "findings": []}
    document["runs"] = {run.name: {"label": "re-scored", "notes": []}}
    assert json.loads(checked.stdout) == document
    added = kvbench("leaderboard", "add", made, "--to", board)
    assert added.stdout.startswith("1 runs added")
    assert (board / run.name / "samples.jsonl").is_file()
    assert labels(board) == {run.name: Label.RESCORED}
    again = kvbench(
        "leaderboard", "rerun", made, "--sample", "1", "--seed", "3", "--to", board, "--json"
    )
    (found,) = json.loads(again.stdout)["reruns"]
    assert (found["played"], found["equal"], found["seed"], found["same"]) == (1, 1, 3, True)
    assert labels(board) == {run.name: Label.RERUN}
    told = kvbench("leaderboard", "rerun", made, "--sample", "2")
    assert told.stdout.startswith(f"{run.name}: 2 of 2 trials gave the same tokens")


def test_a_refused_submission_leaves_nothing_in_the_way(kvbench, run, tmp_path):
    pack = ("leaderboard", "pack", run, "--to", tmp_path / "made", "--who", "Ann", "--method")
    assert kvbench(*pack, "mine").returncode == 2
    bare = kvbench(*pack, "full", "--no-transcripts")
    assert bare.returncode == 0
    assert f"{run.name}: self-reported (the transcripts are not in the submission" in bare.stdout


def test_a_forgery_is_told_in_lines_and_in_one_document(kvbench, run, made):
    path = made / run.name / "samples.jsonl"
    path.write_text(path.read_text().replace('"score":1.0', '"score":0.5'))
    told = kvbench("leaderboard", "validate", made)
    assert told.returncode == 2
    (line,) = told.stderr.splitlines()
    assert f"{run.name}: samples.jsonl: sha256 is " in line
    document = kvbench("leaderboard", "validate", made, "--json")
    assert document.returncode == 2
    (finding,) = json.loads(document.stdout)["findings"]
    assert (finding["run"], finding["field"]) == (run.name, "samples.jsonl")


def test_a_rerun_of_no_such_run_names_those_there_are(kvbench, run, made):
    told = kvbench("leaderboard", "rerun", made, "--run", "other")
    assert told.returncode == 2
    assert f"no run other in {made}; it has {run.name}" in told.stderr
