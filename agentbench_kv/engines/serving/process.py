"""A backend as the harness sees it: a process with a log, and the harness's end of its channel.

The backend's interpreter has its own torch and transformers. Our site-packages on its path would
hide them, so it gets links to the packages it needs, and the metadata of its entry points.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import agentbench_kv
from agentbench_kv.environments import process_env
from agentbench_kv.errors import KVBenchError, PrerequisiteError, UsageError

_TAIL_LINES = 12
_POLL_S = 0.2
_GRACE_S = 15.0
# The first error is the cause; what follows it is each process telling the next.
_CAUSE = re.compile(r"\b\w*(Error|Exception|Exit): ")


class BackendStoppedError(KVBenchError):
    """The backend's process ended while it was needed."""


@dataclass(frozen=True)
class Launch:
    """How to start a backend."""

    command: Sequence[str]
    ready: Callable[[], bool]  # true once the backend answers
    environment: Mapping[str, str] = field(default_factory=dict)  # added to this process's own
    start_s: float = 900.0  # seconds it may take until then


class BackendProcess:
    """Starts a backend and watches it. Its output goes to a file."""

    def __init__(self, name: str, launch: Launch, log: Path) -> None:
        self.name = name
        self.log = log
        self._launch = launch
        with log.open("ab") as out:
            self._start = out.tell()
            self._process = subprocess.Popen(
                list(launch.command),
                env={**_environment(), **launch.environment},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                # Ctrl-C is for the harness, which ends its backends in order.
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def survives(self, patience_s: float = 2.0) -> bool:
        """Return whether the process still runs a moment after something about it broke."""
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            return True
        return False

    def wait_ready(self) -> None:
        """Wait until the backend answers; PrerequisiteError with its last lines if not."""
        deadline = time.monotonic() + self._launch.start_s
        while not self._launch.ready():
            if not self.alive:
                raise PrerequisiteError(self.ended("did not start"))
            if time.monotonic() > deadline:
                self.stop()
                waited = f"did not answer within {self._launch.start_s:.0f} s"
                raise PrerequisiteError(self._message(waited))
            time.sleep(_POLL_S)

    def stop(self) -> None:
        """End the process and everything it started."""
        self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE_S)
        # Workers may outlive a parent that was killed.
        self._signal(signal.SIGKILL)
        self._process.wait()

    def lines(self) -> list[str]:
        """Return the lines it wrote since this start, without blank ones."""
        with self.log.open("rb") as file:
            file.seek(self._start)
            lines = file.read().decode(errors="replace").splitlines()
        return [line for line in lines if line.strip()]

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def ended(self, what: str) -> str:
        """Say how it ended: exit code, log, last lines."""
        return self._message(f"{what} (exit code {self._process.poll()})")

    def _message(self, what: str) -> str:
        lines = self.lines()
        causes = [line for line in lines if _CAUSE.search(line)]
        shown = [*causes[:1], *lines[-_TAIL_LINES:]]
        last = "\n".join(f"  {line}" for line in shown)
        return f"the {self.name} backend {what}; its last lines ({self.log}):\n{last}"


def _environment() -> dict[str, str]:
    """Return this process's environment without what would mislead another interpreter."""
    misleading = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")
    theirs = process_env.without(os.environ)
    own = {key: value for key, value in theirs.items() if key not in misleading}
    # A folder called `vllm` in the user's working directory must not be imported.
    return {**own, "PYTHONSAFEPATH": "1"}


def link_packages(
    folder: Path, modules: Iterable[str], entry_points: Mapping[str, Mapping[str, str]]
) -> Path:
    """Fill `folder` and return it.

    The top-level packages of `modules`, such as a plugged-in method's, are linked beside ours. The
    backend sees `entry_points` (group -> name -> object) as those of an installed distribution.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for root in {"agentbench_kv", *(module.partition(".")[0] for module in modules)}:
        source = _source(root)
        link = folder / source.name
        if not link.is_symlink():
            link.symlink_to(source)
    if entry_points:
        _write_metadata(folder, entry_points)
    return folder


def _source(root: str) -> Path:
    """Return the folder or file of a top-level module that is imported already."""
    file = getattr(sys.modules[root], "__file__", None)
    if file is None:
        raise UsageError(
            f"{root} has no file a backend could import; put the method into a package"
        )
    path = Path(file).resolve()
    return path.parent if path.name == "__init__.py" else path


def _write_metadata(folder: Path, entry_points: Mapping[str, Mapping[str, str]]) -> None:
    version = agentbench_kv.__version__
    info = folder / f"kvbench_backend-{version}.dist-info"
    info.mkdir(exist_ok=True)
    head = f"Metadata-Version: 2.1\nName: kvbench-backend\nVersion: {version}\n"
    (info / "METADATA").write_text(head)
    lines = []
    for group, points in entry_points.items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


class ControlError(KVBenchError):
    """The backend refused a command; the message is its own."""


class ControlClient:
    """Sends commands, one at a time, and reconnects after a restart. Thread-safe."""

    def __init__(self, path: Path, timeout_s: float = 60.0) -> None:
        self._path = path
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None

    def call(self, command: str, **arguments: Any) -> Any:
        """Return the answer; OSError if the backend is not there, ControlError if it refused."""
        with self._lock:
            try:
                answer = self._exchange({"command": command, **arguments})
            except (OSError, ValueError):
                self._disconnect()
                raise
        if "error" in answer:
            raise ControlError(str(answer["error"]))
        return answer["ok"]

    def answers(self) -> bool:
        try:
            self.call("ping")
        except (OSError, ControlError):
            return False
        return True

    def close(self) -> None:
        with self._lock:
            self._disconnect()

    def _exchange(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._socket is None:
            self._socket = self._connect()
        self._socket.sendall(json.dumps(request).encode() + b"\n")
        line = self._lines.readline()
        if not line:
            raise ConnectionResetError("the backend hung up")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _connect(self) -> socket.socket:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            made.settimeout(self._timeout_s)
            made.connect(str(self._path))
        except OSError:
            made.close()
            raise
        self._lines = made.makefile("rb")
        return made

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._lines.close()
            self._socket.close()
            self._socket = None
