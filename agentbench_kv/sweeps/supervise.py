"""Keeping as many workers at a sweep as there is work and room for."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from agentbench_kv.errors import EngineGoneError
from agentbench_kv.sweeps.executors import StartedWorker, SweepExecutor, end_all
from agentbench_kv.sweeps.journal import Histories
from agentbench_kv.sweeps.place import RunPlace, State
from agentbench_kv.sweeps.sweep import Command, RunRow, Sweep
from agentbench_kv.sweeps.worker import Order

POLL_S = 1.0
MOST_STILLBORN = 3  # workers in a row that end before they have begun


@dataclass(frozen=True)
class SweepReport:
    """A sweep at one moment."""

    rows: Sequence[RunRow]
    workers: int = 0  # of this command, running or waiting for their place
    left_s: float | None = None  # as far as it can be told
    why: str = ""  # it ended before all was done

    def count(self, state: str) -> int:
        return sum(row.state == state for row in self.rows)

    @property
    def over(self) -> bool:
        return all(row.decided for row in self.rows)


Show = Callable[[SweepReport], None]


def report_of(
    rows: Sequence[RunRow], known: Histories, workers: int = 0, why: str = ""
) -> SweepReport:
    """Describe a sweep; the time left is by the mean of what was done."""
    left = [row for row in rows if not row.decided]
    playing = sum(row.standing.state is State.HELD for row in left)
    seconds = None
    if known.seconds and playing:
        each = sum(known.seconds) / len(known.seconds)
        # Runs under way are taken for half done.
        seconds = each * (len(left) - playing / 2) / playing
    return SweepReport(rows, workers, seconds if left else 0.0, why)


@dataclass
class Supervisor:
    """Starts workers, replaces those that die, and looks until every run is decided."""

    out: str
    sweep: Sweep
    place: RunPlace
    command: Command
    executor: SweepExecutor
    most: int  # workers at a time
    show: Show
    _handles: dict[str, StartedWorker] = field(default_factory=dict)
    _stillborn: int = 0

    def run(self) -> SweepReport:
        """Return how it ended; whatever interrupts it ends the workers first."""
        try:
            while True:
                report = self._look()
                self.show(report)
                if report.over or report.why:
                    return report
                time.sleep(POLL_S)
        finally:
            end_all(list(self._handles.values()), self.executor.patience_s)
            self.executor.close()

    def _look(self) -> SweepReport:
        rows, known = self.sweep.rows(self.place, self.command)
        why = self._why()
        if not why:
            self._reap(known)
            self._start(rows, known)
        return report_of(rows, known, len(self._handles), why)

    def _why(self) -> str:
        if self.command.until is not None and time.time() >= self.command.until:
            return "its time is up"
        return "it was cancelled" if self.sweep.cancelled(self.command.id) else ""

    def _reap(self, known: Histories) -> None:
        """Forget workers that have ended; EngineGoneError if they cannot even begin."""
        for name, handle in list(self._handles.items()):
            ended = handle.ended()
            if ended is None:
                continue
            del self._handles[name]
            self._stillborn = 0 if name in known.started else self._stillborn + 1
            if self._stillborn >= MOST_STILLBORN:
                raise EngineGoneError(f"the sweep's workers end before they begin: {ended}")

    def _start(self, rows: Sequence[RunRow], known: Histories) -> None:
        """Start workers for runs that nobody holds and no worker is on its way to."""
        busy = {worker for history in known.runs.values() for worker in history.begun}
        for cpus, gpus in dict.fromkeys(row.job.needs for row in rows):
            free = sum(
                not row.decided
                and row.standing.state is State.FREE
                and row.job.needs == (cpus, gpus)
                for row in rows
            )
            idle = sum(name not in busy for name in self._handles)
            for _ in range(free - idle):
                if len(self._handles) >= self.most or not self.executor.room(cpus, gpus):
                    break
                worker = f"{self.command.id[:6]}-{uuid.uuid4().hex[:6]}"
                order = Order(self.out, self.sweep.name, self.command.id, worker, cpus, gpus)
                self._handles[worker] = self.executor.start(order)
