"""Workers as forks of the test's process, which has loaded what they need."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from agentbench_kv.cli.sweep_worker import work
from agentbench_kv.run import runner
from agentbench_kv.run.spec import RunSpec, resolve
from agentbench_kv.sweeps import executors, supervise, worker
from agentbench_kv.sweeps.executors import StartedWorker, SweepExecutor
from agentbench_kv.sweeps.grid import SweepRun
from agentbench_kv.sweeps.worker import Order

_FORK = multiprocessing.get_context("fork")


class ForkedWorker(StartedWorker):
    def __init__(self, order: Order, log: Path) -> None:
        self.order = order
        self.log = log
        self.process = _FORK.Process(target=self._become)
        self.process.start()

    def _become(self) -> None:
        opened = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(opened, 1)
        os.dup2(opened, 2)
        sys.stdout = sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        work(self.order.document())

    def ended(self) -> str | None:
        code = self.process.exitcode
        return None if code is None else "" if code == 0 else f"exit code {code}"

    def stop(self) -> None:
        self.process.terminate()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


class ForkExecutor(SweepExecutor):
    """Forks; remembers whom it started."""

    name = "fork"

    def __init__(self, logs: Path) -> None:
        self.logs = logs
        self.workers: list[ForkedWorker] = []

    def start(self, order: Order) -> ForkedWorker:
        self.workers.append(ForkedWorker(order, self.logs / f"{order.worker}.log"))
        return self.workers[-1]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look often, so that tests need not wait; and ask git for the commit once, not every run."""
    monkeypatch.setattr(worker, "LOOK_S", 0.05)
    monkeypatch.setattr(supervise, "POLL_S", 0.05)
    monkeypatch.setattr(executors, "PATIENCE_S", 60.0)
    found = runner.environment()
    monkeypatch.setattr(runner, "environment", lambda _: found)


@pytest.fixture
def fork(tmp_path: Path) -> ForkExecutor:
    return ForkExecutor(tmp_path)


def gold(**changes: Any) -> RunSpec:
    values = {
        "engine": "scripted", "model": "gold", "method": "full", "budget": None,
        "task": "micro/recall-1k", "limit": 2, "concurrency": 2, **changes,
    }  # fmt: skip
    return resolve(RunSpec(**values), {})


@pytest.fixture
def jobs() -> Callable[..., list[SweepRun]]:
    """Return a function that makes runs of the scripted engine, one for each seed."""

    def make(count: int, **changes: Any) -> list[SweepRun]:
        return [SweepRun(gold(seed=seed, **changes)) for seed in range(count)]

    return make


def figures(out: Path, run: str) -> dict[tuple[str, int], Any]:
    """What a run found, by sample and trial: each has one line, and nothing that is a time."""
    lines = (out / run / "samples.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    found = {(each["sample_id"], each["trial"]): each for each in records}
    assert len(found) == len(records), f"{run}: a trial was played twice"
    kept = ("status", "score", "seed", "kv", "usage", "prompt_sha")
    return {key: {name: each.get(name) for name in kept} for key, each in found.items()}


def all_figures(out: Path, jobs: Sequence[SweepRun]) -> dict[str, Any]:
    return {job.name: figures(out, job.name) for job in jobs}


@pytest.fixture
def played() -> Callable[..., dict[str, Any]]:
    """Return a function that returns the figures of runs; each trial must be there once."""
    return all_figures


@pytest.fixture
def sequential(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Return a function that plays runs one after the other and returns their figures."""

    def play(jobs: Sequence[SweepRun]) -> dict[str, Any]:
        out = tmp_path / "sequential"
        for job in jobs:
            runner.run_one(job.spec, out, lambda *_: None)
        return all_figures(out, jobs)

    return play
