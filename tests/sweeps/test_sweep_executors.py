"""Where workers run: this machine, submitit, Slurm's commands, Ray; and what each refuses."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest

from agentbench_kv.errors import PrerequisiteError
from agentbench_kv.sweeps import executors
from agentbench_kv.sweeps.executors import LocalExecutor, RayExecutor, SlurmExecutor
from agentbench_kv.sweeps.worker import Order

FAULTS = Path(__file__).parents[2] / "benchmarks/sweep_faults.py"


def needs(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed; pip install 'agentbench-kv[ray,slurm]'")


@pytest.mark.slow
@pytest.mark.parametrize("on", ["local", "submitit", "slurm", "ray"])
def test_workers_that_are_killed_lose_nothing(tmp_path, on):
    """`benchmarks/sweep_faults.py` in small, with processes of every kind."""
    needs({"submitit": "submitit", "slurm": "submitit", "ray": "ray"}.get(on, "click"))
    command = [sys.executable, str(FAULTS), "--out", str(tmp_path), "--on", on, "--runs", "4"]
    small = ["--kills", "1", "--engine", "scripted", "--limit", "20"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "KVBENCH_HOME": str(tmp_path / "home")}
    environment |= {"RAY_AUTH_MODE": "disabled", "RAY_raylet_start_wait_time_s": "300"}
    done = subprocess.run(
        [*command, *small],
        capture_output=True,
        text=True,
        env=environment,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "4 of 4 runs complete" in done.stdout
    assert "1 workers killed, 0 with other figures, 0 done twice" in done.stdout


class Popen:
    """Starts nothing."""

    started: ClassVar[list[dict[str, str]]] = []
    code: int | None = None

    stdin = None

    def __init__(self, command: list[str], env: dict[str, str], **_: Any) -> None:
        del command
        self.started.append(env)

    def poll(self) -> int | None:
        return self.code


@pytest.fixture
def local(tmp_path, monkeypatch) -> LocalExecutor:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,7")
    monkeypatch.setattr(executors.os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(executors.subprocess, "Popen", Popen)
    monkeypatch.setattr(Popen, "started", [])
    return LocalExecutor(tmp_path)


def order(cpus: int, gpus: int) -> Order:
    return Order("runs", "s", "c", f"w{cpus}{gpus}", cpus, gpus)


def test_workers_of_this_machine_share_its_cores_and_gpus(local, monkeypatch):
    first = local.start(order(3, 2))
    assert local.room(5, 1)
    assert not local.room(6, 0)  # cores
    assert not local.room(1, 2)  # GPUs
    local.start(order(5, 1))
    assert [env["CUDA_VISIBLE_DEVICES"] for env in Popen.started] == ["3,5", "7"]
    assert [env["OMP_NUM_THREADS"] for env in Popen.started] == ["3", "5"]
    assert not local.room(1, 0)
    monkeypatch.setattr(Popen, "code", 0)
    assert first.ended() == ""
    assert first.ended() == ""  # its cores come free once
    assert local.room(3, 2)
    assert not local.room(4, 0)


def test_a_run_that_needs_more_cores_than_there_are_runs_alone(local):
    assert local.room(64, 0)
    local.start(order(64, 0))
    assert not local.room(1, 0)


def test_a_run_that_needs_more_gpus_than_there_are_is_refused(local):
    with pytest.raises(PrerequisiteError, match="needs 4 GPUs and this machine has 3"):
        local.room(1, 4)


def test_how_a_worker_ended_is_the_last_line_of_its_log(local, tmp_path, monkeypatch):
    started = local.start(order(1, 0))
    (tmp_path / "w10.log").write_text("x\nkvbench: no space left\n")
    monkeypatch.setattr(Popen, "code", 2)
    assert started.ended() == f"exit code 2; kvbench: no space left ({tmp_path / 'w10.log'})"


@pytest.mark.parametrize("package", ["ray", "submitit"])
def test_a_package_that_is_missing_is_named_with_its_extra(tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(PrerequisiteError, match=r"pip install 'agentbench-kv\[") as caught:
        RayExecutor(print) if package == "ray" else SlurmExecutor(print, tmp_path, {}, None)
    assert "\n" not in str(caught.value)


def test_slurm_that_is_not_there_is_one_line(tmp_path, monkeypatch):
    needs("submitit")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PrerequisiteError, match="--slurm cluster=local") as caught:
        SlurmExecutor(print, tmp_path, {}, None)
    assert "\n" not in str(caught.value)


def test_slurm_gets_its_own_options_and_the_hours():
    needs("submitit")
    assert executors._typed({"partition": "gpu", "mem-per-cpu": "2"}, "slurm") == {
        "slurm_partition": "gpu",
        "slurm_mem_per_cpu": 2,
    }


@pytest.mark.slow
def test_workers_end_when_the_command_is_killed(tmp_path):
    """Nobody is left who plays on, though nothing could tell the workers."""
    sweep = tmp_path / "s.yaml"
    sweep.write_text(
        "runs: [{task: micro/recall-1k, engine: scripted, model: gold, limit: 100000}]"
    )
    starter = subprocess.Popen(
        [sys.executable, "-c", "from agentbench_kv.cli import main; main()", "sweep", str(sweep)],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 500
    while not (logs := list(tmp_path.glob("runs/*/samples.jsonl"))):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    starter.send_signal(signal.SIGKILL)
    starter.wait()
    (path,) = tmp_path.glob("runs/.sweeps/*/workers/*.jsonl")
    while "interrupted" not in path.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert logs[0].stat().st_size > 0
