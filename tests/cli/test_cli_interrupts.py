"""Ctrl-C once and twice, SIGTERM: a line, an end within seconds, and nothing false on the disk."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentbench_kv.cli.interrupts import interruptible
from agentbench_kv.errors import EngineGoneError
from agentbench_kv.results.records import TrialStatus
from agentbench_kv.results.run_reader import RunReader

LONG = 300
RUN = [
    *("run", "--method", "agentkv", "--budget", "96", "--set", "interval=32"),
    *("--task", "micro/recall-1k", "--limit", "9", "--concurrency", "3", "--json", "--quiet"),
]


def start(out: Path, *more: str) -> subprocess.Popen[str]:
    own = {key: value for key, value in os.environ.items() if not key.startswith("KVBENCH_")}
    code = "from agentbench_kv.cli import main; main()"
    return subprocess.Popen(
        [sys.executable, "-c", code, *RUN, "--out", str(out), *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**own, "OMP_NUM_THREADS": "1"},
    )


def run_in(out: Path) -> RunReader:
    (path,) = out.glob("*/run.json")
    return RunReader(path.parent)


def lines(out: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in out.glob("*/samples.jsonl"))


def wait_for(condition: Any, child: subprocess.Popen[str]) -> None:
    latest = time.monotonic() + LONG
    while not condition():
        assert child.poll() is None, child.communicate()
        assert time.monotonic() < latest
        time.sleep(0.01)


def facts(out: Path) -> dict[str, Any]:
    """Return all that a run says, but for times, by sample."""
    run = run_in(out)
    found: dict[str, Any] = {}
    for record in run.trials():
        data = json.loads(
            json.dumps({name: str(getattr(record, name)) for name in record.__struct_fields__})
        )
        data.pop("timing")
        found[record.sample_id] = [data, run.transcript(record)]
    for turn in run.turns():
        row = {name: getattr(turn, name) for name in turn.__struct_fields__}
        found[turn.sample_id].append({k: v for k, v in row.items() if not k.endswith("_ms")})
    return found


def check_whole(out: Path) -> None:
    """Check that what is on the disk was played to its end, and nothing else is there."""
    run = run_in(out)
    trials = run.trial_lines()
    assert not trials.torn
    assert {record.status for record in trials.records} == {TrialStatus.SCORED}
    assert len({record.key for record in trials.records}) == len(trials.records)
    assert run.interrupted


@pytest.mark.slow
def test_interrupted_runs_end_as_if_nothing_had_been(tmp_path: Path) -> None:
    calm, stormy = tmp_path / "calm", tmp_path / "stormy"
    child = start(calm)
    out, _ = child.communicate(timeout=LONG)
    assert json.loads(out)[0]["validity"]["state"] == "valid"
    for signals in ([signal.SIGINT], [signal.SIGTERM], [signal.SIGINT, signal.SIGINT]):
        before = lines(stormy)
        child = start(stormy)
        wait_for(lambda before=before: lines(stormy) > before, child)
        child.send_signal(signals[0])
        assert child.stderr is not None
        said = child.stderr.readline()
        assert said.startswith("kvbench: interrupted: cancelling the trials under way")
        for each in signals[1:]:
            child.send_signal(each)
        out, rest = child.communicate(timeout=LONG)
        assert (child.returncode, out, rest) == (130, "", "")
        check_whole(stormy)
        if len(signals) == 1:
            recorded = {record.transcript for record in run_in(stormy).trials()}
            left = {f"transcripts/{path.name}" for path in stormy.glob("*/transcripts/*")}
            assert left == recorded
    assert 3 <= lines(stormy) < 9
    child = start(stormy)
    out, _ = child.communicate(timeout=LONG)
    assert child.returncode == 0
    assert json.loads(out)[0]["validity"]["state"] == "valid"
    assert facts(stormy) == facts(calm)


CHILD = """
import sys, threading, time
from agentbench_kv.cli.interrupts import interruptible

def hang():
    while True:
        time.sleep(1)

with interruptible():
    if "thread" in sys.argv:
        threading.Thread(target=hang).start()
    try:
        print("ready", flush=True)
        hang()
    finally:
        print("ending", flush=True)
        if "slow" in sys.argv:
            hang()
"""


@pytest.fixture
def child(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    made = subprocess.Popen(
        [sys.executable, "-c", CHILD, *request.param],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert made.stdout is not None
    assert made.stdout.readline() == "ready\n"
    yield made
    made.kill()
    made.communicate()


@pytest.mark.parametrize("child", [[], ["thread"]], indirect=True, ids=["", "hanging thread"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_says_what_it_does_and_ends_in_order(
    child: subprocess.Popen[str], number: signal.Signals
) -> None:
    child.send_signal(number)
    out, err = child.communicate(timeout=LONG)
    assert (child.returncode, out) == (130, "ending\n")
    assert err.count("\n") == 1
    assert "of which nothing is recorded; the same command goes on" in err


@pytest.mark.parametrize("child", [["slow"]], indirect=True)
@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_ends_at_once(
    child: subprocess.Popen[str], second: signal.Signals
) -> None:
    child.send_signal(signal.SIGINT)
    assert child.stdout is not None
    assert child.stdout.readline() == "ending\n"
    child.send_signal(second)
    out, err = child.communicate(timeout=LONG)
    assert (child.returncode, out) == (130, "")
    assert err.count("\n") == 1


def test_handlers_are_given_back_and_ignored_signals_stay_ignored() -> None:
    theirs = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interruptible():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGINT) is not theirs[signal.SIGINT]
        with pytest.raises(EngineGoneError), interruptible():
            raise EngineGoneError("gone")
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, theirs[signal.SIGHUP])
    assert {n: signal.getsignal(n) for n in theirs} == theirs


def test_outside_of_the_main_thread_signals_are_left_alone() -> None:
    done = []

    def inside() -> None:
        with interruptible():
            done.append(True)

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join(LONG)
    assert done == [True]


FINALIZER = """
import os, signal, sys, weakref
from agentbench_kv.cli import interrupts

class Deleted:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):
            pass

def called():
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(1000):
        pass

def wait(kind):
    if kind == "del":
        thing = Deleted()
    else:
        thing = type("Thing", (), {})()
        weakref.finalize(thing, called)
    del thing
    signal.pause()  # until the signal comes again

try:
    if sys.argv[2] == "early":
        interrupts.raise_interrupts()
        wait(sys.argv[1])
    else:
        with interrupts.interruptible():
            wait(sys.argv[1])
except KeyboardInterrupt:
    print("raised")
"""


@pytest.mark.parametrize("kind", ["del", "weakref"])
@pytest.mark.parametrize("when", ["early", "in order"])
def test_an_interrupt_while_an_object_is_deleted_is_not_lost(kind: str, when: str) -> None:
    words = [sys.executable, "-c", FINALIZER, kind, when]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=LONG, check=False)
    assert "ignored" not in ended.stderr
    if when == "early":
        assert (ended.returncode, ended.stdout, ended.stderr) == (0, "raised\n", "")
    else:
        assert ended.returncode == 130
        assert ended.stderr.count("\n") == 1


AT_EXIT = """
import atexit, os, signal
from agentbench_kv import cli

@atexit.register
def late():
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(1000):
        pass
    print("not reached")

cli.main()
"""


def test_an_interrupt_while_the_interpreter_cleans_up_prints_nothing() -> None:
    words = [sys.executable, "-c", AT_EXIT, "--version"]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=LONG, check=False)
    assert ended.stderr == ""
    assert "not reached" not in ended.stdout
    assert "kvbench" in ended.stdout
