"""`run.json`: what a run is, who is writing it, and whether it may be taken over."""

from __future__ import annotations

import os
import socket
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, NonNegativeFloat, PositiveInt, ValidationError

from agentbench_kv.errors import UsageError
from agentbench_kv.results.files import write_atomic

STALE_S = 30.0
FILE = "run.json"

# Tokens of the runs this very process holds: a restarted container often gets the same pid.
HELD: set[str] = set()


class RunStatus(StrEnum):
    """How the last process that wrote the run left it; whether trials are missing is `RunState`.

    `running` without a fresh heartbeat means it was interrupted.
    """

    RUNNING = "running"
    COMPLETE = "complete"
    FAILED = "failed"


class Resume(BaseModel):
    """A later start of the same run, and which provenance changed."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    at: float  # seconds since 1970
    changed: dict[str, tuple[Any, Any]] = {}  # by key: the value in the first start, and in this


class RunInfo(BaseModel):
    """The content of `run.json`."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    run_id: str
    spec: dict[str, Any]  # resolved
    status: RunStatus
    created: float  # seconds since 1970, as is the heartbeat
    heartbeat: float
    pid: PositiveInt  # of the process that writes the run
    host: str
    owner: str  # a token that is new at every start
    wall_s: NonNegativeFloat = 0.0  # in which trials were played, over all starts
    expected_trials: int | None = None  # samples times trials; None while unknown
    provenance: dict[str, Any] = {}  # versions, git commit, hardware, hashes, whatever is known
    resumes: list[Resume] = []
    error: str | None = None  # why the run failed


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
    """Replace `run.json` atomically; a PrerequisiteError if it cannot be written."""
    write_atomic(folder / FILE, info.model_dump_json(indent=2).encode() + b"\n")


def holder(info: RunInfo, now: float) -> str | None:
    """Say who is writing the run at time `now` (seconds since 1970); None if nobody is."""
    age = max(0.0, now - info.heartbeat)
    if info.status is not RunStatus.RUNNING or age >= STALE_S or _is_gone(info):
        return None
    return f"pid {info.pid} on {info.host} (heartbeat {age:.0f} s ago)"


def _is_gone(info: RunInfo) -> bool:
    """Whether the writer is certainly dead; only its own machine can tell."""
    if info.host != socket.gethostname():
        return False
    if info.pid == os.getpid():
        return info.owner not in HELD
    return not _is_alive(info.pid)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it lives, as somebody else's
        pass
    return True
