"""The checker of the fault campaign: whoever doubles, drops or falsifies a record is found out."""

from __future__ import annotations

import fcntl
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faults_case import tear
from faults_check import Undisturbed, check_finished, check_records

from agentbench_kv.results.records import TrialRecord, TurnRecord
from agentbench_kv.results.store import RunStore
from agentbench_kv.results.summary import summarize

Spoil = Callable[[Path], None]


def make_run(out: Path, seconds: float = 1.0) -> Path:
    """Write a finished run of five trials with two turns each."""
    with RunStore(out).open("a-run", {"task": "t", "method": "full"}, {}, 5) as run:
        for number in range(5):
            name = f"s{number}"
            turns = [
                TurnRecord(sample_id=name, trial=0, turn=turn, output_tokens=3, ttft_ms=seconds)
                for turn in range(2)
            ]
            run.append_turns(turns)
            said = {"transcript": [name], "steps": [{"seconds": seconds}]}
            path = run.save_transcript(name, 0, said)
            score = float(number % 2)
            record = TrialRecord(
                sample_id=name, trial=0, seed=number, status="scored", score=score,
                timing={"e2e_s": seconds}, kv={"logical": 9, "peak_live": 9}, transcript=path,
            )  # fmt: skip
            run.append_trial(record)
    summarize(run)
    return out / "a-run"


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return Undisturbed(make_run(tmp_path_factory.mktemp("calm")))


@pytest.fixture(scope="module")
def again(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("again"), seconds=2.0)


@pytest.fixture
def run(again: Path, tmp_path: Path) -> Path:
    return shutil.copytree(again, tmp_path / "runs" / again.name)


def change(run: Path, number: int, **values: Any) -> None:
    """Change fields of a line of `samples.jsonl`; None deletes the line."""
    path = run / "samples.jsonl"
    lines = path.read_bytes().splitlines()
    lines[number] = json.dumps({**json.loads(lines[number]), **values}).encode()
    path.write_bytes(b"\n".join(lines) + b"\n")


def drop(run: Path) -> None:
    lines = (run / "samples.jsonl").read_bytes().splitlines(keepends=True)
    (run / "samples.jsonl").write_bytes(b"".join(lines[:2] + lines[3:]))


def double(run: Path) -> None:
    lines = (run / "samples.jsonl").read_bytes().splitlines(keepends=True)
    (run / "samples.jsonl").write_bytes(b"".join([*lines, lines[1]]))


def garble(run: Path) -> None:
    path = run / "samples.jsonl"
    path.write_bytes(path.read_bytes() + b"\0\0\0\n")


def double_turns(run: Path) -> None:
    path = run / "turns.jsonl"
    lines = path.read_bytes().splitlines()
    turn = {**json.loads(lines[-1]), "turn": 2}
    path.write_bytes(path.read_bytes() + json.dumps(turn).encode() + b"\n")


def cut_turns(run: Path) -> None:
    lines = (run / "turns.jsonl").read_bytes().splitlines(keepends=True)
    (run / "turns.jsonl").write_bytes(b"".join(lines[:3] + lines[4:]))


def swap_transcripts(run: Path) -> None:
    first, second, *_ = sorted((run / "transcripts").iterdir())
    first.write_bytes(second.read_bytes())


def empty_transcript(run: Path) -> None:
    min((run / "transcripts").iterdir()).write_bytes(b"")


def raise_summary(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_bytes())
    summary["score"]["point"] = 1.0
    (run / "summary.json").write_text(json.dumps(summary))


def leave_file(run: Path) -> None:
    (run / "transcripts" / ".x.json.1.2.tmp").write_bytes(b"")


ZERO = {"status": "timeout", "score": None, "timing": {}, "error": "shut down"}
SPOILT: list[tuple[str, Spoil]] = [
    ("lost", drop),
    ("lost", lambda run: change(run, 4, status="infra_error", score=None, timing={})),
    ("lost", garble),
    ("lost", empty_transcript),
    ("lost", lambda run: shutil.rmtree(run / "transcripts")),
    ("lost", lambda run: (run / "summary.json").unlink()),
    ("doubled", double),
    ("false", lambda run: change(run, 1, score=0.0)),
    ("false", lambda run: change(run, 1, **ZERO)),
    ("false", lambda run: change(run, 0, seed=9)),
    ("false", lambda run: change(run, 0, kv={"logical": 8, "peak_live": 8, "recomputed": 0})),
    ("false", lambda run: change(run, 0, sample_id="another")),
    ("false", double_turns),
    ("false", cut_turns),
    ("false", swap_transcripts),
    ("false", raise_summary),
    ("left", leave_file),
]


def test_what_may_differ_is_no_problem(run: Path, calm: Undisturbed) -> None:
    assert check_finished(run, calm) == []
    assert calm.complete(run)


@pytest.mark.parametrize(("what", "spoil"), SPOILT)
def test_what_was_spoilt_by_hand_is_reported(
    run: Path, calm: Undisturbed, what: str, spoil: Spoil
) -> None:
    spoil(run)
    assert what in {problem.what for problem in check_finished(run, calm)}


def test_a_false_record_is_found_though_a_true_one_follows(run: Path, calm: Undisturbed) -> None:
    true = (run / "samples.jsonl").read_bytes()
    change(run, 3, **ZERO)
    path = run / "samples.jsonl"
    path.write_bytes(path.read_bytes() + true.splitlines(keepends=True)[3])
    assert {problem.what for problem in check_records(run, calm)} == {"false", "doubled"}


def test_attempts_lost_to_infrastructure_are_no_problem(run: Path, calm: Undisturbed) -> None:
    path = run / "samples.jsonl"
    true = path.read_bytes()
    change(run, 0, status="infra_error", score=None, timing={}, error="the worker died")
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0] + true)
    assert [problem for problem in check_finished(run, calm) if problem.what != "false"] == []
    assert calm.complete(run)


def test_a_held_lock_is_reported(run: Path, calm: Undisturbed) -> None:
    held = os.open(run / ".lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert [problem.where for problem in check_finished(run, calm)] == [".lock"]
    finally:
        os.close(held)


@pytest.mark.parametrize("seed", range(40))
def test_torn_files_are_what_a_crash_can_leave(run: Path, calm: Undisturbed, seed: int) -> None:
    whole = (run / "samples.jsonl").read_bytes().splitlines(keepends=True)
    turns = (run / "turns.jsonl").read_bytes()
    rng = random.Random(seed)
    holes = tear(run, rng, rng.random())
    kept = (run / "samples.jsonl").read_bytes()
    assert kept.startswith(b"".join(whole[:-1])), "more than the last record was damaged"
    assert (run / "turns.jsonl").read_bytes().startswith(turns)
    assert check_records(run, calm) == []
    unreadable = [line for line in kept.splitlines(keepends=True) if line.startswith(b"\0")]
    assert holes == sum(line.endswith(b"\n") for line in unreadable)
