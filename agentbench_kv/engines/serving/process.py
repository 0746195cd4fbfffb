"""A backend as the harness sees it: a process with a log, and the harness's end of its channel.

The backend's interpreter has its own torch and transformers. Our site-packages on its path would
hide them, so it gets links to the packages it needs, and the metadata of its entry points.
"""

from __future__ import annotations

import contextlib
import itertools
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
from agentbench_kv.engines.core.control import COMMAND_S
from agentbench_kv.engines.core.host import PARENT
from agentbench_kv.environments import process_env
from agentbench_kv.errors import KVBenchError, PrerequisiteError, UsageError

_POLL_S = 0.2
_GRACE_S = 15.0
_LAST_WORDS_S = 1.0
_LONGEST_LOG = 1 << 20  # bytes at its end that are looked at
_LONGEST_CAUSE = 300

# What a log's line starts with: process and level as vLLM writes them, the time as SGLang does.
_HEAD = re.compile(
    r"(?:\([\w.-]+ pid=\d+\) ?)?"
    r"(?:(?P<level>[A-Z]{4,8}) [^\[]{0,30}\[[^\]]*\] ?)?"
    r"(?:\[\d{4}-[^\]]*\] ?)?"
)
_CALM = ("DEBUG", "INFO", "WARNING")
_WARNING = re.compile(r"(?:\S*: )?\w*Warning\b|[DIW]\d{4} |Ignore ", re.IGNORECASE)
_EXCEPTION = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:Error|Exception|Exit|Interrupt)(?::|$)")
# What a process says of another one's failure, or of a client's, and what ours does without.
_NO_CAUSE = re.compile(
    r"EngineDeadError|root cause|stack trace|check the logs|in subprocess|BrokenPipe|"
    r"ConnectionReset|openai_harmony"
)
_OWN = "kvbench: "
_MEMORY = re.compile(
    r"MemoryError|OutOfMemory|out of memory|bad_alloc|can't allocate memory|failed to allocate|"
    r"(?:not enough|insufficient|no available|KV cache) memory",
    re.IGNORECASE,
)
_BAD = re.compile(
    r"\b(?:errors?|fail(?:ed|ure)|crash(?:ed)?|died|fatal|abort(?:ed)?|terminate|assert|cannot)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class LogCause:
    """What a backend died of, as far as its log says."""

    text: str  # one line; empty if the log says nothing
    memory: bool = False  # whether it ran out of it
    certain: bool = True  # whether it is a reason rather than what is left to quote


def cause_in(lines: Sequence[str]) -> LogCause:
    """Find in a log what its process died of.

    That is what our own code says, else an allocation that failed, else the last exception that is
    not one process's word on another, else the first line that reads like a failure, else the last
    line. Warnings are none of these, whatever they mention.
    """
    said = [(found["level"], line[found.end() :]) for line in lines if (found := _HEAD.match(line))]
    texts = [text for level, text in said if level not in _CALM and not _WARNING.match(text)]
    raised = [i for i, text in enumerate(texts) if _EXCEPTION.match(text)]
    roots = [i for i in raised if not _NO_CAUSE.search(_whole(texts, i))]
    memory = [i for i, text in enumerate(texts) if _MEMORY.search(text)]
    plain = [text for text in texts if not text.startswith(" ") and "Traceback" not in text]
    if own := [text for text in plain if _OWN in text]:
        return LogCause(_short(own[0].partition(_OWN)[2]), memory=bool(memory))
    if memory:
        best = [i for i in memory if i in raised] or memory[:1]
        return LogCause(_short(_whole(texts, best[-1])), memory=True)
    if roots:
        return LogCause(_short(_whole(texts, roots[-1])))
    bad = [text for text in plain if _BAD.search(text) and not _NO_CAUSE.search(text)]
    return LogCause(_short((bad or plain[-1:] or [""])[0]), certain=False)


def _whole(texts: Sequence[str], first: int) -> str:
    """Return an exception's line with the indented ones behind it, which belong to its message."""
    more = itertools.takewhile(lambda text: text.startswith(" "), texts[first + 1 : first + 4])
    return " ".join([texts[first], *(text.strip() for text in more)])


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST_CAUSE else f"{line[:_LONGEST_CAUSE]}…"


@dataclass(frozen=True)
class Launch:
    """How to start a backend."""

    command: Sequence[str]
    ready: Callable[[], bool]  # true once the backend answers
    environment: Mapping[str, str] = field(default_factory=dict)  # added to this process's own
    start_s: float = 900.0  # seconds it may take until then
    memory: str = "lower --concurrency or --budget"  # what to change where memory runs out


class BackendProcess:
    """Starts a backend and watches it. Its output goes to a file."""

    def __init__(self, name: str, launch: Launch, log: Path) -> None:
        self.name = name
        self.log = log
        self.ready = False  # it has answered
        self.timed_out = False  # it ran, but did not answer in time
        self._crippled = False
        self._launch = launch
        with log.open("ab") as out:
            self._start = out.tell()
            self._process = subprocess.Popen(
                list(launch.command),
                env={**_environment(), **launch.environment, PARENT: str(os.getpid())},
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

    def wait_ready(self) -> None:
        """Wait until the backend answers; PrerequisiteError with the cause if it does not."""
        deadline = time.monotonic() + self._launch.start_s
        while not self._launch.ready():
            if not self.alive:
                raise PrerequisiteError(self.ended("did not start"))
            if time.monotonic() > deadline:
                self.timed_out = True
                message = self._message(f"did not answer within {self._launch.start_s:.0f} s")
                self.stop()
                raise PrerequisiteError(message)
            time.sleep(_POLL_S)
        self.ready = True
        # A server writes much while it starts that it lives with.
        self._start = self.log.stat().st_size

    def stop(self) -> None:
        """End the process and everything it started."""
        self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE_S)
        self.kill()

    def kill(self, *, crippled: bool = False) -> None:
        """End at once what is left: workers may outlive a parent that was killed, or the reverse.

        `crippled`: because a part of it had died; it may say so, and end by itself.
        """
        if crippled:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_LAST_WORDS_S)
            self._crippled = self._crippled or self.alive
        self._signal(signal.SIGKILL)
        self._process.wait()

    def lines(self) -> list[str]:
        """Return the lines it wrote since it started, or since it was ready, but for blank ones."""
        with self.log.open("rb") as file:
            file.seek(max(self._start, file.seek(0, os.SEEK_END) - _LONGEST_LOG))
            lines = file.read().decode(errors="replace").splitlines()
        return [line for line in lines if line.strip()]

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def ended(self, what: str) -> str:
        """Say in one line that it did `what`, how it ended, and of what."""
        code = self._process.poll()
        if self._crippled or code is None:
            how = "a part of it was gone"
        else:
            how = f"exit code {code}" if code >= 0 else f"ended by {signal.Signals(-code).name}"
        return self._message(f"{what} ({how})")

    def _message(self, what: str) -> str:
        cause = cause_in(self.lines())
        parts = [cause.text] if cause.text else []
        if cause.memory:
            parts.append(f"memory ran out: {self._launch.memory}")
        elif not cause.certain:
            parts.append(f"if the system killed it for its memory: {self._launch.memory}")
        return f"the {self.name} backend {what}: {'; '.join(parts)} (log: {self.log})"


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


def listens(path: Path) -> bool:
    """Return whether anybody listens on a Unix socket; its file alone says nothing."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_GRACE_S)
        try:
            probe.connect(str(path))
        except (ConnectionError, FileNotFoundError):
            return False
        except OSError:  # too busy to answer
            return True
    return True


class ControlError(KVBenchError):
    """The backend refused a command; the message is its own."""


class ControlClient:
    """Sends commands, one at a time, and reconnects after a restart. Thread-safe."""

    # Longer than a backend waits itself, which says more of why.
    def __init__(self, path: Path, timeout_s: float = COMMAND_S + 60.0) -> None:
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
        if not line.endswith(b"\n"):
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
