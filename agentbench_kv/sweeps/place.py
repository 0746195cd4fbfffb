"""Where runs are: who holds each, and playing one that nobody holds."""

from __future__ import annotations

import fcntl
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from agentbench_kv.errors import PrerequisiteError, UsageError
from agentbench_kv.results import files
from agentbench_kv.results.run_info import RunInfo, RunStatus, holder, read_info
from agentbench_kv.results.run_reader import RunReader
from agentbench_kv.results.summary import Summary
from agentbench_kv.run.engines import EngineShelf
from agentbench_kv.run.runner import Progress, run_one
from agentbench_kv.run.spec import RunSpec

_MOUNTS = Path("/proc/self/mountinfo")
_LOCKS_STAY_HERE = ("nolock", "local_lock=all", "local_lock=flock", "localflock")


class State(StrEnum):
    """Whether a run may be played."""

    FREE = "waiting"
    HELD = "running"
    DONE = "done"


@dataclass(frozen=True)
class RunStanding:
    """A run's state now."""

    state: State
    finished: int = 0  # trials
    expected: int | None = None  # trials; None while unknown
    holder: str = ""  # who plays it


class RunPlace(ABC):
    """A folder of runs that workers share."""

    @abstractmethod
    def standings(self, runs: Iterable[str]) -> dict[str, RunStanding]:
        """Return how it stands with each run."""

    @abstractmethod
    def play(self, spec: RunSpec, progress: Progress, shelf: EngineShelf | None = None) -> Summary:
        """Claim a run, play what is missing of it, and let it go.

        `shelf` may have the engine ready, and gets it back.
        RunHeldError if another worker has it, RunLostError if another one took it over.
        """

    def unsure(self, runs: Iterable[str]) -> bool:  # noqa: ARG002
        """Whether more looking will tell that a run which looks held is nobody's."""
        return False


class LocalPlace(RunPlace):
    """A local or network folder: a run is claimed by its `run.json`, under the folder's lock."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self._done: dict[str, RunStanding] = {}

    def standings(self, runs: Iterable[str]) -> dict[str, RunStanding]:
        return {run: self._done.get(run) or self._standing(run) for run in runs}

    def play(self, spec: RunSpec, progress: Progress, shelf: EngineShelf | None = None) -> Summary:
        return run_one(spec, self.out, progress, shelf)

    def _standing(self, run: str) -> RunStanding:
        reader = RunReader(self.out / run)
        try:
            info = read_info(reader.path)
        except UsageError:  # whoever opens it says what is wrong
            info = None
        if info is None:
            return RunStanding(State.FREE)
        finished = len(reader.finished_trials())
        who = holder(info, time.time())
        state = State.HELD if who else _state(info, finished)
        found = RunStanding(state, finished, info.expected_trials, who or "")
        if state is State.DONE:
            self._done[run] = found
        return found


def _state(info: RunInfo, finished: int) -> State:
    whole = info.expected_trials is not None and finished >= info.expected_trials
    return State.DONE if whole and info.status is RunStatus.COMPLETE else State.FREE


def check_locks(folder: Path) -> None:
    """Refuse a folder whose locks do not hold back other processes, here or elsewhere."""
    with files.writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:  # somebody's lock holds
        pass
    except OSError as error:
        raise _unlocked(folder, error.strerror or str(error)) from error
    finally:
        os.close(fd)
    if option := _local_locks(folder):
        raise _unlocked(folder, f"mounted with {option}, locks stay on one machine")


def _unlocked(folder: Path, why: str) -> PrerequisiteError:
    return PrerequisiteError(
        f"{folder} cannot be locked ({why}), so two workers could play one run; choose a folder "
        "on a local disk or on NFS with locks, or a URL that can create exclusively (s3://…)"
    )


def _local_locks(folder: Path) -> str:
    """Return the mount option by which a folder's locks stay on this machine; else nothing."""
    try:
        lines = _MOUNTS.read_text().splitlines()
    except OSError:
        return ""
    place, best, found = str(folder.resolve()), -1, ""
    for line in lines:
        words = line.split()
        if len(words) < 7 or "-" not in words:
            continue
        mount, options = words[4], {*words[5].split(","), *words[-1].split(",")}
        inside = place == mount or place.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= best:
            best, found = len(mount), next((o for o in _LOCKS_STAY_HERE if o in options), "")
    return found
