"""A backend as the harness sees it: a process with a log, a state of health and an end."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agentbench_kv import own_settings
from agentbench_kv.errors import KVBenchError, PrerequisiteError

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
        """Process id; also the id of its process group."""
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
                raise PrerequisiteError(self._ended("did not start"))
            if time.monotonic() > deadline:
                self.stop()
                waited = f"did not answer within {self._launch.start_s:.0f} s"
                raise PrerequisiteError(self._message(waited))
            time.sleep(_POLL_S)

    def stopped(self) -> BackendStoppedError:
        """Return the error that says how it ended."""
        return BackendStoppedError(self._ended("stopped"))

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

    def _ended(self, what: str) -> str:
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
    theirs = own_settings.without(os.environ)
    own = {key: value for key, value in theirs.items() if key not in misleading}
    # A folder called `vllm` in the user's working directory must not be imported.
    return {**own, "PYTHONSAFEPATH": "1"}
