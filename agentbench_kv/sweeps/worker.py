"""One worker of a sweep: plays runs that nobody holds until there are none."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from agentbench_kv.errors import KVBenchError, UsageError
from agentbench_kv.results.files import LockedError
from agentbench_kv.results.objects import FolderObjects, Objects, RemoteObjects, local_folder
from agentbench_kv.results.run_info import RunHeldError
from agentbench_kv.results.store import RunLostError
from agentbench_kv.results.summary import Summary
from agentbench_kv.run.engines import EngineShelf
from agentbench_kv.run.runner import Progress
from agentbench_kv.sweeps.grid import LOADED, SweepRun
from agentbench_kv.sweeps.journal import quietly
from agentbench_kv.sweeps.leases import RemotePlace
from agentbench_kv.sweeps.place import LocalPlace, RunPlace, State
from agentbench_kv.sweeps.sweep import Command, RunRow, Sweep

_log = logging.getLogger(__name__)
LOOK_S = 2.0  # between looks whether the sweep was cancelled, or a held run is nobody's


@dataclass(frozen=True)
class Order:
    """What a worker is told: plain values, which any executor can carry."""

    out: str
    sweep: str
    command: str
    worker: str
    cpus: int = 1
    gpus: int = 0
    follows: bool = False  # whether it ends when its standard input does

    def document(self) -> dict[str, Any]:
        return asdict(self)


def opened(out: str) -> tuple[Objects, RunPlace]:
    """Return the objects and the runs of a folder or URL that was checked before."""
    folder = local_folder(out)
    if folder is not None:
        return FolderObjects(folder), LocalPlace(folder)
    objects = RemoteObjects(out)
    return objects, RemotePlace(objects)


class Worker:
    """Plays the runs of a sweep that need what this worker has."""

    def __init__(self, order: Order, progress: Progress) -> None:
        self._objects, self._place = opened(order.out)
        self._order = order
        self._sweep = Sweep.load(self._objects, order.sweep)
        self._command = _command(self._sweep, order.command)
        self._progress = progress
        self._journal = self._sweep.journal(order.worker, order.command)
        banks = self._command.banks
        self._shelf = EngineShelf(Path(banks) if banks else None)
        self._warm: tuple[str, ...] = ()  # what the last run has left loaded
        self._avoid: set[str] = set()  # runs that another one just took
        self._held: list[str] = []

    def work(self) -> None:
        """Play until nothing is free; an interruption ends the run under way as it does any."""
        self._journal.note("started", words=f"pid {os.getpid()} on {socket.gethostname()}")
        with Watch(self._sweep, self._command, self._order.follows), self._shelf:
            while (job := self._next()) is not None:
                self._play(job)
        self._journal.note("ended")

    def _next(self) -> SweepRun | None:
        free = self._free()
        while not free and self._place.unsure(self._held):
            time.sleep(LOOK_S)
            free = self._free()
        fresh = [row for row in free if row.job.name not in self._avoid]
        self._avoid.clear()
        return _chosen(fresh or free, self._warm, self._order.worker)

    def _free(self) -> list[RunRow]:
        """Return the runs that this worker can play; what others hold of them is `_held`."""
        rows, _ = self._sweep.rows(self._place, self._command)
        needs = (self._order.cpus, self._order.gpus)
        mine = [row for row in rows if not row.decided and row.job.needs == needs]
        self._held = [row.job.name for row in mine if row.standing.state is State.HELD]
        return [row for row in mine if row.standing.state is State.FREE]

    def _play(self, job: SweepRun) -> None:
        name, began = job.name, time.monotonic()
        self._journal.note("began", name)
        try:
            summary = self._place.play(job.spec, self._progress, self._shelf)
        except (RunHeldError, LockedError) as error:
            self._avoid.add(name)
            self._journal.note("held", name, words=str(error))
        except RunLostError as error:
            self._journal.note("lost", name, words=str(error))
        except Exception as error:  # noqa: BLE001  one broken run must not end the others
            self._journal.note("failed", name, words=_words(error))
        except BaseException:
            quietly(self._journal, "interrupted", name)
            raise
        else:
            self._warm = job.warm
            self._end(name, summary, time.monotonic() - began)

    def _end(self, name: str, summary: Summary, seconds: float) -> None:
        if summary.lost:
            words = f"{summary.lost} of {summary.trials} trials were lost; kvbench show {name}"
            self._journal.note("failed", name, seconds, words)
        else:
            self._journal.note("done", name, seconds)


def _chosen(free: Sequence[RunRow], warm: tuple[str, ...], worker: str) -> SweepRun | None:
    """Choose a run: one that failed least, that needs nothing new loaded, that few others want."""
    if not free:
        return None
    least = min(row.failed + row.died for row in free)
    jobs = [row.job for row in free if row.failed + row.died == least]
    for length in (len(warm), LOADED):
        alike = [job for job in jobs if warm and job.warm[:length] == warm[:length]]
        if alike:
            return alike[0]
    return jobs[sum(worker.encode()) % len(jobs)]


def _command(sweep: Sweep, name: str) -> Command:
    for command in sweep.commands():
        if command.id == name:
            return command
    raise UsageError(f"sweep {sweep.name} knows no command {name}")


def _words(error: Exception) -> str:
    if isinstance(error, KVBenchError):
        _log.warning("kvbench: %s", error)
        return str(error)
    traceback.print_exc()
    return f"{type(error).__name__}: {error}"


class Watch:
    """Interrupts this process when the sweep is cancelled, out of time, or its starter is gone."""

    def __init__(self, sweep: Sweep, command: Command, follows: bool) -> None:
        self._sweep = sweep
        self._command = command
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._look, name="kvbench-watch", daemon=True)]
        if follows:
            self._threads.append(threading.Thread(target=self._follow, daemon=True))

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()

    def _look(self) -> None:
        until = self._command.until
        while not self._over.wait(LOOK_S):
            if until is not None and time.time() >= until:
                self._interrupt("its time is up")
                return
            try:
                if self._sweep.cancelled(self._command.id):
                    self._interrupt("it was cancelled")
                    return
            except KVBenchError:  # out of reach for a moment
                continue

    def _follow(self) -> None:
        os.read(0, 1)
        self._interrupt("its starter has ended")

    def _interrupt(self, why: str) -> None:
        if not self._over.is_set():
            _log.info("kvbench: the sweep ends: %s", why)
            os.kill(os.getpid(), signal.SIGTERM)
