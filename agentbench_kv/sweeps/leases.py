"""Runs on an object store: leases by objects that one process can create, results published once.

A run is played in a scratch folder and published whole. Its claims are numbered; each is created
exclusively and rewritten as a heartbeat. Whoever has watched a claim stand still for long creates
the next one. No clock is compared with another machine's.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from agentbench_kv.errors import KVBenchError
from agentbench_kv.results import files
from agentbench_kv.results.objects import Objects
from agentbench_kv.results.run_info import RunHeldError, RunStatus, read_info, write_info
from agentbench_kv.results.run_reader import RunReader
from agentbench_kv.results.store import RunLostError
from agentbench_kv.results.summary import Summary, summarize
from agentbench_kv.run.engines import EngineShelf
from agentbench_kv.run.runner import Progress, run_one
from agentbench_kv.run.spec import RunSpec
from agentbench_kv.sweeps.place import RunPlace, RunStanding, State

_log = logging.getLogger(__name__)
CLAIMS, STAGED, PUBLISHED = ".claims", ".staged", ".published"
LEASE_S = 60.0  # after which a claim that stands still is nobody's
BEAT_S = 10.0
_MANIFEST = "manifest.json"
_LAST = "run.json"  # written last, so that a folder with it is whole


@dataclass
class Observed:
    """What claims looked like, and since when by this process's own clock."""

    seen: dict[str, tuple[bytes, float]] = field(default_factory=dict)
    moved: set[str] = field(default_factory=set)  # those that were seen to change: alive

    def still_s(self, name: str, content: bytes) -> float:
        """Return for how many seconds a claim has looked as it does."""
        now = time.monotonic()
        before = self.seen.get(name)
        if before is None or before[0] != content:
            if before is not None:
                self.moved.add(name)
            self.seen[name] = (content, now)
            return 0.0
        return now - before[1]


class RemotePlace(RunPlace):
    """The runs of an object store."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._observed = Observed()
        self._done: set[str] = set()

    def standings(self, runs: Iterable[str]) -> dict[str, RunStanding]:
        claims = _latest(self._objects.names(CLAIMS))
        published = set(self._objects.names(PUBLISHED))
        return {run: self._standing(run, claims.get(run, 0), run in published) for run in runs}

    def _standing(self, run: str, number: int, published: bool) -> RunStanding:
        if run in self._done:
            return RunStanding(State.DONE)
        if published and self._objects.read(f"{run}/{_LAST}") is not None:
            self._done.add(run)
            return RunStanding(State.DONE)
        content = self._objects.read(_claim(run, number)) if number else None
        if content is None or self._is_free(run, number, content):
            return RunStanding(State.FREE)
        said = _said(content)
        return RunStanding(State.HELD, said.get("finished", 0), None, said.get("who", ""))

    def _is_free(self, run: str, number: int, content: bytes) -> bool:
        still = self._observed.still_s(_claim(run, number), content)
        return bool(_said(content).get("released")) or still >= LEASE_S

    def unsure(self, runs: Iterable[str]) -> bool:
        """Whether a claim of held runs has not been seen to move yet: its holder may be dead."""
        claims = _latest(self._objects.names(CLAIMS))
        return any(_claim(run, claims.get(run, 0)) not in self._observed.moved for run in runs)

    def play(self, spec: RunSpec, progress: Progress, shelf: EngineShelf | None = None) -> Summary:
        with (
            Lease(self._objects, spec.id, self._taken(spec.id)) as lease,
            tempfile.TemporaryDirectory(prefix="kvbench-sweep-") as scratch,
        ):
            where = Path(scratch)
            return self._play(
                spec.id, lambda: run_one(spec, where, progress, shelf), lease, where / spec.id
            )

    def _taken(self, run: str) -> int:
        """Claim a run and return the claim's number; RunHeldError if another worker has it."""
        number = _latest(self._objects.names(CLAIMS)).get(run, 0)
        if number:
            content = self._objects.read(_claim(run, number)) or b""
            if not self._is_free(run, number, content):
                raise RunHeldError(f"run {run} is being played by {_said(content).get('who')}")
        if not self._objects.create(_claim(run, number + 1), _words()):
            raise RunHeldError(f"run {run} was claimed by another worker just now")
        return number + 1

    def _play(self, run: str, play: Callable[[], Summary], lease: Lease, folder: Path) -> Summary:
        winner = self._objects.read(f"{PUBLISHED}/{run}")
        if winner is not None:  # whoever published it did not come to the end
            return self._finished(run, int(winner), folder)
        self._restore(run, lease.number, folder)
        whole = False
        try:
            summary = play()
            whole = not summary.lost
        finally:
            # An attempt that failed or was interrupted: the next one goes on from it.
            if not whole and not lease.lost:
                self._stage(run, lease.number, folder)
        if whole:
            self._publish(run, lease, folder)
        return summary

    def _restore(self, run: str, number: int, folder: Path) -> None:
        """Bring back what earlier attempts left, and leave its writer's name out."""
        for earlier in range(number - 1, 0, -1):
            manifest = self._objects.read(f"{STAGED}/{run}.{earlier}/{_MANIFEST}")
            if manifest is not None and self._copy_here(run, earlier, manifest, folder):
                info = read_info(folder)
                if info is not None and info.status is RunStatus.RUNNING:
                    change = {"status": RunStatus.FAILED, "error": "interrupted"}
                    write_info(folder, info.model_copy(update=change))
                return

    def _copy_here(self, run: str, number: int, manifest: bytes, folder: Path) -> bool:
        for name in json.loads(manifest):
            data = self._objects.read(f"{STAGED}/{run}.{number}/{name}")
            path = (folder / name).resolve()
            if data is None or not path.is_relative_to(folder.resolve()):
                return False
            path.parent.mkdir(parents=True, exist_ok=True)
            files.write_atomic(path, data)
        return True

    def _stage(self, run: str, number: int, folder: Path) -> None:
        names = [str(path.relative_to(folder)) for path in _kept(folder)]
        for name in names:
            self._objects.write(f"{STAGED}/{run}.{number}/{name}", (folder / name).read_bytes())
        if names:
            manifest = json.dumps(names).encode()
            self._objects.write(f"{STAGED}/{run}.{number}/{_MANIFEST}", manifest)

    def _publish(self, run: str, lease: Lease, folder: Path) -> None:
        """Publish a run, unless another worker has: who comes first, by one created object."""
        lease.check()
        self._stage(run, lease.number, folder)
        number = str(lease.number).encode()
        if not self._objects.create(f"{PUBLISHED}/{run}", number):
            raise RunLostError(f"run {run} was published by another worker, which counts")
        self._finish(run, lease.number)

    def _finished(self, run: str, number: int, folder: Path) -> Summary:
        manifest = self._objects.read(f"{STAGED}/{run}.{number}/{_MANIFEST}")
        if manifest is None or not self._copy_here(run, number, manifest, folder):
            raise RunHeldError(f"run {run} is being published by another worker")
        self._finish(run, number)
        return summarize(RunReader(folder))

    def _finish(self, run: str, number: int) -> None:
        """Copy what was staged to the run's folder; every copier writes the same bytes."""
        manifest = self._objects.read(f"{STAGED}/{run}.{number}/{_MANIFEST}")
        names = json.loads(manifest) if manifest else []
        for name in sorted(names, key=lambda each: each == _LAST):
            data = self._objects.read(f"{STAGED}/{run}.{number}/{name}")
            if data is None:  # another one has finished it and tidied up
                return
            self._objects.write(f"{run}/{name}", data)
        for each in range(1, number + 1):
            self._tidy(run, each)

    def _tidy(self, run: str, number: int) -> None:
        folder = f"{STAGED}/{run}.{number}"
        manifest = self._objects.read(f"{folder}/{_MANIFEST}")
        for name in [_MANIFEST, *(json.loads(manifest) if manifest else [])]:
            self._objects.delete(f"{folder}/{name}")


class Lease:
    """A claim that is rewritten while the block lasts, and released at its end."""

    def __init__(self, objects: Objects, run: str, number: int) -> None:
        self.number = number
        self.lost = False
        self._objects = objects
        self._run = run
        self._over = threading.Event()
        self._beats = 0
        self._thread = threading.Thread(target=self._beat, name="kvbench-lease", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()
        try:
            self._objects.write(_claim(self._run, self.number), _words(released=True))
        except KVBenchError as problem:  # it lapses by itself
            _log.warning("kvbench: cannot release %s: %s", self._run, problem)

    def check(self) -> None:
        """Refuse to go on once there is a later claim."""
        if _latest(self._objects.names(CLAIMS)).get(self._run, 0) != self.number:
            self.lost = True
            raise RunLostError(f"run {self._run} was taken over; nothing of this attempt is kept")

    def _beat(self) -> None:
        while not self._over.wait(BEAT_S):
            self._beats += 1
            try:
                self.check()
                self._objects.write(_claim(self._run, self.number), _words(beats=self._beats))
            except RunLostError:
                return
            except KVBenchError:  # out of reach for a moment
                continue


def _claim(run: str, number: int) -> str:
    return f"{CLAIMS}/{run}.{number}"


def _latest(names: Iterable[str]) -> dict[str, int]:
    """Return the highest claim's number of every run."""
    found: dict[str, int] = {}
    for name in names:
        run, _, number = name.rpartition(".")
        if number.isdecimal():
            found[run] = max(found.get(run, 0), int(number))
    return found


def _words(**more: Any) -> bytes:
    who = f"pid {os.getpid()} on {socket.gethostname()}"
    return json.dumps({"who": who, **more}).encode()


def _said(content: bytes) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _kept(folder: Path) -> list[Path]:
    """Return the files of a run that matter elsewhere."""
    inside = sorted(folder.rglob("*")) if folder.is_dir() else []
    return [path for path in inside if path.is_file() and path.name[0] != "."]
