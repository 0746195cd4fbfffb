"""Runs of a plain-text memory that are killed, interrupted and gone on with, as users do it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentbench_kv.results.run_reader import RunReader
from agentbench_kv.results.store import CHECKPOINTS

SCRIPT = Path(__file__).with_name("notebook.py")
RUN = [
    *("run", "--method", "mem0", "--task", "micro/memory", "--limit", "2", "--concurrency", "1"),
    *("--set", "encoder=hash", "--set", "topk=4", "--max-tokens", "8", "--device", "cpu"),
    *("--json", "--quiet"),
]


def play(place: Path, stop: str = "add:0:SIGKILL", **more: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a folder; `stop` says when it gets which signal."""
    own = {key: value for key, value in os.environ.items() if not key.startswith("KVBENCH_")}
    seen = str(place / "seen.jsonl")
    place.mkdir(exist_ok=True)
    return subprocess.run(
        [sys.executable, str(SCRIPT), *RUN, "--out", str(place / "runs")],
        env={**own, "OMP_NUM_THREADS": "1", "NOTEBOOK_STOP": stop, "NOTEBOOK_SEEN": seen, **more},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def run_in(place: Path) -> RunReader:
    (path,) = place.glob("runs/*/run.json")
    return RunReader(path.parent)


def facts(place: Path) -> Any:
    """Return all that a run says but times and what it went on from, and what was remembered."""
    run, found = run_in(place), []
    for record in run.trials():
        metrics = {
            name: value
            for name, value in record.metrics.items()
            if not name.endswith(("_s", "ttft_ms_total")) and name != "ingest_files"
        }
        found.append([record.key, record.status, record.score, metrics, record.kv, record.usage])
        found.append([record.prompt_sha, run.transcript(record)])
    return found, (place / "seen.jsonl").read_text()


def kept(place: Path) -> list[str]:
    return sorted(path.name for path in (run_in(place).path / CHECKPOINTS).glob("*"))


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("calm")
    done = play(place)
    assert done.returncode == 0, done.stderr
    return place


def test_a_calm_run_leaves_nothing_behind(calm: Path) -> None:
    assert not (run_in(calm).path / CHECKPOINTS).exists()
    assert all("ingest_files" not in record.metrics for record in run_in(calm).trials())
    assert all(record.metrics["ingest_calls"] > 13 for record in run_in(calm).trials())
    assert len({*(calm / "seen.jsonl").read_text().splitlines()}) == 2


@pytest.mark.slow
def test_killed_and_interrupted_runs_end_as_if_nothing_had_been(calm: Path, tmp_path: Path) -> None:
    place = tmp_path / "stormy"
    # In a past session, again before there was a new one, as a checkpoint is written, by Ctrl-C.
    ends = [("add:30:SIGKILL", -9), ("add:1:SIGKILL", -9), ("pack:99:SIGKILL", -9)]
    ends += [("add:10:SIGTERM", 130), ("add:13:SIGINT", 130)]
    for stop, code in ends:
        ended = play(place, stop)
        assert ended.returncode == code, ended.stderr
        assert "Traceback" not in ended.stderr
        names = kept(place)
        assert sum(not name.startswith(".") for name in names) == 1
        # What was half written is left where nobody takes it for a checkpoint.
        assert sum(name.startswith(".") for name in names) == stop.startswith("pack")
    done = play(place)
    assert done.returncode == 0, done.stderr
    assert "it goes on behind them" in done.stderr
    assert facts(place) == facts(calm)
    assert not (run_in(place).path / CHECKPOINTS).exists()
    told = [record.metrics for record in run_in(place).trials()]
    assert any(each.get("ingest_files", 0) > 0 and each["ingest_files_s"] > 0 for each in told)


def test_another_version_begins_anew_with_a_line(calm: Path, tmp_path: Path) -> None:
    place = tmp_path / "stormy"
    assert play(place, "add:30:SIGKILL").returncode == -9
    done = play(place, NOTEBOOK_VERSION="2")
    assert done.returncode == 0, done.stderr
    assert "notebook is 1 there and 2 here" in done.stderr
    assert facts(place) == facts(calm)
    assert all("ingest_files" not in record.metrics for record in run_in(place).trials())


def test_another_attempt_at_a_trial_goes_on_too(calm: Path, tmp_path: Path) -> None:
    place = tmp_path / "stormy"
    done = play(place, "add:30:DIED")
    assert done.returncode == 0, done.stderr
    assert facts(place) == facts(calm)
    first, second = run_in(place).trials()
    assert (first.attempts, second.attempts) == (2, 1)
    assert first.metrics["ingest_files"] > 0
    assert "ingest_files" not in second.metrics
    assert not (run_in(place).path / CHECKPOINTS).exists()
