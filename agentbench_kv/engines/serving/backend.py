"""A backend through its deaths: who finds out starts it again, and asks again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import httpx

from agentbench_kv.engines.serving.process import BackendProcess, ControlClient
from agentbench_kv.engines.serving.transport import RequestError, RequestFailedError
from agentbench_kv.engines.serving.wire import EngineWire
from agentbench_kv.errors import EngineGoneError, PrerequisiteError

# Restarts one request waits for, and starts in a row that may fail after the first, before the
# engine is given up for good.
RESTARTS = 3
_PATIENCE_S = 5.0  # that a server may take to die once something about it broke
_LOOK_S = 0.1
_T = TypeVar("_T")


class SupervisedBackend:
    """The process behind an engine, and the channel to what runs in it.

    One that dies, as a whole or in part, is started again by the request that finds out. After
    `RESTARTS` of them in vain it is gone for good: EngineGoneError.
    """

    def __init__(self, name: str, wire: EngineWire, log: Path) -> None:
        self.name = name
        self.control = ControlClient(wire.control)
        self.epoch = 0  # starts so far
        self._wire = wire
        self._log = log
        self._starting = threading.Lock()
        self._gone: str | None = None  # why it will not be started again
        self._process: BackendProcess | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def restarts(self) -> int:
        return max(0, self.epoch - 1)

    def lost(self) -> bool:
        """Return whether the one that was started last is dead; what is left of it is ended."""
        return self._is_lost(self._process)

    def shutdown(self) -> None:
        """End it for good."""
        self._gone = self._gone or "the engine has been shut down"
        self._wire.close()
        if self._process is not None:
            self._process.stop()
        # Last: who asks for an account meanwhile would connect again.
        self.control.close()

    def serve(self, work: Callable[[], _T]) -> _T:
        """Do what needs the backend, again if it dies meanwhile, and return the result."""
        for _ in range(RESTARTS + 1):
            process = self.running()
            try:
                return work()
            except RequestError as error:
                if not isinstance(error, RequestFailedError) or not self._is_gone(process):
                    raise
            except (OSError, httpx.TransportError) as error:
                if not self._is_gone(process):
                    # No failure of whoever asked: another time it may go well.
                    broke = f"the connection to the {self.name} backend broke: {error}"
                    raise ConnectionError(broke) from error
            except Exception:
                if self._gone is None:  # or whatever failed because it was shut down meanwhile
                    raise
        with self._starting:
            what = f"died {RESTARTS + 1} times in one request"
            self._gone = self._gone or f"{process.ended(what)}; a run goes on with the same command"
            raise EngineGoneError(self._gone)

    def _is_gone(self, process: BackendProcess) -> bool:
        """Return whether a backend about which something broke is dead or dying."""
        deadline = time.monotonic() + _PATIENCE_S
        while not self._is_lost(process):
            if time.monotonic() > deadline:
                return False
            time.sleep(_LOOK_S)
        return True

    def _is_lost(self, process: BackendProcess | None) -> bool:
        """Return whether a backend is dead; what is left of one that lost a part is ended."""
        if self._gone is not None or process is None or not (process.alive and process.ready):
            return True
        if not self._wire.lost():
            return False
        process.kill(crippled=True)
        return True

    def running(self) -> BackendProcess:
        """Return a backend that runs, starting one if there is none."""
        with self._starting:
            if self._gone is None and (self._process is None or not self._process.alive):
                self._start()
            if self._gone is not None or self._process is None:
                raise EngineGoneError(self._gone)
            return self._process

    def _start(self) -> None:
        """Start a backend; one that ran before may fail to come back a few times."""
        for left in reversed(range(RESTARTS if self.epoch else 1)):
            if self._process is not None:
                self._process.kill()
            self.control.close()
            process = self._process = BackendProcess(self.name, self._wire.launch(), self._log)
            if self._gone is not None:  # shut down meanwhile
                process.kill()
                return
            try:
                process.wait_ready()
            except PrerequisiteError as error:
                if not self.epoch:
                    raise
                if process.timed_out or not left:
                    self._gone = self._gone or str(error)
                if self._gone is not None:
                    return
            else:
                self.epoch += 1
                return
