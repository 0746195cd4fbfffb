"""`run.json`: what a run is, and whether somebody is writing it."""

from __future__ import annotations

import logging
import os
import socket
import time
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import BaseModel, NonNegativeFloat, PositiveInt, ValidationError, field_validator

from agentbench_kv.errors import UsageError
from agentbench_kv.results import files

logger = logging.getLogger(__name__)

STALE_S = 30.0  # without a heartbeat, after which a writer counts as dead
WATCH_S = STALE_S  # how long a heartbeat is watched that this clock cannot judge
FILE = "run.json"
# Tokens of the runs this very process holds: a restarted container often gets the same pid.
HELD: set[str] = set()


class RunHeldError(UsageError):
    """Another process is writing the run."""


class RunStatus(StrEnum):
    """How the last process that wrote the run left it; whether trials are missing is `RunState`.

    `running` without a fresh heartbeat means it was interrupted.
    """

    RUNNING = "running"
    COMPLETE = "complete"
    FAILED = "failed"


class Resume(BaseModel, frozen=True):
    """A later start of the same run that finished a trial, and which provenance changed."""

    at: float  # seconds since 1970
    changed: dict[str, tuple[Any, Any]] = {}  # by key: the value in the first start, and in this
    # The writer it was taken over from, silent for long but not known to be dead; else empty.
    taken_over: str = ""


class RunInfo(BaseModel, frozen=True):
    """The content of `run.json`."""

    run_id: str
    spec: dict[str, Any]  # resolved
    status: RunStatus
    created: float  # seconds since 1970, as is the heartbeat
    heartbeat: float
    pid: PositiveInt  # of the process that writes the run
    host: str
    machine: str = ""  # where the pid means something, see `_machine`; unknown in older records
    owner: str  # a token that is new at every start
    wall_s: NonNegativeFloat = 0.0  # in which trials were played, over all starts
    expected_trials: int | None = None  # samples times trials; None while unknown
    provenance: dict[str, Any] = {}  # versions, git commit, hardware, hashes, whatever is known
    resumes: list[Resume] = []
    error: str | None = None  # why the run failed

    @field_validator("spec")
    @classmethod
    def _check(cls, spec: dict[str, Any]) -> dict[str, Any]:
        """Refuse a list or an object for a seed, by which runs are told apart."""
        if isinstance(spec.get("seed"), dict | list):
            raise ValueError("spec.seed is no single value")
        return spec


def read_info(folder: Path) -> RunInfo | None:
    """Read `run.json`; None if the folder has none, a UsageError if it is not kvbench's."""
    path = folder / FILE
    try:
        return RunInfo.model_validate_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]["msg"]
        raise UsageError(f"{path} is not a kvbench run record: {detail}") from error


def write_info(folder: Path, info: RunInfo) -> None:
    files.write_atomic(folder / FILE, info.model_dump_json(indent=2).encode() + b"\n")


def holder(info: RunInfo, now: float) -> str | None:
    """Say who is writing the run at time `now` (seconds since 1970); None if nobody is.

    A heartbeat far in the future proves nothing: see `ahead`.
    """
    age = now - info.heartbeat
    fresh = abs(age) < STALE_S or info.owner in HELD
    if info.status is not RunStatus.RUNNING or not fresh or is_gone(info):
        return None
    return f"{writer(info)} (heartbeat {max(0.0, age):.0f} s ago)"


def ahead(info: RunInfo, now: float) -> bool:
    """Whether the clock that a run's heartbeat was read from, or this one, is wrong."""
    running = info.status is RunStatus.RUNNING and info.owner not in HELD
    return running and info.heartbeat - now >= STALE_S and not is_gone(info)


def _unjudged(info: RunInfo, now: float) -> bool:
    """Whether only watching shows if a run's writer is alive: its clock may not be this one."""
    running = info.status is RunStatus.RUNNING and info.owner not in HELD
    silent = now - info.heartbeat >= STALE_S and not _is_here(info)
    return (running and silent) or ahead(info, now)


def watch_heartbeat(path: Path) -> None:
    """Refuse a run whose heartbeat this clock cannot judge, and moves: its writer is alive."""
    old = read_info(path)
    if old is None or not _unjudged(old, time.time()):
        return
    seconds = old.heartbeat - time.time()
    gap = f"{abs(seconds):.0f} s {'ahead of' if seconds > 0 else 'behind'} this clock"
    words = "kvbench: the heartbeat of %s is %s; seeing for %g s whether it moves"
    logger.info(words, path, gap, WATCH_S)
    end = time.monotonic() + WATCH_S
    while time.monotonic() < end:
        time.sleep(min(1.0, WATCH_S / 10))
        info = read_info(path)
        if info is not None and info.heartbeat != old.heartbeat and _unjudged(info, time.time()):
            raise RunHeldError(
                f"run {info.run_id} is being written by {writer(info)}, whose clock is {gap}; "
                "wait for it or stop it"
            )


def writer(info: RunInfo) -> str:
    """Name the process that writes a run, or wrote it last."""
    return f"pid {info.pid} on {info.host}"


def _is_here(info: RunInfo) -> bool:
    return info.host == socket.gethostname() and info.machine in ("", files.machine())


def is_gone(info: RunInfo) -> bool:
    """Whether the writer is certainly dead; only its own machine can tell."""
    if not _is_here(info):
        return False
    if info.pid == os.getpid():
        return info.owner not in HELD
    try:
        os.kill(info.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # it lives, as somebody else's
        pass
    return False
