"""Benchmarks in another interpreter: JSON lines over stdin and stdout, many requests in flight.

Request: `{"v": 1, "id": str, "cmd": str, "args": {...}}`. Event: `{"v": 1, "id": str or null,
"event": "result" | "error" | "ended" | "heartbeat", "data": ...}`. The worker answers each request
in a process of its own; `ended` says that one ended without an answer. The command `cancel` ends a
request. A worker that dies, stalls or breaks the protocol costs the requests it held; the pool
starts another one.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import selectors
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Self, cast

from agentbench_kv.errors import PrerequisiteError
from agentbench_kv.results.records import TrialStatus

PROTOCOL = 1
LONGEST_LINE = 256 << 20
_CHUNK = 1 << 16
_POLL_S = 0.25
_STDERR_TAIL = 2000
_EVENTS = frozenset({"result", "error", "ended", "heartbeat"})
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


class TrialLimitError(WorkerError):
    """The process of the request met one of its limits, or crashed.

    Nothing else ran in it. Still it is the agent's doing only if it happens again (`WorkerTask`).
    """


class RemoteError(WorkerError):
    """The handler raised: `kind` is the exception's class name in the worker."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        if kind == "ServerError":
            self.status = TrialStatus.ENGINE_ERROR


# Exceptions by which a handler says that it met a limit, with what they mean.
_BEYOND = {
    "MemoryError": "it needed more memory than it may have",
    "RecursionError": "it nested deeper than its interpreter can",
    "AnswerTooLongError": "",  # its message says it
}
# Signals that a process gets for what it did itself.
_CRASHES = frozenset({
    signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL, signal.SIGXFSZ,
})  # fmt: skip
# Grown by so many bytes, a process that was killed had to go for its memory; what the benchmarks
# themselves need is a tenth of that.
_GREEDY = 512 << 20


@dataclass(frozen=True)
class Limits:
    """Resource limits of the process of one request; None leaves a resource alone."""

    # Processor seconds from one answer of the agent to the next: its calls, at last the checker.
    call_cpu_s: int | None = 60
    address_space: int | None = 4 << 30  # bytes
    file_size: int | None = 64 << 20  # bytes
    open_files: int | None = 256


@dataclass(frozen=True)
class WorkerTiming:
    """How long to wait for a worker, in seconds."""

    heartbeat: float = 1.0  # between the worker's heartbeats
    start: float = 120.0  # until a new worker is ready
    stall: float = 30.0  # without any event, before a worker counts as hung
    grace: float = 10.0  # for a closed worker to end by itself


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
        self._call_cpu_s = config["limits"]["call_cpu_s"]
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
        """End a request; whatever comes of it is no longer waited for."""
        with self._state:
            self._pending.pop(number, None)
        self._write({"v": PROTOCOL, "id": None, "cmd": "cancel", "args": {"target": number}})

    def close_input(self) -> None:
        with contextlib.suppress(OSError):
            self._stdin.close()

    def kill(self, reason: str) -> None:
        """End the worker now; `reason` goes to the requests it held."""
        with self._state:
            self.alive = False
            self._reason = self._reason or reason
        self._kill_all()

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
            self._kill_all()
            self._process.wait()
            self._stdout.close()
            self.close_input()
            self._fail_pending()

    def _kill_all(self) -> None:
        """Kill the worker and its requests, which are a process group; it is not waited for yet."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

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
        elif event != "heartbeat":
            with self._state:
                future = self._pending.pop(number, None)
            if future is None:  # cancelled
                return
            if event == "result":
                future.set_result(data)
            elif event == "ended":
                future.set_exception(self._ended(int(data["code"]), int(data["grown"])))
            else:
                future.set_exception(_raised(str(data["kind"]), str(data["message"])))

    def _ended(self, code: int, grown: int) -> WorkerError:
        """Say what it means that the process of a request ended without an answer."""
        if -code == signal.SIGXCPU:
            return TrialLimitError(f"a call took over {self._call_cpu_s} s of processor time")
        if -code in _CRASHES:
            return TrialLimitError(f"a call crashed its process ({signal.Signals(-code).name})")
        if -code == signal.SIGKILL and grown >= _GREEDY:
            return TrialLimitError(f"its process was killed, having grown by {grown >> 20} MiB")
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return WorkerDiedError(f"the request's process ended with {how}")

    def _fail_pending(self) -> None:
        with self._state:
            self.alive = False
            lost, self._pending = self._pending, {}
        for future in lost.values():
            with contextlib.suppress(InvalidStateError):
                future.set_exception(WorkerDiedError(self.end_reason()))


def _raised(kind: str, message: str) -> WorkerError:
    if kind in _BEYOND:
        return TrialLimitError(": ".join(filter(None, (kind, _BEYOND[kind] or message))))
    return RemoteError(kind, message)


class WorkerPool:
    """A worker that answers the commands of `module_file`, each in a process forked from it.

    Any number of requests may run at a time. `{scratch}` in a value of `environment` becomes the
    worker's own `scratch` folder. It starts with the first request, and anew after it has ended.
    """

    def __init__(
        self,
        python: Path,
        module_file: Path,
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
        self.scratch = Path(tempfile.mkdtemp(prefix="kvbench-worker-"))
        # At the end of the process too, if an interrupt came before somebody could close this.
        self._delete = weakref.finalize(self, shutil.rmtree, self.scratch, ignore_errors=True)
        self._process: WorkerProcess | None = None
        self._failed_starts = 0  # in a row
        self._starting = threading.Lock()
        self._closed = False

    def call(
        self, command: str, args: Mapping[str, Any] | None = None, *, timeout: float | None = None
    ) -> Any:
        """Run one command and return its JSON result.

        After `timeout` seconds the request is ended. WorkerError says why there is no result
        (RemoteError: the handler raised), PrerequisiteError that the worker does not start at all.
        """
        worker = self._worker()
        number, future = worker.submit(command, dict(args or {}))
        try:
            return future.result(timeout)
        except FutureTimeoutError:
            worker.cancel(number)
            raise WorkerTimeoutError(f"{command} took more than {timeout:g} s") from None

    def close(self) -> None:
        """End the worker, by force if it does not end by itself, and delete its scratch."""
        self._closed = True
        if (running := self._process) is not None:
            running.close_input()
            running.join(self._timing.grace)
        self._delete()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _worker(self) -> WorkerProcess:
        if self._closed:
            raise WorkerDiedError("the worker pool is closed")
        with self._starting:
            ended = self._process
            if ended is None or not ended.alive:
                if ended is not None:
                    self._failed_starts = 0 if ended.was_ready else self._failed_starts + 1
                    if self._failed_starts >= _FAILED_STARTS_ALLOWED:
                        raise PrerequisiteError(
                            f"the worker {self._module.name} does not start under {self._python}: "
                            f"{ended.end_reason()}; rebuild its environment (kvbench env list)"
                        )
                self._process = self._start()
            return cast("WorkerProcess", self._process)

    def _start(self) -> WorkerProcess:
        config = {
            "module": str(self._module.absolute()),
            "heartbeat_s": self._timing.heartbeat,
            "limits": asdict(self._limits),
        }
        command = (str(self._python), str(_CHILD))
        return WorkerProcess(
            command, config, self.scratch, self._process_environment(), self._timing
        )

    def _process_environment(self) -> dict[str, str]:
        scratch = str(self.scratch)
        switches = (
            "PYTHONUTF8", "PYTHONSAFEPATH", "PYTHONNOUSERSITE", "PYTHONDONTWRITEBYTECODE",
            "HF_HUB_OFFLINE",
        )  # fmt: skip
        fixed = {"PATH": os.defpath, "HOME": scratch, "TMPDIR": scratch}
        fixed |= {"LC_ALL": "C.UTF-8", **dict.fromkeys(switches, "1")}
        inherited = {k: os.environ[k] for k in _INHERITED if k in os.environ}
        own = {k: v.replace("{scratch}", scratch) for k, v in self._environment.items()}
        return fixed | inherited | own
