"""One worker process as its parent sees it: requests out, events in, a verdict when it ends."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import selectors
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from pathlib import Path
from typing import IO, Any, cast

PROTOCOL = 1
LONGEST_LINE = 256 << 20
_CHUNK = 1 << 16
_POLL_S = 0.25
_STDERR_TAIL = 2000
_EVENTS = frozenset({"result", "error", "heartbeat", "log"})


class WorkerError(Exception):
    """A request was not answered, through no fault of the agent under test."""


class WorkerDiedError(WorkerError):
    """The worker ended, stalled or broke the protocol while it held the request."""


class WorkerTimeoutError(WorkerError):
    """The request took longer than its caller allows."""


class WorkerCancelledError(WorkerError):
    """The caller cancelled the request."""


class RemoteError(WorkerError):
    """The handler raised: `kind` is the exception's class name in the worker."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.message = message


class WorkerProcess:
    """A started worker, and the thread that reads its events.

    `command` gets `config` as its last argument and `environment` as its whole environment;
    `stderr.log` in its working folder `scratch` collects standard error over restarts. `start_s`
    and `stall_s` are the seconds allowed until it is ready, and between two events after that.
    """

    def __init__(
        self,
        command: tuple[str, ...],
        config: Mapping[str, Any],
        scratch: Path,
        environment: Mapping[str, str],
        *,
        start_s: float,
        stall_s: float,
    ) -> None:
        self._start_s, self._stall_s = start_s, stall_s
        self._stderr = scratch / "stderr.log"
        self._pending: dict[str, tuple[Future[Any], Callable[[str], None] | None]] = {}
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
        """Return the number of requests in flight."""
        return len(self._pending)

    def submit(
        self, command: str, args: Mapping[str, Any], on_log: Callable[[str], None] | None = None
    ) -> tuple[str, Future[Any]]:
        """Send a request; the future fails if the worker ends before it answers."""
        number = f"r{next(self._numbers)}"
        future: Future[Any] = Future()
        with self._state:
            if not self.alive:
                raise WorkerDiedError(self.end_reason())
            self._pending[number] = future, on_log
        self._write({"v": PROTOCOL, "id": number, "cmd": command, "args": args})
        return number, future

    def cancel(self, number: str) -> None:
        """Ask the worker to stop a request."""
        self._write({"v": PROTOCOL, "id": None, "cmd": "cancel", "args": {"target": number}})

    def close_input(self) -> None:
        """Tell the worker that no more requests will come."""
        with contextlib.suppress(OSError):
            self._stdin.close()

    def kill(self, reason: str) -> None:
        """End the worker now; `reason` goes to the requests it held."""
        with self._state:
            self.alive = False
            self._reason = self._reason or reason
        self._process.kill()

    def join(self, grace_s: float) -> None:
        """Wait for the end, and force it after `grace_s`."""
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
        if now - last_event > max(self._stall_s, 0 if self.was_ready else self._start_s):
            self.kill(f"no sign of life for {now - last_event:.1f} s")
        elif not self.was_ready and now - self._started > self._start_s:
            self.kill(f"not ready after {self._start_s:g} s")
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
        elif event == "log":
            _, on_log = self._pending.get(number, (None, None))
            if on_log:
                on_log(str(data))
        elif event != "heartbeat" and number in self._pending:
            future, _ = self._pending.pop(number)
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
        for future, _ in lost.values():
            with contextlib.suppress(InvalidStateError):
                future.set_exception(WorkerDiedError(self.end_reason()))
