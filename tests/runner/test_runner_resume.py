"""A run that is killed again and again ends up as if nothing had happened."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

RUN = [
    *("run", "--method", "agentkv", "--budget", "96", "--set", "interval=32"),
    *("--task", "micro/recall-1k", "--limit", "12", "--concurrency", "4", "--json"),
]


def command(out: Path, *more: str) -> list[str]:
    return [
        sys.executable,
        "-c",
        "from agentbench_kv.cli import main; main()",
        *RUN,
        "--out",
        str(out),
        *more,
    ]


def scores(out: Path) -> dict[str, tuple[float, int]]:
    (path,) = out.glob("*/samples.jsonl")
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({(r["sample_id"], r["trial"]) for r in records}) == len(records)
    return {r["sample_id"]: (r["score"], r["kv"]["evicted"]) for r in records}


@pytest.mark.slow
def test_kill_nine_loses_nothing(tmp_path: Path) -> None:
    calm, stormy = tmp_path / "calm", tmp_path / "stormy"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command(calm), check=True, capture_output=True, env=environment)
    rng = random.Random(0)
    kills = 0
    while kills < 3:
        child = subprocess.Popen(
            command(stormy), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment
        )
        samples = list(stormy.glob("*/samples.jsonl"))
        before = samples[0].stat().st_size if samples else 0
        deadline = time.monotonic() + 120
        while child.poll() is None and time.monotonic() < deadline:
            samples = list(stormy.glob("*/samples.jsonl"))
            if samples and samples[0].stat().st_size > before:
                break
            time.sleep(0.02)
        if child.poll() is not None:
            break
        time.sleep(rng.random() * 0.5)
        child.send_signal(signal.SIGKILL)
        child.communicate()
        kills += 1
    assert kills >= 1
    done = subprocess.run(command(stormy), check=True, capture_output=True, env=environment)
    assert json.loads(done.stdout)[0]["validity"]["state"] != "incomplete"
    assert scores(stormy) == scores(calm)
    assert len(scores(calm)) == 12


@pytest.mark.slow
def test_a_second_process_is_refused(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    # Long enough to be running still when the second process has started.
    endless = command(tmp_path, "--limit", "100000")
    first = subprocess.Popen(
        endless, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
    )
    try:
        while not list(tmp_path.glob("*/run.json")):
            assert first.poll() is None
            time.sleep(0.02)
        second = subprocess.run(
            endless, capture_output=True, text=True, check=False, env=environment
        )
    finally:
        first.kill()
        first.wait()
    assert second.returncode == 2
    assert f"pid {first.pid}" in second.stderr
    assert len(second.stderr.strip().splitlines()) == 1
