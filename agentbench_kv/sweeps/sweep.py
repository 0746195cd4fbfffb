"""A sweep in its folder: which runs, which commands work on them, what became of each run."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import Struct

from agentbench_kv.errors import UsageError
from agentbench_kv.results.objects import Objects
from agentbench_kv.results.store import suggestion
from agentbench_kv.run.spec import RunSpec
from agentbench_kv.sweeps.grid import SweepRun
from agentbench_kv.sweeps.journal import Histories, Journal, histories, read_journals
from agentbench_kv.sweeps.place import RunPlace, RunStanding, State

ROOT = ".sweeps"
MOST_DEATHS = 5  # of workers in one run, after which it is left alone


class Command(Struct, frozen=True):
    """One `kvbench sweep`: what it allows its workers."""

    id: str
    at: float  # seconds since 1970
    who: str
    on: str  # local, ray or slurm
    retries: int = 1
    until: float | None = None  # seconds since 1970, when its workers end
    banks: str | None = None  # folder of what memories read of the past, on every worker's machine


@dataclass(frozen=True)
class RunRow:
    """What is known of one run of a sweep."""

    job: SweepRun
    standing: RunStanding
    failed: int = 0
    died: int = 0
    given_up: bool = False
    seconds: float = 0.0
    error: str = ""

    @property
    def state(self) -> str:
        return "given up" if self.given_up else self.standing.state.value

    @property
    def decided(self) -> bool:
        return self.given_up or self.standing.state is State.DONE


@dataclass(frozen=True)
class Sweep:
    """What the workers of a sweep share, beside the runs themselves."""

    objects: Objects
    name: str
    jobs: Sequence[SweepRun] = field(repr=False)

    @classmethod
    def of(cls, objects: Objects, jobs: Sequence[SweepRun]) -> Sweep:
        """Return the sweep of these runs, the one that is there if it was begun before."""
        names = "\n".join(sorted(job.name for job in jobs))
        sweep = cls(objects, hashlib.sha256(names.encode()).hexdigest()[:10], jobs)
        entries = [
            {"spec": job.spec.document(), "cpus": job.cpus, "gpus": job.gpus} for job in jobs
        ]
        objects.write(f"{ROOT}/{sweep.name}.json", json.dumps({"runs": entries}, indent=1).encode())
        return sweep

    @classmethod
    def load(cls, objects: Objects, name: str) -> Sweep:
        raw = objects.read(f"{ROOT}/{name}.json")
        try:
            entries = json.loads(raw or b"")["runs"]
            jobs = [SweepRun(RunSpec(**e["spec"]), int(e["cpus"]), int(e["gpus"])) for e in entries]
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{ROOT}/{name}.json is no sweep's plan: {error}") from error
        return cls(objects, name, jobs)

    def register(
        self, on: str, retries: int, until: float | None, banks: str | None = None
    ) -> Command:
        """Note down that a command begins to work on the sweep."""
        who = f"pid {os.getpid()} on {socket.gethostname()}"
        command = Command(uuid.uuid4().hex[:12], time.time(), who, on, retries, until, banks)
        self.objects.write(self._at(f"commands/{command.id}.json"), msgspec.json.encode(command))
        return command

    def commands(self) -> list[Command]:
        """Return all commands that ever worked on the sweep, the latest last."""
        found = []
        for name in self.objects.names(self._at("commands")):
            try:
                raw = self.objects.read(self._at(f"commands/{name}")) or b""
                found.append(msgspec.json.decode(raw, type=Command))
            except msgspec.MsgspecError:
                continue
        return sorted(found, key=lambda command: command.at)

    def cancel(self) -> int:
        """Tell the workers of all commands so far to end; return how many commands that are."""
        commands = self.commands()
        for command in commands:
            self.objects.write(self._at(f"cancelled/{command.id}"), b"")
        return len(commands)

    def cancelled(self, command: str) -> bool:
        return self.objects.read(self._at(f"cancelled/{command}")) is not None

    def journal(self, worker: str, command: str) -> Journal:
        return Journal(self.objects, self._at("workers"), worker, command)

    def histories(self, command: str) -> Histories:
        return histories(read_journals(self.objects, self._at("workers")), command)

    def rows(self, place: RunPlace, command: Command | None) -> tuple[list[RunRow], Histories]:
        """Return what is known of every run, by what a command allows."""
        known = self.histories(command.id if command else "")
        standings = place.standings([job.name for job in self.jobs])
        retries = command.retries if command else 0
        rows = []
        for job in self.jobs:
            standing, history = standings[job.name], known.of(job.name)
            # Whoever began a run that nobody holds, and did not say how it ended, is dead.
            free = standing.state is State.FREE
            died = len(history.begun) if free else 0
            given_up = free and (history.failed > retries or died >= MOST_DEATHS)
            error = history.error or ("its workers died" if given_up else "")
            rows.append(
                RunRow(job, standing, history.failed, died, given_up, history.seconds, error)
            )
        return rows, known

    def _at(self, name: str) -> str:
        return f"{ROOT}/{self.name}/{name}"


def find_sweep(objects: Objects, name: str = "") -> Sweep:
    """Return the sweep whose name begins so, or the only one there is."""
    known = [each.removesuffix(".json") for each in objects.names(ROOT) if each.endswith(".json")]
    if not known:
        raise UsageError("no sweep here; kvbench sweep FILE begins one")
    matching = [each for each in known if each.startswith(name)]
    if not matching:
        raise UsageError(f"no sweep {name!r} here{suggestion(name, known)}")
    if len(matching) > 1:
        raise UsageError(f"{len(matching)} sweeps are here: --sweep {' or '.join(matching)}")
    return Sweep.load(objects, matching[0])


def document(row: RunRow) -> dict[str, Any]:
    """Return a row for JSON."""
    return {
        "run_id": row.job.name,
        "state": row.state,
        "trials": row.standing.finished,
        "expected": row.standing.expected,
        "by": row.standing.holder,
        "failed": row.failed,
        "died": row.died,
        "seconds": row.seconds,
        "error": row.error,
    }
