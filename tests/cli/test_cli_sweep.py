"""`kvbench sweep` and the files of `kvbench run`, through the command line."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from agentbench_kv.cli import sweep as verb
from agentbench_kv.results.objects import FolderObjects
from agentbench_kv.sweeps import supervise
from agentbench_kv.sweeps.executors import StartedWorker, SweepExecutor
from agentbench_kv.sweeps.sweep import find_sweep
from agentbench_kv.sweeps.worker import Order, Worker

FILE = """
runs:
  - {task: micro/recall-1k, engine: scripted, model: [gold, "null"], seed: [0, 1], limit: 2}
exclude:
  - {model: "null", seed: 1}
"""
GOLD = ("--task", "micro/recall-1k", "--engine", "scripted", "--model", "gold", "--limit", "2")


class Here(SweepExecutor, StartedWorker):
    """Lets a worker play in this very process, before anything else happens."""

    name = "here"

    def start(self, order: Order) -> StartedWorker:
        Worker(order, lambda *_: None).work()
        return self

    def ended(self) -> str:
        return ""

    def stop(self) -> None: ...

    def kill(self) -> None: ...


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verb, "_executor", lambda *_: Here())
    monkeypatch.setattr(supervise, "POLL_S", 0.01)


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "sweep.yaml"
    path.write_text(FILE)
    return str(path)


def documents(result: Any) -> Any:
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_a_sweep_lists_what_it_would_run_under_the_names_that_run_gives(kvbench, file):
    planned = documents(kvbench("sweep", file, "--dry-run", "--json"))
    assert [(run["spec"]["model"], run["spec"]["seed"]) for run in planned] == [
        *(("gold", 0), ("gold", 1), ("null", 0)),
    ]
    one = documents(kvbench("run", *GOLD, "--seed", "1", "--dry-run", "--json"))
    assert planned[1] == one[0]
    without = documents(kvbench("sweep", *GOLD, "--seed", "1", "--dry-run", "--json"))
    assert without == one
    changed = documents(kvbench("sweep", file, "--limit", "1", "--dry-run", "--json"))
    assert {run["spec"]["limit"] for run in changed} == {1}
    assert "3 runs; nothing was started" in kvbench("sweep", file, "--dry-run").stdout


@pytest.mark.usefixtures("here")
def test_a_sweep_plays_says_how_far_it_is_and_goes_on(kvbench, file):
    done = kvbench("sweep", file)
    assert done.returncode == 0, done.stderr
    assert "kvbench: 3 runs: 3 done" in done.stderr
    assert "micro_recall-1k-full-bnone-null-s0" in done.stdout
    status = documents(kvbench("sweep", "status", "--json"))
    assert status["counts"] == {"done": 3, "running": 0, "waiting": 0, "given_up": 0}
    assert {run["trials"] for run in status["runs"]} == {2}
    assert "3 runs: 3 done" in kvbench("sweep", "status").stdout
    before = Path("runs").stat().st_mtime
    again = kvbench("sweep", file, "--json")
    assert [run["state"] for run in documents(again)["runs"]] == ["done"] * 3
    assert Path("runs").stat().st_mtime == before
    # A run of a sweep is the run of that command.
    one = documents(kvbench("run", *GOLD, "--seed", "1", "--json"))
    assert one[0]["path"] == str(Path("runs") / one[0]["run_id"])
    assert not json.loads((Path(one[0]["path"]) / "run.json").read_text())["resumes"][1:]


@pytest.mark.usefixtures("here")
def test_a_run_that_fails_ends_with_its_reason(kvbench, file, monkeypatch):
    from agentbench_kv.sweeps.place import LocalPlace

    def broken(*_: Any) -> None:
        raise ValueError("kaputt")

    monkeypatch.setattr(LocalPlace, "play", broken)
    done = kvbench("sweep", file, "--limit", "1", "--retries", "0")
    assert done.returncode == 1
    assert "3 runs: 3 given up" in done.stderr
    assert "-gold-s0-" in done.stderr
    assert "ValueError: kaputt" in done.stderr
    shown = documents(kvbench("sweep", "status", "--json"))
    assert {run["error"] for run in shown["runs"]} == {"ValueError: kaputt"}


def test_a_cancelled_sweep_is_said_to_be(kvbench, file, monkeypatch):
    class Cancelled(Here):
        def start(self, order: Order) -> StartedWorker:
            find_sweep(FolderObjects(Path(order.out))).cancel()
            return self

    monkeypatch.setattr(verb, "_executor", lambda *_: Cancelled())
    monkeypatch.setattr(supervise, "POLL_S", 0.01)
    done = kvbench("sweep", file)
    assert (done.returncode, "it was cancelled" in done.stderr) == (1, True)
    assert "the same command goes on with it" in done.stderr
    told = kvbench("sweep", "cancel")
    assert "1 command told to end" in told.stdout
    assert documents(kvbench("sweep", "status", "--json"))["cancelled"] is True


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("sweep", "none.yaml"), "cannot read none.yaml: No such file"),
        (("sweep", "bad.yaml"), "unknown key 'bugdet' in runs[0]; did you mean 'budget'?"),
        (("sweep", *GOLD, "--slurm", "partition=x"), "only with --on slurm"),
        (("sweep", "status"), "no sweep here"),
        (("sweep", "cancel", "--out", "nonsense://x"), "nonsense"),
        (("sweep", *GOLD, "--method", "fulll"), "did you mean 'full'"),
        (("sweep", *GOLD, "--out", "github://a:b@c/x"), ""),
        (("run", "--config", "list.yaml"), "model has 2 values; kvbench run takes one"),
        (("run", "--config", "bad.yaml"), "unknown key 'runs'"),
    ],
)
def test_what_is_wrong_is_one_line(kvbench, args, said):
    Path("bad.yaml").write_text("runs: [{bugdet: 3}]")
    Path("list.yaml").write_text("model: [a, b]")
    done = kvbench(*args)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_options_are_saved_and_read_again(kvbench):
    options = (
        *("--method", "full", "--method", "snapkv", "--budget", "64", "--budget", "25%"),
        *("--task", "micro/recall-1k", "--seed", "3", "--seed", "4", "--limit", "2"),
        *("--set", "chunk=64", "--max-tokens", "77", "--allow-untested-engine", "--timeout", "9"),
    )
    planned = documents(kvbench("run", *options, "--dry-run", "--json", "--save-config", "c.yaml"))
    assert documents(kvbench("run", "--config", "c.yaml", "--dry-run", "--json")) == planned
    # What is said on the command line, or in the environment, comes first.
    over = kvbench("run", "--config", "c.yaml", "--seed", "9", "--dry-run", "--json")
    assert {run["spec"]["seed"] for run in documents(over)} == {9}
    twin = kvbench("run", "--config", "c.yaml", "--dry-run", "--json", KVBENCH_MAX_TOKENS="8")
    assert {run["spec"]["max_tokens"] for run in documents(twin)} == {8}
    # And a saved file is a grid of a sweep.
    saved = Path("c.yaml").read_text()
    Path("s.yaml").write_text("runs:\n  - " + saved.replace("\n", "\n    "))
    assert documents(kvbench("sweep", "s.yaml", "--dry-run", "--json")) != []


def test_the_schema_is_printed(kvbench):
    assert documents(kvbench("sweep", "schema"))["title"] == "kvbench sweep"


@pytest.mark.slow
def test_workers_are_processes_of_this_machine(kvbench_process, tmp_path, file):
    began = time.time()
    done = kvbench_process("sweep", file, "--workers", "2")
    assert done.returncode == 0, done.stderr
    logs = list((tmp_path / "runs/.sweeps").glob("*/logs/*.log"))
    assert logs
    assert all(log.stat().st_mtime >= began for log in logs)
    assert len(list((tmp_path / "runs").glob("*/summary.json"))) == 3
