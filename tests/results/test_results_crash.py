"""What really happens when the writing process is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from agentbench_kv.errors import UsageError
from agentbench_kv.results.run_info import RunStatus
from agentbench_kv.results.run_reader import RunReader
from agentbench_kv.results.store import RunStore

WRITER = """
import sys
from pathlib import Path
from agentbench_kv.results.records import TrialRecord, TurnRecord
from agentbench_kv.results.store import RunStore

with RunStore(Path(sys.argv[1])).open("a", {"task": "t"}, expected_trials=10**6) as run:
    start = len(run.finished_trials())
    for i in range(start, 10**6):
        turns = [TurnRecord(sample_id=f"s{i}", trial=0, turn=t) for t in range(3)]
        run.append_turns(turns)
        path = run.save_transcript(f"s{i}", 0, ["x" * 20000])
        run.append_trial(TrialRecord(
            sample_id=f"s{i}", trial=0, seed=0, status="scored", score=1.0, transcript=path))
        print(i, flush=True)
"""


@pytest.fixture
def writer(tmp_path):
    """Start writers on the same run; all are dead when the test ends."""
    started = []

    def start():
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        first = process.stdout.readline()
        assert first, "the writer died before its first trial was on the disk"
        return process, int(first)

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def kill(process):
    """Kill without warning and return the trials the writer was told are on the disk."""
    os.kill(process.pid, signal.SIGKILL)
    output, _ = process.communicate()
    return [int(line) for line in output.splitlines()]


def test_kill_9_loses_only_what_was_in_flight(writer, tmp_path):
    reader = RunReader(tmp_path / "a")
    promised = -1
    for round_ in range(3):
        process, first = writer()
        assert first <= promised + 2
        time.sleep(0.1 + 0.037 * round_)
        promised = max([first, *kill(process)])
        finished = reader.finished_trials()
        assert {(f"s{i}", 0) for i in range(promised + 1)} <= finished
        assert len(finished) <= promised + 2
        assert not reader.trial_lines().unreadable
        assert not reader.turn_lines().unreadable
        assert reader.info.status is RunStatus.RUNNING
        assert reader.interrupted
    turns = reader.turns()
    for record in reader.trials():
        assert len(reader.transcript(record)[0]) == 20000
        assert sum(turn.key == record.key for turn in turns) == 3
    with RunStore(tmp_path).open("a", {"task": "t"}) as run:
        assert run.finished_trials() == finished
    assert len(reader.info.resumes) == 2


def test_a_live_writer_is_respected_and_a_dead_one_replaced_at_once(writer, tmp_path):
    process, _ = writer()
    with pytest.raises(UsageError) as caught:
        RunStore(tmp_path).open("a", {"task": "t"})
    message = str(caught.value)
    assert f"pid {process.pid} on " in message
    assert "s ago" in message
    assert "\n" not in message
    kill(process)
    RunStore(tmp_path).open("a", {"task": "t"}).close()
