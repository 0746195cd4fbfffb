"""Benchmarks in another interpreter: JSON lines over stdin and stdout, many requests in flight.

Request: `{"v": 1, "id": str, "cmd": str, "args": {...}}`. Event: `{"v": 1, "id": str or null,
"event": "result" | "error" | "heartbeat" | "log", "data": ...}`. The command `cancel` asks a
request to stop. A worker that dies, stalls or breaks the protocol costs the requests it held;
the pool starts another one.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from agentbench_kv.adapters.worker_process import (
    RemoteError,
    WorkerCancelledError,
    WorkerDiedError,
    WorkerError,
    WorkerProcess,
    WorkerTimeoutError,
)
from agentbench_kv.errors import PrerequisiteError

__all__ = ["RemoteError", "WorkerDiedError", "WorkerError", "WorkerPool", "WorkerTimeoutError"]

_CHILD = Path(__file__).with_name("worker_child.py")
_FAILED_STARTS_ALLOWED = 3
# What a Python needs from the caller's environment to start at all; nothing else is passed on.
_INHERITED = ("LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR", "TZ")


@dataclass(frozen=True)
class Limits:
    """Resource limits of one worker process; None leaves a resource alone."""

    cpu_s: int | None = 4 * 3600  # processor seconds over the worker's life
    address_space: int | None = 4 << 30  # bytes
    file_size: int | None = 64 << 20  # bytes
    open_files: int | None = 256


@dataclass(frozen=True)
class Timing:
    """How long to wait for a worker, in seconds."""

    heartbeat: float = 1.0  # between the worker's heartbeats
    start: float = 120.0  # until a new worker is ready
    stall: float = 30.0  # without any event, before a worker counts as hung
    grace: float = 10.0  # for a cancelled request, or a closed worker, to end by itself


@dataclass
class _Slot:
    index: int
    process: WorkerProcess | None = None  # replaced when it ends
    failed_starts: int = 0  # in a row
    lock: threading.Lock = field(default_factory=threading.Lock)


class WorkerPool:
    """`n` worker processes that answer the commands of `module_file`, as `worker_child` loads it.

    Each process holds any number of requests at a time. `{scratch}` in a value of `environment`
    becomes the worker's own scratch folder.
    """

    def __init__(
        self,
        python: Path,
        module_file: Path,
        n: int = 1,
        *,
        environment: Mapping[str, str] | None = None,
        limits: Limits | None = None,
        timing: Timing | None = None,
    ) -> None:
        self._python = python
        self._module = module_file
        self._environment = dict(environment or {})
        self._limits = limits or Limits()
        self._timing = timing or Timing()
        self._scratch = Path(tempfile.mkdtemp(prefix="kvbench-worker-"))
        self._slots = [_Slot(index) for index in range(n)]
        self._closed = False

    def call(
        self,
        command: str,
        args: Mapping[str, Any] | None = None,
        *,
        timeout: float | None = None,
        cancel: threading.Event | None = None,
        on_log: Callable[[str], None] | None = None,
    ) -> Any:
        """Run one command in the least busy worker and return its JSON result.

        After `timeout` seconds, or when `cancel` is set, the request is cancelled; `on_log` gets
        the lines that the handler logs.

        Raises
        ------
        RemoteError
            The handler raised; `kind` is the exception's class name.
        WorkerDiedError, WorkerTimeoutError, WorkerCancelledError
            The worker ended or stalled, time ran out, or `cancel` was set.
        PrerequisiteError
            Workers do not start at all.
        """
        worker = self._worker()
        number, future = worker.submit(command, dict(args or {}), on_log)
        try:
            return _wait(future, timeout, cancel)
        except FutureTimeoutError:
            self._stop_request(worker, number, future)
            raise WorkerTimeoutError(f"{command} took more than {timeout:g} s") from None
        except WorkerCancelledError:
            self._stop_request(worker, number, future)
            raise

    def close(self) -> None:
        """End the workers, by force if they do not end by themselves, and delete their scratch."""
        self._closed = True
        running = [slot.process for slot in self._slots if slot.process is not None]
        for process in running:
            process.close_input()
        for process in running:
            process.join(self._timing.grace)
        shutil.rmtree(self._scratch, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _worker(self) -> WorkerProcess:
        if self._closed:
            raise WorkerDiedError("the worker pool is closed")
        slot = min(self._slots, key=lambda s: s.process.load() if s.process else 0)
        with slot.lock:
            if slot.process is None or not slot.process.alive:
                if slot.process is not None:
                    self._check_starts(slot, slot.process)
                slot.process = self._start(slot)
            return slot.process

    def _check_starts(self, slot: _Slot, ended: WorkerProcess) -> None:
        slot.failed_starts = 0 if ended.was_ready else slot.failed_starts + 1
        if slot.failed_starts >= _FAILED_STARTS_ALLOWED:
            raise PrerequisiteError(
                f"the worker {self._module.name} does not start under {self._python}: "
                f"{ended.end_reason()}; rebuild its environment (kvbench env list)"
            )

    def _start(self, slot: _Slot) -> WorkerProcess:
        scratch = self._scratch / f"worker-{slot.index}"
        scratch.mkdir(exist_ok=True)
        config = {
            "module": str(self._module.absolute()),
            "heartbeat_s": self._timing.heartbeat,
            "limits": asdict(self._limits),
        }
        return WorkerProcess(
            (str(self._python), str(_CHILD)),
            config,
            scratch,
            self._process_environment(scratch),
            start_s=self._timing.start,
            stall_s=self._timing.stall,
        )

    def _process_environment(self, scratch: Path) -> dict[str, str]:
        fixed = {
            "PATH": os.defpath,
            "HOME": str(scratch),
            "TMPDIR": str(scratch),
            "LC_ALL": "C.UTF-8",
            "PYTHONUTF8": "1",
            "PYTHONSAFEPATH": "1",
            "PYTHONNOUSERSITE": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "HF_HUB_OFFLINE": "1",
        }
        inherited = {k: os.environ[k] for k in _INHERITED if k in os.environ}
        own = {k: v.replace("{scratch}", str(scratch)) for k, v in self._environment.items()}
        return fixed | inherited | own

    def _stop_request(self, worker: WorkerProcess, number: str, future: Future[Any]) -> None:
        worker.cancel(number)
        with contextlib.suppress(WorkerError, FutureTimeoutError):
            future.result(self._timing.grace)
        if not future.done():
            worker.kill(f"request {number} did not stop when cancelled")


def _wait(future: Future[Any], timeout: float | None, cancel: threading.Event | None) -> Any:
    if cancel is None:
        return future.result(timeout)
    deadline = None if timeout is None else time.monotonic() + timeout
    while not cancel.is_set():
        with contextlib.suppress(FutureTimeoutError):
            return future.result(0.05)
        if deadline is not None and time.monotonic() > deadline:
            raise FutureTimeoutError
    raise WorkerCancelledError("cancelled by the caller")
