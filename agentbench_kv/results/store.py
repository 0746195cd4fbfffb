"""The folder of runs and the directory of each: find it, claim it, append what finishes.

`run.json` says what a run is and who writes it; `samples.jsonl` and `turns.jsonl` hold a record a
line, `checkpoints` what trials under way have so far.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import msgspec
from msgspec import Struct

from agentbench_kv.errors import KVBenchError, PrerequisiteError, UsageError
from agentbench_kv.results import files
from agentbench_kv.results.records import TrialRecord, TurnRecord
from agentbench_kv.results.run_info import (
    HELD,
    STALE_S,
    Resume,
    RunHeldError,
    RunInfo,
    RunStatus,
    holder,
    is_gone,
    read_info,
    watch_heartbeat,
    write_info,
    writer,
)
from agentbench_kv.results.run_names import transcript_name
from agentbench_kv.results.run_reader import RunReader, TrialKey

CHECKPOINTS = "checkpoints"  # folder
METHOD_CODE = "method_code"  # in provenance; see `run.provenance`
BEAT_S = 5.0


class RunLostError(UsageError):
    """Another process took the run over from this one, which writes it no more."""


class RunDir(RunReader):
    """A run this process is writing; made by `RunStore.open`.

    Use it as a context manager: a clean exit marks the run `complete`, an exception `failed`.
    Appending is thread-safe, and what an append returned from survives `kill -9`. Append a trial's
    turns before the trial itself: the trial record is what says that both are on the disk.
    """

    def __init__(self, path: Path, info: RunInfo, resume: Resume | None) -> None:
        super().__init__(path)
        self._info = info
        self._earlier = [each for each in info.resumes if resume is None or each.at != resume.at]
        self._resume = resume
        self._recorded = False  # the resume, which is with the first trial that it finishes
        self._base_wall_s = info.wall_s
        self._started: float | None = None  # while trials are played
        self._lock = threading.RLock()
        self._stop = threading.Event()
        self._lost: RunLostError | None = None
        self._beat = threading.Thread(target=self._keep_beating, name="kvbench-beat", daemon=True)
        self._beat.start()

    def append_trial(self, record: TrialRecord) -> None:
        """Append one trial to `samples.jsonl`; on return it is on the disk.

        A PrerequisiteError if the disk is full or read-only (everything appended before is safe), a
        UsageError if another process took the run over.
        """
        self._append("samples.jsonl", [record])

    def append_turns(self, records: Sequence[TurnRecord]) -> None:
        """Append turns to `turns.jsonl`; raises like `append_trial`."""
        self._append("turns.jsonl", records)

    def save_transcript(self, sample_id: str, trial: int, data: Any) -> str:
        """Write a transcript as JSON and return its path inside the run directory."""
        name = transcript_name(sample_id, trial)
        path = self.path / name
        with self._writing():
            with files.writing(path):
                path.parent.mkdir(exist_ok=True)
            files.write_atomic(path, files.json_bytes(data, indent=1))
        return name

    def checkpoint(self, name: str) -> Path:
        """Return where what a trial under way has so far is, if it has kept anything."""
        return self.path / CHECKPOINTS / name

    @contextmanager
    def keeping(self, name: str) -> Iterator[IO[bytes]]:
        """Write a trial's checkpoint, which replaces the one before when the block ends well.

        Then it survives `kill -9`; raises like `append_trial`.
        """
        path = self.checkpoint(name)
        with files.writing(path):
            path.parent.mkdir(exist_ok=True)
        with files.replacing(path, self._writing) as file:
            yield file

    def checkpoints(self) -> list[str]:
        """Return the names of the checkpoints that there are."""
        found = (path.name for path in self.checkpoint("").glob("*"))
        return sorted(name for name in found if not name.startswith("."))

    def drop_checkpoints(self, names: Iterable[str]) -> None:
        """Remove checkpoints, if they are there, of trials that have ended."""
        for path in filter(Path.exists, map(self.checkpoint, names)):
            with self._writing(), files.writing(path):
                path.unlink(missing_ok=True)

    def annotate(self, provenance: Mapping[str, Any]) -> None:
        """Add provenance that is known only once the engine runs.

        If trials were finished before it was opened, the first start's values stay. What differs
        from them, or was not known, is recorded as changed, with the first trial finished so.
        """
        told = _plain(provenance)
        with self._lock:
            if self._resume is None:
                self._update(provenance=self._info.provenance | told)
                return
            changed = self._resume.changed | _changes(self._info.provenance, told)
            self._resume = self._resume.model_copy(update={"changed": changed})
            if self._recorded:
                self._update(resumes=[*self._earlier, self._resume])

    @contextmanager
    def playing(self) -> Iterator[None]:
        """Count as `wall_s` what passes within, and nothing before or after.

        An engine may take longer to start than its trials.
        """
        began = self._started = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                self._base_wall_s += time.monotonic() - began
                self._started = None

    def expect(self, trials: int) -> None:
        """Set how many trials make the run complete."""
        self._update(expected_trials=trials)

    def close(self, status: RunStatus = RunStatus.COMPLETE, error: str | None = None) -> None:
        """Stop the heartbeat and write the final status; further calls do nothing."""
        with self._lock:  # what is being appended is whole first
            if self._stop.is_set():
                return
            self._stop.set()
        self._beat.join()
        with contextlib.suppress(OSError):  # absent, or some trial is still to go on
            self.checkpoint("").rmdir()
        try:
            self._update(status=status, error=error)
        finally:
            HELD.discard(self._info.owner)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the run; an error on the way out never hides the one that caused it."""
        if error is None:
            self.close()
            return
        with contextlib.suppress(KVBenchError):
            if isinstance(error, KeyboardInterrupt):
                self.close(RunStatus.RUNNING)  # which nobody writes any more: interrupted
            else:
                self.close(RunStatus.FAILED, f"{type(error).__name__}: {error}")

    def _check_open(self) -> None:
        if self._stop.is_set():
            raise UsageError(f"run {self._info.run_id} is closed: nothing is recorded any more")

    def _append(self, name: str, records: Sequence[Struct]) -> None:
        with self._writing():
            # A start that finishes no trial says nothing of those there are.
            counts = any(isinstance(each, TrialRecord) and each.finished for each in records)
            if counts and self._resume is not None and not self._recorded:
                self._write(resumes=[*self._earlier, self._resume])
                self._recorded = True
            files.append_lines(self.path / name, map(msgspec.json.encode, records))

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Let nobody take the run over while it is written to, and write nothing once one has.

        A process may be stopped for minutes between any two statements.
        """
        with self._lock:
            self._check_open()
            if self._lost is not None:
                raise self._lost
            with files.exclusive(self.path):
                self._check_owner()
                yield

    def _check_owner(self) -> None:
        current = read_info(self.path)
        if current is not None and current.owner != self._info.owner:
            self._lost = RunLostError(
                f"run {self._info.run_id} was taken over by pid {current.pid} on "
                f"{current.host}; this process stops writing it"
            )
            raise self._lost

    def _update(self, **changes: Any) -> None:
        with self._lock, files.exclusive(self.path):
            self._check_owner()
            self._write(**changes)

    def _write(self, **changes: Any) -> None:
        active = 0.0 if self._started is None else time.monotonic() - self._started
        clock = {"heartbeat": time.time(), "wall_s": self._base_wall_s + active}
        self._info = self._info.model_copy(update=changes | clock)
        write_info(self.path, self._info)

    def _keep_beating(self) -> None:
        while self._lost is None and not self._stop.wait(BEAT_S):
            # A full disk may be freed again; whoever appends meanwhile is told.
            with contextlib.suppress(PrerequisiteError, UsageError):
                self._update()


def _claimed(
    path: Path, spec: dict[str, Any], provenance: dict[str, Any], expected_trials: int | None
) -> tuple[RunInfo, Resume | None]:
    """Return a run's record with this process as its writer, and what changes if it goes on."""
    old = read_info(path)
    now = time.time()
    mine: dict[str, Any] = {
        "status": RunStatus.RUNNING,
        "heartbeat": now,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "machine": files.machine(),
        "owner": uuid.uuid4().hex,
        "error": None,
    }
    if old is None:
        mine |= {"provenance": provenance, "expected_trials": expected_trials}
        return RunInfo(run_id=path.name, spec=spec, created=now, **mine), None
    who = holder(old, now)
    if who is not None:
        raise RunHeldError(f"run {old.run_id} is being written by {who}; wait for it or stop it")
    goes_on = bool(RunReader(path).finished_trials())
    _refuse_another(path, old, spec, provenance if goes_on else {})
    if expected_trials is not None:
        mine["expected_trials"] = expected_trials
    mine["wall_s"] = old.wall_s + _unwritten_s(path, old)
    silent = Resume(at=now, taken_over=_silent(old, now))
    if silent.taken_over:
        mine["resumes"] = [*old.resumes, silent]
    if not goes_on:  # nothing that counts was played by an earlier start
        return old.model_copy(update=mine | {"provenance": provenance}), None
    # The first start noted all of this, too, or was of a version that did not know it.
    changed = _changes(old.provenance, provenance)
    return old.model_copy(update=mine), silent.model_copy(update={"changed": changed})


def _refuse_another(
    path: Path, old: RunInfo, spec: dict[str, Any], provenance: dict[str, Any]
) -> None:
    """Refuse to go on with a run of another spec, or of other code of its method."""
    other = _changes(old.spec, spec) | _changes(spec, old.spec)
    if other:
        name = min(other)
        raise UsageError(
            f"{path} holds a run of another spec: {name} is {old.spec.get(name)!r} there and "
            f"{spec.get(name)!r} here; choose another --out"
        )
    later = (each.changed[METHOD_CODE][1] for each in old.resumes if METHOD_CODE in each.changed)
    was = next(filter(None, (old.provenance.get(METHOD_CODE), *later)), None)
    now = provenance.get(METHOD_CODE)
    if was and now and was != now:
        raise UsageError(
            f"the code of method {spec.get('method')} changed since run {old.run_id} began; "
            "choose another --out"
        )


def _silent(info: RunInfo, now: float) -> str:
    """Name the writer that a run is taken over from, if nothing shows that it has ended."""
    if info.status is not RunStatus.RUNNING or is_gone(info):
        return ""
    age = now - info.heartbeat
    since = f"silent for {age:.0f} s" if age > 0 else f"its clock {-age:.0f} s ahead"
    return f"{writer(info)}, {since}"


def _unwritten_s(path: Path, info: RunInfo) -> float:
    """Return the seconds a killed writer played after its last heartbeat, if records prove any."""
    # Its trials count, so their time must: else every kill would make the run look faster.
    if info.status is not RunStatus.RUNNING:
        return 0.0
    try:
        last = (path / "samples.jsonl").stat().st_mtime
    except FileNotFoundError:
        return 0.0
    return min(max(0.0, last - info.heartbeat), STALE_S)


def _changes(old: dict[str, Any], new: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return what differs, with both values; None is as good as nothing."""
    return {k: (old.get(k), value) for k, value in new.items() if old.get(k) != value}


def _plain(data: Mapping[str, Any]) -> dict[str, Any]:
    return dict(json.loads(files.json_bytes(dict(data))))  # as it will read back


_HASH_START = re.compile(r"[0-9a-f]{4,10}")


@dataclass(frozen=True)
class RunStore:
    """A folder of run directories; made when the first run is opened."""

    root: Path

    def open(
        self,
        name: str,
        spec: Mapping[str, Any],
        provenance: Mapping[str, Any] | None = None,
        expected_trials: int | None = None,
    ) -> RunDir:
        """Create the run, or take over the one an earlier process left.

        `name` is what `run_id` returned; with fewer finished trials than expected (samples times
        trials) the run is `incomplete`. A UsageError if another process is writing the run, the
        directory holds another spec, or other code of the method has finished trials of it; a
        PrerequisiteError if the directory cannot be written.
        """
        path = self.root / name
        with files.writing(path):
            path.mkdir(parents=True, exist_ok=True)
        watch_heartbeat(path)
        with files.exclusive(path):
            info, resume = _claimed(path, _plain(spec), _plain(provenance or {}), expected_trials)
            write_info(path, info)
            HELD.add(info.owner)
            for folder in (path, path / "transcripts", path / CHECKPOINTS):
                files.sweep(folder, STALE_S)
        return RunDir(path, info, resume)

    def whole(
        self,
        name: str,
        spec: Mapping[str, Any],
        provenance: Mapping[str, Any],
        trials: Iterable[TrialKey],
    ) -> RunReader | None:
        """Return the run if it is complete and has all these trials, so nobody need write it.

        A UsageError if it could not be gone on with, as `open` says.
        """
        run = RunReader(self.root / name)
        info = read_info(run.path)
        if info is None or info.status is not RunStatus.COMPLETE:
            return None
        if not run.finished_trials().issuperset(trials):
            return None
        _refuse_another(run.path, info, _plain(spec), _plain(provenance))
        return run

    def names(self) -> list[str]:
        if not self.root.is_dir():
            return []
        return sorted(path.parent.name for path in self.root.glob("*/run.json"))

    def find(self, run: str) -> RunReader:
        """Find a run by path, by id, or by the first digits of the hash that ends its id.

        A UsageError naming the nearest ids if there is no such run, or more than one.
        """
        for path in (Path(run), self.root / run):
            if (path / "run.json").is_file():
                return RunReader(path)
        names = self.names()
        ending = [name for name in names if name.rpartition("-")[2].startswith(run)]
        if _HASH_START.fullmatch(run) and ending:
            if len(ending) > 1:
                raise UsageError(f"{run} is {len(ending)} runs: {', '.join(ending[:3])}; say more")
            return RunReader(self.root / ending[0])
        raise UsageError(f"no run {run!r} here or in {self.root}/{suggestion(run, names)}")


def suggestion(name: str, known: Sequence[str]) -> str:
    """Return what ends an error about an unknown name: a question with up to three, or nothing."""
    holding = [candidate for candidate in known if name and name.lower() in candidate.lower()]
    near = holding[:3] or difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    return f"; did you mean {' or '.join(near)}?" if near else ""
