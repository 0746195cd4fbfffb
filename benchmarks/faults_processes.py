"""Runs as processes: starting them, finding those they started, striking them. Linux only."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Self, cast

LAUNCHER = Path(__file__).with_name("faults_launcher.py")
TARGETS = {
    "worker": "worker_child.py",
    "server": ("vllm.plugin.launch", "llamacpp.server.app", "sglang.plugin.launch"),
    "core": ("EngineCore", "sglang::scheduler"),
}


class Launcher:
    """A process that has loaded what runs need and forks one for every order."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(LAUNCHER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=_environment({}),
            bufsize=0,
            start_new_session=True,
        )
        self._selector = selectors.DefaultSelector()
        self._selector.register(cast("IO[bytes]", self._process.stdout), selectors.EVENT_READ)

    def order(self, document: Mapping[str, Any]) -> int:
        """Start a run; return its process id."""
        cast("IO[bytes]", self._process.stdin).write(json.dumps(document).encode() + b"\n")
        answer = self.answer(None)
        if answer is None:
            raise RuntimeError("the launcher died")
        return int(answer["pid"])

    def answer(self, timeout_s: float | None) -> dict[str, Any] | None:
        """Return its next answer, None if there is none yet."""
        if not self._selector.select(timeout_s):
            return None
        line = cast("IO[bytes]", self._process.stdout).readline()
        if not line:
            raise RuntimeError("the launcher died")
        return dict(json.loads(line))

    def close(self) -> None:
        """End it once the run in progress has ended."""
        cast("IO[bytes]", self._process.stdin).close()
        self._process.wait()
        cast("IO[bytes]", self._process.stdout).close()
        self._selector.close()


def _environment(added: Mapping[str, str]) -> dict[str, str]:
    root = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **added}


@dataclass
class Attempt:
    """A running `kvbench`; `ended` has its exit code, or minus the signal, once it is over."""

    pid: int
    log: Path  # what it wrote to standard error
    _source: Launcher | subprocess.Popen[bytes]
    began: float = field(default_factory=time.monotonic)
    ended: int | None = None
    family: dict[int, str] = field(default_factory=dict)  # processes it started, when they began

    @classmethod
    def start(
        cls,
        launcher: Launcher | None,
        arguments: Sequence[str],
        log: Path,
        scratch: Path,
        stale_s: float | None = None,
    ) -> Self:
        """Start a run; without a launcher it loads everything itself."""
        order = {
            "arguments": list(arguments),
            "environment": {"TMPDIR": str(scratch)},
            "stdout": str(log.with_suffix(".out")),
            "stderr": str(log),
            **({} if stale_s is None else {"stale_s": stale_s}),
        }
        if launcher is not None:
            return cls(launcher.order(order), log, launcher)
        process = subprocess.Popen(
            [sys.executable, str(LAUNCHER), "--once", json.dumps(order)], env=_environment({})
        )
        return cls(process.pid, log, process)

    def poll(self, timeout_s: float = 0.0) -> int | None:
        """Return how it ended, None while it runs."""
        if self.ended is None:
            if isinstance(self._source, Launcher):
                answer = self._source.answer(timeout_s)
                self.ended = None if answer is None else int(answer["status"])
            else:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.ended = self._source.wait(max(timeout_s, 0.001))
        return self.ended

    def wait(self, patience_s: float) -> bool:
        """Wait for its end; false if it does not come."""
        deadline = time.monotonic() + patience_s
        while self.poll(0.2) is None:
            if time.monotonic() > deadline:
                return False
            self.note_family()
        return True

    def note_family(self) -> None:
        """Remember the processes it has started so far, and those that these have."""
        self.family |= descendants(self.pid)

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def target(self, name: str, how: float) -> int | None:
        """Return a process of that kind, None if it has none now."""
        if name in ("run", "group"):
            return self.pid
        self.note_family()
        words = TARGETS[name]
        words = (words,) if isinstance(words, str) else words
        alive = [pid for pid, began in self.family.items() if start_time(pid) == began]
        found = sorted(pid for pid in alive if any(word in _command(pid) for word in words))
        if name == "server":
            # Of a server's several processes the first one speaks HTTP.
            found = [pid for pid in found if _parent(pid) not in found]
        return found[int(how * len(found))] if found else None

    def fill_disk(self, size: int) -> None:
        """Let no file of the run grow beyond a size: its writes fail, the last one half-done.

        A limit stands for a full disk, which a test cannot make without being root. The kernel
        answers EFBIG where it would answer ENOSPC.
        """
        with contextlib.suppress(ProcessLookupError):
            hard = resource.prlimit(self.pid, resource.RLIMIT_FSIZE)[1]
            resource.prlimit(self.pid, resource.RLIMIT_FSIZE, (size, hard))


def start_time(pid: int) -> str | None:
    """Return when a process began, in the kernel's ticks; None if it is gone or a zombie."""
    fields = _stat(pid)
    return None if not fields or fields[0] in "ZX" else fields[19]


def descendants(pid: int) -> dict[int, str]:
    """Return the processes below one, and when each began."""
    children: dict[int, list[int]] = {}
    began: dict[int, str] = {}
    for each in processes():
        fields = _stat(each)
        if fields and fields[0] not in "ZX":
            children.setdefault(int(fields[1]), []).append(each)
            began[each] = fields[19]
    found: dict[int, str] = {}
    todo = list(children.get(pid, ()))
    while todo:
        each = todo.pop()
        found[each] = began[each]
        todo += children.get(each, ())
    return found


def users_of(folder: Path) -> dict[int, str]:
    """Return the processes whose environment names a folder."""
    wanted, found = str(folder).encode(), {}
    for pid in processes():
        with contextlib.suppress(OSError):
            began = start_time(pid)
            if began and wanted in Path(f"/proc/{pid}/environ").read_bytes():
                found[pid] = began
    return found


def processes() -> Iterator[int]:
    """Yield the ids of all processes."""
    return (int(name) for name in os.listdir("/proc") if name.isdigit())  # noqa: PTH208


def describe(pid: int) -> str:
    return f"{pid} {_command(pid)[:120]}"


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat that follow the name, the state first."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _parent(pid: int) -> int:
    fields = _stat(pid)
    return int(fields[1]) if fields else 0


def _command(pid: int) -> str:
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    return raw.replace(b"\0", b" ").decode(errors="replace")


def end_all(pids: Mapping[int, str]) -> None:
    """Kill processes of ours that are left, unless the number belongs to another one by now."""
    for pid, began in pids.items():
        if start_time(pid) == began:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
