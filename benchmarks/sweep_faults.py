"""A sweep whose workers are killed at random, against the same runs one after the other.

    python benchmarks/sweep_faults.py --out FOLDER [--on local|ray|submitit|slurm] [--runs 48]
        [--kills 10] [--engine embedded|scripted] [--limit 1] [--seed 0]

Micro runs of `--engine` are played in order by one process, then by `--workers` workers of the
executor, of which one that plays a run is killed (`kill -9`) at a random moment, until `--kills`
have died. Every run must be complete, every trial be there once, and all figures but times be
those of the first play. `submitit` is submitit's local executor; `slurm` is Slurm by the commands
of `sweep_slurm.py`, which really run the jobs. Exit code 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sweep_slurm

from agentbench_kv.cli.sweep_worker import work
from agentbench_kv.results.objects import objects_at
from agentbench_kv.run.runner import run_one
from agentbench_kv.run.spec import RunSpec, resolve
from agentbench_kv.sweeps import executors
from agentbench_kv.sweeps.executors import (
    LocalExecutor,
    RayExecutor,
    SlurmExecutor,
    SweepExecutor,
)
from agentbench_kv.sweeps.grid import SweepRun
from agentbench_kv.sweeps.journal import read_journals
from agentbench_kv.sweeps.supervise import Supervisor
from agentbench_kv.sweeps.sweep import Command, Sweep
from agentbench_kv.sweeps.worker import opened

METHODS = ("snapkv", "h2o", "rkv", "streamingllm", "tova", "keydiff")
BUDGETS = (64, 96)
EXACT = ("status", "score", "seed", "cluster", "kv", "usage", "prompt_sha", "metrics")


def runs_of(count: int, engine: str, limit: int) -> list[SweepRun]:
    """Return so many runs: methods and budgets on the micro model, or scripted agents."""
    found = []
    for number in range(count):
        method, budget = METHODS[number % 6], BUDGETS[number // 6 % 2]
        one = {"model": "micro", "method": method, "budget": budget}
        if engine == "scripted":
            one = {"model": ("gold", "null")[number % 2], "method": "full", "budget": None}
        seed = number // (12 if engine == "embedded" else 2)
        spec = RunSpec(engine, task="micro/recall-1k", seed=seed, limit=limit, **one)
        found.append(SweepRun(resolve(spec, {})))
    return found


def figures(folder: Path) -> dict[str, Any]:
    """Return a run's figures by sample and trial; a trial that is there twice ends the script."""
    lines = (folder / "samples.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    found = {f"{each['sample_id']}/{each['trial']}": each for each in records}
    if len(found) != len(records):
        sys.exit(f"{folder}: {len(records)} records of {len(found)} trials")
    return {key: {name: each.get(name) for name in EXACT} for key, each in found.items()}


class Killer(threading.Thread):
    """Kills workers that play, at random moments."""

    def __init__(self, sweep: Sweep, kills: int, seed: int, apart_s: float) -> None:
        super().__init__(daemon=True)
        self.left = kills
        self._sweep = sweep
        self._random = random.Random(seed)
        self._apart_s = apart_s
        self._dead: set[str] = set()

    def run(self) -> None:
        """Strike until as many have died as asked."""
        while self.left:
            time.sleep(0.05)
            playing = {
                worker: events
                for worker, events in self._journals().items()
                if worker not in self._dead and events[-1].event == "began"
            }
            if playing and self._strike(self._random.choice(sorted(playing)), playing):
                time.sleep(self._random.uniform(0.0, self._apart_s))

    def _strike(self, worker: str, playing: dict[str, Any]) -> bool:
        pid = int(playing[worker][0].words.split()[1])
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
        self._dead.add(worker)
        self.left -= 1
        print(f"killed {worker} (pid {pid}) in {playing[worker][-1].run}", flush=True)
        return True

    def _journals(self) -> dict[str, Any]:
        found = read_journals(self._sweep.objects, f".sweeps/{self._sweep.name}/workers")
        return {worker: events for worker, events in found.items() if events}


def executor_of(on: str, logs: Path, scratch: Path) -> SweepExecutor:
    if on == "ray":
        import ray

        ray.init(num_cpus=2, log_to_driver=False, include_dashboard=False)
        return RayExecutor(work)
    if on == "slurm":
        sweep_slurm.install(scratch)
        os.environ |= {"FAKE_SLURM": str(scratch), "PATH": f"{scratch}:{os.environ['PATH']}"}
        executors.ASK_S = 1.0
        return SlurmExecutor(work, logs, {}, None)
    if on == "submitit":
        executors.ASK_S = 1.0
        return SlurmExecutor(work, logs, {"cluster": "local"}, None)
    return LocalExecutor(logs)


def sequential(runs: Sequence[SweepRun], out: Path) -> dict[str, Any]:
    for run in runs:
        run_one(run.spec, out, lambda *_: None)
    return {run.name: figures(out / run.name) for run in runs}


def main() -> int:
    """Play both, compare, and print what was found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--on", default="local")
    parser.add_argument("--engine", default="embedded", choices=("embedded", "scripted"))
    for name, default in (("runs", 48), ("kills", 10), ("limit", 1), ("seed", 0), ("workers", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--apart", type=float, default=6.0, help="most seconds between kills")
    asked = parser.parse_args()
    runs = runs_of(asked.runs, asked.engine, asked.limit)
    began = time.monotonic()
    calm = sequential(runs, asked.out / f"sequential-{asked.engine}-{asked.limit}")
    print(f"{len(runs)} runs one after the other: {time.monotonic() - began:.0f} s", flush=True)
    out = (asked.out / asked.on).resolve()
    objects, place = objects_at(str(out)), opened(str(out))[1]
    sweep = Sweep.of(objects, runs)
    command: Command = sweep.register(asked.on, 1, None)
    killer, began = Killer(sweep, asked.kills, asked.seed, asked.apart), time.monotonic()
    killer.start()
    with tempfile.TemporaryDirectory() as scratch:
        executor = executor_of(asked.on, out / "logs", Path(scratch))
        whole = Supervisor(
            str(out), sweep, place, command, executor, asked.workers, lambda _: None
        ).run()
    stormy = {run.name: figures(out / run.name) for run in runs}
    done = Counter(
        event.run
        for events in read_journals(objects, f".sweeps/{sweep.name}/workers").values()
        for event in events
        if event.event == "done"
    )
    print(
        f"on {asked.on}: {whole.count('done')} of {len(runs)} runs complete in "
        f"{time.monotonic() - began:.0f} s, {asked.kills - killer.left} workers killed, "
        f"{sum(stormy[name] != calm[name] for name in stormy)} with other figures, "
        f"{sum(times > 1 for times in done.values())} done twice"
    )
    right = stormy == calm and whole.count("done") == len(runs) and not killer.left
    return 0 if right and set(done.values()) == {1} else 1


if __name__ == "__main__":
    sys.exit(main())
