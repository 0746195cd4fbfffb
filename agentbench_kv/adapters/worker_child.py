"""The worker's side of the worker protocol; runs in another interpreter, standard library only.

Started as `python worker_child.py CONFIG`, where CONFIG is the JSON object that
`agentbench_kv.adapters.worker` writes. It loads the module named there, calls its
`setup(guard) -> {command: handler(request) -> JSON value}` and answers every request in a fork of
itself, which has limits of its own and ends with its answer: what a model makes one trial do
reaches no other (decision 34). This file must not import agentbench_kv: the other interpreter does
not have it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import math
import os
import resource
import selectors
import signal
import site
import socket
import ssl
import sys
import sysconfig
import time
import traceback
import types
import zoneinfo
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import unquote

PROTOCOL = 1
# Of an answer in bytes: sixteen of them are in the harness at a time.
LONGEST_ANSWER = 64 << 20
_CHUNK = 1 << 16
_PROCESS_EVENTS = frozenset({
    "subprocess.Popen", "os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn",
    "os.spawn", "os.startfile", "pty.spawn", "os.kill", "os.killpg", "signal.pthread_kill",
    "ctypes.dlopen", "ctypes.dlsym",
})  # fmt: skip
_FILE_EVENTS = frozenset({
    "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.truncate", "os.link", "os.symlink",
    "os.chmod", "os.chown", "os.utime", "os.setxattr", "os.removexattr", "shutil.rmtree",
    "shutil.move", "shutil.copyfile",
})  # fmt: skip
_ADDRESS_EVENTS = frozenset({"socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg"})
_LOOKUP_EVENTS = frozenset({
    "socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr", "socket.getnameinfo",
})  # fmt: skip
_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_LIST_EVENTS = frozenset({"os.listdir", "os.scandir", "os.walk", "os.fwalk", "glob.glob"})
_LIMITS = {
    "address_space": resource.RLIMIT_AS,
    "file_size": resource.RLIMIT_FSIZE,
    "open_files": resource.RLIMIT_NOFILE,
}
_DEVICES = ("/dev/null", "/dev/urandom", "/dev/random")
# Where a library may look for the system, time zones, host names, certificates and media types.
_SYSTEM_FILES = (
    "/etc/os-release", "/usr/lib/os-release", "/etc/localtime", "/etc/hosts", "/etc/mime.types",
    "/etc/ssl/certs", "/etc/ssl/openssl.cnf", *zoneinfo.TZPATH,
)  # fmt: skip


class RefusedError(PermissionError):
    """The guard refused what the code in this process tried to do."""


class Guard:
    """An audit hook: no processes, no writing, no reading but of what the benchmark has.

    It stops what evaluated model text could do through Python's own functions, and the network
    but to endpoints. It is a second line behind checking that text, not a sandbox against native
    code. Nothing is refused before `arm`, which the process of each request calls.
    """

    def __init__(self) -> None:
        self._installed = self._armed = False
        self._any_network = False
        self._folders: tuple[str, ...] = ()
        self._hosts: set[tuple[Any, ...]] = set()
        self._addresses: set[tuple[Any, ...]] = set()

    def allow(self, host: str, port: int) -> None:
        """Let sockets connect to `host:port`."""
        self._hosts.add((host, port))
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        self._addresses.update(tuple(address[:2]) for *_, address in found)

    def install(self, *data: str | Path, any_network: bool = False) -> None:
        """Refuse all this in every request from now on; `data` may be read, folders or files."""
        # The name codec of getaddrinfo is imported on first use; do it while files are free.
        "localhost".encode("idna")
        self._any_network = any_network
        self._folders = tuple({os.path.realpath(each) for each in (*_readable(), *data)})
        self._installed = True
        sys.addaudithook(self._hook)

    def arm(self) -> None:
        """Begin to refuse, if it is installed; there is no way back in this process."""
        self._armed = self._installed

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if not self._armed:
            return
        if event in _PROCESS_EVENTS or event in _FILE_EVENTS:
            raise RefusedError(f"refused in this worker: {event}")
        if event == "open":
            self._check_open(*args)
        elif event in _LIST_EVENTS:
            self._check_reading(args[0] if args else None)
        elif event == "sqlite3.connect":
            self._check_database(args[0])
        elif not self._any_network:
            self._check_network(event, args)

    def _check_open(self, path: Any, _: Any, flags: Any) -> None:
        if isinstance(flags, int) and flags & _WRITE_FLAGS:
            raise RefusedError(f"refused in this worker: writing {path!r}")
        self._check_reading(path)

    def _check_reading(self, path: Any) -> None:
        if isinstance(path, int):  # what is open already
            return
        real = os.path.realpath(os.fsdecode("." if path is None else path))
        if not any(real == each or real.startswith(each + os.sep) for each in self._folders):
            raise RefusedError(f"refused in this worker: reading {path!r}")

    def _check_database(self, name: Any) -> None:
        """Let a database be opened in memory, and for reading alone where files may be read."""
        uri = os.fsdecode(name) if isinstance(name, (str, bytes, os.PathLike)) else ""
        path, _, query = uri.removeprefix("file:").partition("?")
        # SQLite would decode an escape, or take the last of two modes.
        modes = [] if "%" in query else [e for e in query.split("&") if e.startswith("mode=")]
        if uri == ":memory:" or (uri.startswith("file:") and modes == ["mode=memory"]):
            return
        if not uri.startswith("file:") or modes != ["mode=ro"]:
            raise RefusedError(f"refused in this worker: opening the database {name!r}")
        self._check_reading(unquote(path))

    def _check_network(self, event: str, args: tuple[Any, ...]) -> None:
        if event in _ADDRESS_EVENTS:
            address = args[1]
            if not isinstance(address, tuple) or tuple(address[:2]) not in self._addresses:
                raise RefusedError(f"refused in this worker: {event} to {address!r}")
        if event in _LOOKUP_EVENTS and tuple(args[:2]) not in self._hosts:
            raise RefusedError(f"refused in this worker: {event} of {args[0]!r}")


def _readable() -> Iterator[str]:
    """Yield the folders and files that code of this environment may need: none of the user's."""
    yield from (*_DEVICES, *_SYSTEM_FILES)
    yield from filter(None, ssl.get_default_verify_paths()[:2])
    yield from (path for name, path in sysconfig.get_paths().items() if "lib" in name)
    yield from site.getsitepackages()
    if sys.prefix != sys.base_prefix:  # a virtual environment holds nothing else
        yield sys.prefix
    # Packages that lie elsewhere (installed in place), and the worker's own files.
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    yield from {str(Path(file).parent) for file in files if file}


class WorkerRequest:
    """One request in progress, in a process of its own."""

    def __init__(self, args: dict[str, Any], guard: Guard, call_cpu_s: int | None) -> None:
        self.args = args
        self.guard = guard  # to allow the endpoint that the request names
        self._call_cpu_s = call_cpu_s
        self.renew()

    def renew(self) -> None:
        """Grant a call's processor seconds anew, because the agent has spoken.

        The kernel ends a process that uses them up, whatever holds the interpreter then.
        """
        if self._call_cpu_s is not None:
            wanted = math.ceil(time.process_time()) + self._call_cpu_s
            _limit(resource.RLIMIT_CPU, wanted, lower_hard=False)


class ForkedRequest:
    """A forked process, and what came of its answer so far."""

    def __init__(self, number: str, pid: int, pipe: int, born_with: int) -> None:
        self.number = number
        self.born_with = born_with  # bytes of memory, shared with the process it came from
        self.pid = pid
        self.pipe = pipe
        self.answer = bytearray()

    def ended(self) -> dict[str, Any]:
        """Wait for the process; return how it ended, and the bytes that it had grown by."""
        _, status, used = os.wait4(self.pid, 0)
        held = used.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        grown = max(0, held - self.born_with)
        return {"code": os.waitstatus_to_exitcode(status), "grown": grown}


class Server:
    """The benchmark, loaded; forks a process for every request until standard input ends.

    It has one thread, as what forks must, and runs nothing that a model wrote.
    """

    def __init__(self, port: int, config: dict[str, Any]) -> None:
        self._port = port
        self._limits = config["limits"]
        self._beat_s = config["heartbeat_s"]
        self._guard = Guard()
        self._handlers: dict[str, Callable[[WorkerRequest], Any]] = {}
        self._running: dict[str, ForkedRequest] = {}
        self._selector = selectors.DefaultSelector()
        self._loaded = 0  # bytes of memory that the benchmark takes

    def load(self, module_file: Path) -> None:
        self._handlers = import_worker(module_file).setup(self._guard)
        # What the forks share is not looked at, so it is not copied either.
        gc.collect()
        gc.freeze()
        self._loaded = _resident()

    def send(self, number: str | None, event: str, data: Any) -> None:
        _write(self._port, _encoded(number, event, data))

    def serve(self, requests: int) -> None:
        asked, beat = bytearray(), 0.0
        self._selector.register(requests, selectors.EVENT_READ, None)
        while True:
            if (now := time.monotonic()) >= beat:
                self.send(None, "heartbeat", {"ready": True})
                beat = now + self._beat_s
            for key, _ in self._selector.select(beat - now):
                chunk = os.read(key.fd, _CHUNK)
                if key.data is not None:
                    self._take_answer(key.data, chunk)
                elif not chunk:
                    return self._kill_all()
                else:
                    asked += chunk
                    if b"\n" in chunk:
                        *lines, asked = asked.split(b"\n")
                        for line in lines:
                            self._take_request(json.loads(line))

    def _take_request(self, message: dict[str, Any]) -> None:
        if message["cmd"] == "cancel":
            if running := self._running.get(message["args"]["target"]):
                os.kill(running.pid, signal.SIGKILL)
            return
        number = message["id"]
        answers, pipe = os.pipe()
        try:
            pid = os.fork()
        except OSError as error:
            os.close(answers)
            os.close(pipe)
            self.send(number, "error", _described(error))
            return
        if pid == 0:
            self._answer(message, pipe)
        os.close(pipe)
        running = self._running[number] = ForkedRequest(number, pid, answers, self._loaded)
        self._selector.register(answers, selectors.EVENT_READ, running)

    def _take_answer(self, running: ForkedRequest, chunk: bytes) -> None:
        running.answer += chunk
        if len(running.answer) > LONGEST_ANSWER:
            os.kill(running.pid, signal.SIGKILL)
        elif chunk:
            return
        self._selector.unregister(running.pipe)
        os.close(running.pipe)
        del self._running[running.number]
        ended = running.ended()
        if len(running.answer) > LONGEST_ANSWER:
            self.send(running.number, "error", _described(AnswerTooLongError()))
        elif running.answer.endswith(b"\n"):
            _write(self._port, running.answer)
        else:
            self.send(running.number, "ended", ended)

    def _kill_all(self) -> None:
        for running in self._running.values():
            os.kill(running.pid, signal.SIGKILL)

    def _answer(self, message: dict[str, Any], pipe: int) -> NoReturn:
        """Answer a request; the process of the fork never leaves this method."""
        try:
            _write(pipe, self._answered(message))
        finally:
            # Whatever is registered for the end of the process belongs to the one forked from.
            os._exit(0)

    def _answered(self, message: dict[str, Any]) -> bytes:
        number = message["id"]
        try:
            self._become_a_request()
            self._guard.arm()
            request = WorkerRequest(message["args"], self._guard, self._limits.get("call_cpu_s"))
            return _encoded(number, "result", self._handlers[message["cmd"]](request))
        except BaseException as error:  # noqa: BLE001  the parent decides what a failure means
            with contextlib.suppress(OSError):  # the log may have reached its size limit
                traceback.print_exc()
            return _encoded(number, "error", _described(error))

    def _become_a_request(self) -> None:
        """Close what other requests use, and set the limits."""
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for fd in (self._port, *(each.pipe for each in self._running.values())):
            os.close(fd)
        _be_first_to_go()
        for name, kind in _LIMITS.items():
            _limit(kind, self._limits.get(name))


class AnswerTooLongError(Exception):
    """What a request came to is too long to keep."""

    def __init__(self) -> None:
        super().__init__(f"its record is longer than {LONGEST_ANSWER >> 20} MiB")


def _encoded(number: str | None, event: str, data: Any) -> bytes:
    fields = {"v": PROTOCOL, "id": number, "event": event, "data": data}
    # Escaped: model text may hold lone surrogates, which no encoding can write.
    return json.dumps(fields, default=repr).encode() + b"\n"


def _described(error: BaseException) -> dict[str, str]:
    return {"kind": type(error).__name__, "message": str(error)}


def _write(fd: int, data: bytes | bytearray) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _resident() -> int:
    """Return the bytes of memory that this process holds; 0 where the system does not tell."""
    # Not `ru_maxrss`: after an exec it still has the peak of the process that was before.
    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    except OSError:
        return 0
    return int(pages) * resource.getpagesize()


def _be_first_to_go() -> None:
    """Let a kernel that is out of memory take this process, not the harness or its engine."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


def import_worker(module_file: Path) -> Any:
    """Import a worker's module as part of a package that represents a folder.

    So the files of that folder may import one another relatively without being on the search path:
    the module's own folder, or for our workers this file's, as they share `agent_client.py`.
    """
    package, here = types.ModuleType("kvbench_worker"), Path(__file__).absolute().parent
    root = here if module_file.is_relative_to(here) else module_file.parent
    package.__path__ = [str(root)]
    sys.modules[package.__name__] = package
    parts = module_file.relative_to(root).with_suffix("").parts
    return importlib.import_module(".".join((package.__name__, *parts)))


def _limit(kind: int, wanted: int | None, *, lower_hard: bool = True) -> None:
    """Set a limit, within the hard one; nothing happens where there is no such limit (macOS)."""
    if wanted is None:
        return
    hard = resource.getrlimit(kind)[1]
    value = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(kind, (value, value if lower_hard else hard))


def main() -> None:
    config = json.loads(sys.argv[1])
    # Whatever prints, in Python or below it, must not end up between protocol lines.
    port = os.dup(1)
    os.dup2(2, 1)
    server = Server(port, config)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        server.load(Path(config["module"]))
    except Exception as error:  # noqa: BLE001  whatever it is, the parent must hear of it
        traceback.print_exc()
        server.send(None, "error", _described(error))
        raise SystemExit(3) from None
    server.serve(0)


if __name__ == "__main__":
    main()
