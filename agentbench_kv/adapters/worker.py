"""Benchmarks in another interpreter: JSON lines over stdin and stdout, many requests in flight.

Request: `{"v": 1, "id": str, "cmd": str, "args": {...}}`. Event: `{"v": 1, "id": str or null,
"event": "result" | "error" | "heartbeat", "data": ...}`. The command `cancel` asks a
request to stop. A worker that dies, stalls or breaks the protocol costs the requests it held;
the pool starts another one.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import selectors
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Self, cast

from agentbench_kv.errors import PrerequisiteError
from agentbench_kv.results.records import TrialStatus

PROTOCOL = 1
LONGEST_LINE = 256 << 20
_CHUNK = 1 << 16
_POLL_S = 0.25
_STDERR_TAIL = 2000
_EVENTS = frozenset({"result", "error", "heartbeat"})
_CHILD = Path(__file__).with_name("worker_child.py")
_FAILED_STARTS_ALLOWED = 3
# What a Python needs from the caller's environment to start at all; nothing else is passed on.
_INHERITED = ("LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR", "TZ")


class WorkerError(Exception):
    """A request was not answered, through no fault of the agent under test."""

    status = TrialStatus.INFRA_ERROR  # of the trial that needed the answer


class WorkerDiedError(WorkerError):
    """The worker ended, stalled or broke the protocol while it held the request."""


class WorkerTimeoutError(WorkerError):
    """The request took longer than its caller allows."""

    status = TrialStatus.TIMEOUT


class RemoteError(WorkerError):
    """The handler raised: `kind` is the exception's class name in the worker."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        if kind == "ServerError":
            self.status = TrialStatus.ENGINE_ERROR


@dataclass(frozen=True)
class Limits:
    """Resource limits of one worker process; None leaves a resource alone."""

    cpu_s: int | None = 4 * 3600  # processor seconds over the worker's life
    address_space: int | None = 4 << 30  # bytes
    file_size: int | None = 64 << 20  # bytes
    open_files: int | None = 256


@dataclass(frozen=True)
class WorkerTiming:
    """How long to wait for a worker, in seconds."""

    heartbeat: float = 1.0  # between the worker's heartbeats
    start: float = 120.0  # until a new worker is ready
    stall: float = 30.0  # without any event, before a worker counts as hung
    grace: float = 10.0  # for a cancelled request, or a closed worker, to end by itself


class WorkerProcess:
    """A started worker, and the thread that reads its events.

    `command` gets `config` as its last argument and `environment` as its whole environment;
    `stderr.log` in its working folder `scratch` collects standard error over restarts.
    """

    def __init__(
        self,
        command: tuple[str, ...],
        config: Mapping[str, Any],
        scratch: Path,
        environment: Mapping[str, str],
        timing: WorkerTiming,
    ) -> None:
        self._timing = timing
        self._stderr = scratch / "stderr.log"
        self._pending: dict[str, Future[Any]] = {}
        self._numbers = itertools.count(1)
        self._state = threading.Lock()
        self._writing = threading.Lock()
        self._reason: str | None = None
        self._started = time.monotonic()
        self.was_ready = False
        self.alive = True
        with self._stderr.open("ab") as stderr:
            self._process = subprocess.Popen(
                (*command, json.dumps(config)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                cwd=scratch,
                env=dict(environment),
                bufsize=0,
                # Ctrl-C is for the parent, which closes its workers in order.
                start_new_session=True,
            )
        self._stdin = cast("IO[bytes]", self._process.stdin)
        self._stdout = cast("IO[bytes]", self._process.stdout)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def load(self) -> int:
        return len(self._pending)

    def submit(self, command: str, args: Mapping[str, Any]) -> tuple[str, Future[Any]]:
        """Send a request; the future fails if the worker ends before it answers."""
        number = f"r{next(self._numbers)}"
        future: Future[Any] = Future()
        with self._state:
            if not self.alive:
                raise WorkerDiedError(self.end_reason())
            self._pending[number] = future
        self._write({"v": PROTOCOL, "id": number, "cmd": command, "args": args})
        return number, future

    def cancel(self, number: str) -> None:
        self._write({"v": PROTOCOL, "id": None, "cmd": "cancel", "args": {"target": number}})

    def close_input(self) -> None:
        with contextlib.suppress(OSError):
            self._stdin.close()

    def kill(self, reason: str) -> None:
        """End the worker now; `reason` goes to the requests it held."""
        with self._state:
            self.alive = False
            self._reason = self._reason or reason
        self._process.kill()

    def join(self, grace_s: float) -> None:
        self._reader.join(grace_s)
        if self._reader.is_alive():
            self.kill("closed")
            self._reader.join()

    def end_reason(self) -> str:
        """Say why the worker ended, with the last line it wrote to standard error."""
        reason = self._reason or f"it ended with exit code {self._process.returncode}"
        try:
            text = self._stderr.read_bytes()[-_STDERR_TAIL:].decode("utf-8", "replace").strip()
        except OSError:
            text = ""
        return f"{reason}; its last words: {text.splitlines()[-1]}" if text else reason

    def _write(self, message: Mapping[str, Any]) -> None:
        view = memoryview(json.dumps(message).encode() + b"\n")
        # The reader sees that a worker died and fails its requests; a closed pipe means the same.
        with self._writing, contextlib.suppress(OSError, ValueError):
            while view:
                view = view[self._stdin.write(view) :]

    def _read(self) -> None:
        try:
            self._read_events()
        finally:
            self._process.kill()
            self._process.wait()
            self._stdout.close()
            self.close_input()
            self._fail_pending()

    def _read_events(self) -> None:
        buffer = bytearray()
        last = time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(self._stdout, selectors.EVENT_READ)
            while not self._stalled(last):
                if not selector.select(_POLL_S):
                    continue
                chunk = os.read(self._stdout.fileno(), _CHUNK)
                last = time.monotonic()
                if not chunk or not self._take(buffer, chunk):
                    return

    def _stalled(self, last_event: float) -> bool:
        now = time.monotonic()
        if now - last_event > max(self._timing.stall, 0 if self.was_ready else self._timing.start):
            self.kill(f"no sign of life for {now - last_event:.1f} s")
        elif not self.was_ready and now - self._started > self._timing.start:
            self.kill(f"not ready after {self._timing.start:g} s")
        else:
            return False
        return True

    def _take(self, buffer: bytearray, chunk: bytes) -> bool:
        """Handle every line that `chunk` completes; False if the protocol was broken."""
        buffer += chunk
        if b"\n" not in chunk:
            if len(buffer) > LONGEST_LINE:
                self.kill(f"it wrote a line of more than {LONGEST_LINE} bytes")
            return len(buffer) <= LONGEST_LINE
        *lines, rest = bytes(buffer).split(b"\n")
        buffer[:] = rest
        return all(self._handle(line) for line in lines)

    def _handle(self, line: bytes) -> bool:
        try:
            message = json.loads(line)
            valid = message["v"] == PROTOCOL and message["event"] in _EVENTS
            if valid:
                self._dispatch(message["id"], message["event"], message["data"])
        except (ValueError, KeyError, TypeError):
            valid = False
        if not valid:
            self.kill(f"it wrote what is not protocol {PROTOCOL}: {line[:80]!r}")
        return bool(valid)

    def _dispatch(self, number: str | None, event: str, data: Any) -> None:
        if number is None:  # about the worker itself
            if event == "heartbeat":
                self.was_ready = self.was_ready or bool(data["ready"])
            elif event == "error":
                self._reason = f"{data['kind']}: {data['message']}"
        elif event != "heartbeat" and number in self._pending:
            future = self._pending.pop(number)
            if event == "result":
                future.set_result(data)
            else:
                error = data if isinstance(data, dict) else {"kind": "Error", "message": data}
                failure = RemoteError(str(error.get("kind")), str(error.get("message")))
                future.set_exception(failure)

    def _fail_pending(self) -> None:
        with self._state:
            self.alive = False
            lost, self._pending = self._pending, {}
        for future in lost.values():
            with contextlib.suppress(InvalidStateError):
                future.set_exception(WorkerDiedError(self.end_reason()))


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
        timing: WorkerTiming | None = None,
    ) -> None:
        self._python = python
        self._module = module_file
        self._environment = dict(environment or {})
        self._limits = limits or Limits()
        self._timing = timing or WorkerTiming()
        self._scratch = Path(tempfile.mkdtemp(prefix="kvbench-worker-"))
        self._slots = [_Slot(index) for index in range(n)]
        self._closed = False

    def call(
        self, command: str, args: Mapping[str, Any] | None = None, *, timeout: float | None = None
    ) -> Any:
        """Run one command in the least busy worker and return its JSON result.

        After `timeout` seconds the request is cancelled. WorkerError says why there is no result
        (RemoteError: the handler raised), PrerequisiteError that workers do not start at all.
        """
        worker = self._worker()
        number, future = worker.submit(command, dict(args or {}))
        try:
            return future.result(timeout)
        except FutureTimeoutError:
            worker.cancel(number)
            with contextlib.suppress(WorkerError, FutureTimeoutError):
                future.result(self._timing.grace)
            if not future.done():
                worker.kill(f"request {number} did not stop when cancelled")
            raise WorkerTimeoutError(f"{command} took more than {timeout:g} s") from None

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
                if ended := slot.process:
                    slot.failed_starts = 0 if ended.was_ready else slot.failed_starts + 1
                    if slot.failed_starts >= _FAILED_STARTS_ALLOWED:
                        raise PrerequisiteError(
                            f"the worker {self._module.name} does not start under {self._python}: "
                            f"{ended.end_reason()}; rebuild its environment (kvbench env list)"
                        )
                slot.process = self._start(slot)
            return slot.process

    def _start(self, slot: _Slot) -> WorkerProcess:
        scratch = self._scratch / f"worker-{slot.index}"
        scratch.mkdir(exist_ok=True)
        config = {
            "module": str(self._module.absolute()),
            "heartbeat_s": self._timing.heartbeat,
            "limits": asdict(self._limits),
        }
        command, environment = (str(self._python), str(_CHILD)), self._process_environment(scratch)
        return WorkerProcess(command, config, scratch, environment, self._timing)

    def _process_environment(self, scratch: Path) -> dict[str, str]:
        switches = (
            "PYTHONUTF8", "PYTHONSAFEPATH", "PYTHONNOUSERSITE", "PYTHONDONTWRITEBYTECODE",
            "HF_HUB_OFFLINE",
        )  # fmt: skip
        fixed = {"PATH": os.defpath, "HOME": str(scratch), "TMPDIR": str(scratch)}
        fixed |= {"LC_ALL": "C.UTF-8", **dict.fromkeys(switches, "1")}
        inherited = {k: os.environ[k] for k in _INHERITED if k in os.environ}
        own = {k: v.replace("{scratch}", str(scratch)) for k, v in self._environment.items()}
        return fixed | inherited | own
