"""`kvbench leaderboard` through its commands."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from agentbench_kv.results.records import TrialRecord
from agentbench_kv.results.store import RunStore


def kvbench(*args):
    code = "import sys; from agentbench_kv.cli import main; sys.argv = sys.argv[1:]; main()"
    command = [sys.executable, "-c", code, "kvbench", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def run(tmp_path):
    spec = {"task": "t", "method": "full", "budget": None, "engine": "e", "model": "m", "seed": 0}
    with RunStore(tmp_path / "runs").open("first", spec, expected_trials=3) as opened:
        for i in range(3):
            kv = {"peak_live": 9, "logical": 9}
            scored = {"status": "scored", "score": i / 2, "kv": kv}
            opened.append_trial(TrialRecord(sample_id=f"s{i}", trial=0, seed=1, **scored))
    return opened.path


def test_pack_validate_add(run, tmp_path):
    made, board = tmp_path / "made", tmp_path / "board"
    packed = kvbench("leaderboard", "pack", run, "--to", made, "--who", "Ann", "--method", "full")
    assert (packed.returncode, packed.stderr) == (0, "")
    checked = kvbench("leaderboard", "validate", made, "--json")
    assert json.loads(checked.stdout) == {"valid": True, "findings": []}
    added = kvbench("leaderboard", "add", made, "--to", board)
    assert added.stdout.startswith("1 runs added")
    assert (board / "first" / "samples.jsonl").is_file()


def test_a_refused_submission_leaves_nothing_in_the_way(run, tmp_path):
    pack = ("leaderboard", "pack", run, "--to", tmp_path / "made", "--who", "Ann", "--method")
    assert kvbench(*pack, "mine").returncode == 2
    assert kvbench(*pack, "full").returncode == 0


def test_an_edited_summary_is_one_line_and_exit_code_2(run, tmp_path):
    made = tmp_path / "made"
    kvbench("leaderboard", "pack", run, "--to", made, "--who", "Ann", "--method", "full")
    path = made / "first" / "summary.json"
    path.write_text(path.read_text().replace('"trials": 3', '"trials": 4'))
    result = kvbench("leaderboard", "validate", made)
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert "first: summary.json: trials: is 4, the records give 3" in line
