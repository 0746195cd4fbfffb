"""The worker's side of the worker protocol; runs in another interpreter, standard library only.

Started as `python worker_child.py CONFIG`, where CONFIG is the JSON object that
`agentbench_kv.adapters.worker` writes. It loads the module named there, calls its
`setup(guard) -> {command: handler(request) -> JSON value}` and answers requests, each in a thread
of its own. This file must not import agentbench_kv: the other interpreter does not have it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import socket
import sys
import threading
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

PROTOCOL = 1
_PROCESS_EVENTS = frozenset({
    "subprocess.Popen", "os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn",
    "os.spawn", "os.startfile", "pty.spawn", "os.kill", "os.killpg", "signal.pthread_kill",
    "ctypes.dlopen", "ctypes.dlsym",
})  # fmt: skip
_FILE_EVENTS = frozenset({
    "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.truncate", "os.link", "os.symlink",
    "os.chmod", "os.chown", "shutil.rmtree", "shutil.move", "shutil.copyfile",
})  # fmt: skip
_ADDRESS_EVENTS = frozenset({"socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg"})
_LOOKUP_EVENTS = frozenset({
    "socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr", "socket.getnameinfo",
})  # fmt: skip
_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_LIMITS = {
    "cpu_s": resource.RLIMIT_CPU,
    "address_space": resource.RLIMIT_AS,
    "file_size": resource.RLIMIT_FSIZE,
    "open_files": resource.RLIMIT_NOFILE,
}


class RefusedError(PermissionError):
    """The guard refused what the code in this process tried to do."""


class Guard:
    """An audit hook: after `install`, no processes, no writing, no network but to endpoints.

    It stops what evaluated model text could do through Python's own functions. It is a second
    line behind checking that text, not a sandbox against native code.
    """

    def __init__(self) -> None:
        self._hosts: set[tuple[Any, ...]] = set()
        self._addresses: set[tuple[Any, ...]] = set()
        self._adding = threading.Lock()

    def allow(self, host: str, port: int) -> None:
        """Let sockets connect to `host:port`."""
        # Held during the lookup, so that a caller to whom the host is known has its addresses.
        with self._adding:
            if (host, port) in self._hosts:
                return
            self._hosts.add((host, port))
            try:
                found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            except OSError:
                self._hosts.discard((host, port))
                raise
            self._addresses.update(tuple(address[:2]) for *_, address in found)

    def install(self) -> None:
        """Start refusing; there is no way back in this process."""
        # The name codec of getaddrinfo is imported on first use; do it while files are free.
        "localhost".encode("idna")
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if event in _PROCESS_EVENTS or event in _FILE_EVENTS:
            raise RefusedError(f"refused in this worker: {event}")
        if event == "open" and isinstance(args[2], int) and args[2] & _WRITE_FLAGS:
            raise RefusedError(f"refused in this worker: writing {args[0]!r}")
        if event in _ADDRESS_EVENTS:
            address = args[1]
            if not isinstance(address, tuple) or tuple(address[:2]) not in self._addresses:
                raise RefusedError(f"refused in this worker: {event} to {address!r}")
        if event in _LOOKUP_EVENTS and tuple(args[:2]) not in self._hosts:
            raise RefusedError(f"refused in this worker: {event} of {args[0]!r}")


class WorkerRequest:
    """One request in progress."""

    def __init__(self, number: str, args: dict[str, Any], guard: Guard) -> None:
        self.id = number
        self.args = args
        self.cancelled = threading.Event()  # set when the caller no longer wants the answer
        self.guard = guard  # to allow the endpoint that the request names
        self._on_cancel: Callable[[], None] | None = None

    def on_cancel(self, action: Callable[[], None] | None) -> None:
        """Call `action` at cancellation, to break off a blocking read."""
        self._on_cancel = action
        if action is not None and self.cancelled.is_set():
            action()

    def cancel(self) -> None:
        self.cancelled.set()
        if self._on_cancel is not None:
            self._on_cancel()


class Port:
    """Writes events as JSON lines, one thread at a time."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()

    def send(self, number: str | None, event: str, data: Any) -> None:
        fields = {"v": PROTOCOL, "id": number, "event": event, "data": data}
        # Escaped: model text may hold lone surrogates, which no encoding can write.
        line = json.dumps(fields, default=repr)
        with self._lock:
            self._stream.write(line + "\n")
            self._stream.flush()


class Server:
    """Reads requests until standard input ends."""

    def __init__(self, port: Port, guard: Guard) -> None:
        self._port = port
        self._guard = guard
        self._handlers: dict[str, Callable[[WorkerRequest], Any]] = {}
        self._running: dict[str, WorkerRequest] = {}
        self._ready = False

    def beat(self, every_s: float) -> None:
        def loop() -> None:
            while True:
                self._port.send(None, "heartbeat", {"ready": self._ready})
                threading.Event().wait(every_s)

        threading.Thread(target=loop, daemon=True).start()

    def load(self, module_file: Path) -> None:
        self._handlers = import_worker(module_file).setup(self._guard)
        self._ready = True
        self._port.send(None, "heartbeat", {"ready": True})

    def serve(self, lines: TextIO) -> None:
        for line in lines:
            message = json.loads(line)
            if message["cmd"] == "cancel":
                if target := self._running.get(message["args"]["target"]):
                    target.cancel()
                continue
            request = WorkerRequest(message["id"], message["args"], self._guard)
            self._running[request.id] = request
            work = (request, message["cmd"])
            threading.Thread(target=self._answer, args=work, daemon=True).start()

    def _answer(self, request: WorkerRequest, command: str) -> None:
        try:
            event, data = "result", self._handlers[command](request)
        except Exception as error:  # noqa: BLE001  the parent decides what a failure means
            with contextlib.suppress(OSError):  # the log may have reached its size limit
                traceback.print_exc()
            event, data = "error", {"kind": type(error).__name__, "message": str(error)}
        self._running.pop(request.id, None)
        self._port.send(request.id, event, data)


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


def limit_resources(limits: dict[str, int | None]) -> None:
    """Set the limits that the parent asked for, and never write a core file."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for name, kind in _LIMITS.items():
        if (wanted := limits.get(name)) is not None:
            hard = resource.getrlimit(kind)[1]
            value = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            try:
                resource.setrlimit(kind, (value, value))
            except (ValueError, OSError) as error:  # macOS knows limits that it cannot set
                sys.stderr.write(f"limit {name}={value} not set: {error}\n")


def main() -> None:
    config = json.loads(sys.argv[1])
    # Whatever prints, in Python or below it, must not end up between protocol lines.
    port = Port(os.fdopen(os.dup(1), "w", encoding="utf-8"))
    os.dup2(2, 1)
    server = Server(port, Guard())
    limit_resources(config["limits"])
    server.beat(config["heartbeat_s"])
    try:
        server.load(Path(config["module"]))
    except Exception as error:  # noqa: BLE001  whatever it is, the parent must hear of it
        traceback.print_exc()
        port.send(None, "error", {"kind": type(error).__name__, "message": str(error)})
        raise SystemExit(3) from None
    server.serve(sys.stdin)


if __name__ == "__main__":
    main()
