"""Writing a run directory: claim it, keep its heartbeat, append what finishes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from msgspec import Struct

from agentbench_kv.errors import KVBenchError, PrerequisiteError, UsageError
from agentbench_kv.results.files import append_lines, exclusive, json_bytes, write_atomic, writing
from agentbench_kv.results.reader import RunReader
from agentbench_kv.results.records import TrialRecord, TurnRecord, encode
from agentbench_kv.results.runinfo import (
    HELD,
    STALE_S,
    Resume,
    RunInfo,
    RunStatus,
    holder,
    read_info,
    write_info,
)

BEAT_S = 5.0


class RunDir(RunReader):
    """A run this process is writing; made by `RunStore.open`.

    Use it as a context manager: a clean exit marks the run `complete`, an exception `failed`.
    Appending is thread-safe, and what an append returned from survives `kill -9`. Append a trial's
    turns before the trial itself: the trial record is what says that both are on the disk.
    """

    def __init__(self, path: Path, info: RunInfo) -> None:
        super().__init__(path)
        self._info = info
        self._base_wall_s = info.wall_s
        self._started: float | None = time.monotonic()
        self._lock = threading.RLock()
        self._stop = threading.Event()
        self._lost: UsageError | None = None
        self._beat = threading.Thread(target=self._keep_beating, name="kvbench-beat", daemon=True)
        self._beat.start()

    @classmethod
    def claim(
        cls, path: Path, spec: Mapping[str, Any], provenance: Mapping[str, Any], trials: int | None
    ) -> Self:
        """Create the directory, or take over the one an earlier process left.

        A UsageError if another process is writing the run or the directory holds another spec; a
        PrerequisiteError if the directory cannot be written.
        """
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)
        with exclusive(path):
            for leftover in path.glob(".*.tmp"):  # what a killed process left half-written
                with writing(leftover):
                    leftover.unlink(missing_ok=True)
            info = _claimed(path, _plain(spec), _plain(provenance), trials)
            write_info(path, info)
            HELD.add(info.owner)
        return cls(path, info)

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
        with writing(path):
            path.parent.mkdir(exist_ok=True)
        write_atomic(path, json_bytes(data, indent=1))
        return name

    def annotate(self, provenance: Mapping[str, Any]) -> None:
        """Add provenance that is known only once the engine runs.

        In a resumed run the first start's values stay and differences are recorded as changes.
        """
        with self._lock:
            self._update(**_annotated(self._info, _plain(provenance)))

    @contextmanager
    def playing(self) -> Iterator[None]:
        """Count as `wall_s` what passes within, and nothing before or after.

        An engine may take longer to start than its trials. Without this, all of the time counts
        in which the run is open.
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
        if self._stop.is_set():
            return
        self._stop.set()
        self._beat.join()
        try:
            self._update(status=status, error=error)
        finally:
            HELD.discard(self._info.owner)

    def __enter__(self) -> Self:
        """Return the run itself."""
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

    def _append(self, name: str, records: Sequence[Struct]) -> None:
        with self._lock:
            # A process that was suspended may have been taken for dead before its next heartbeat.
            if self._lost is None and time.time() - self._info.heartbeat > STALE_S:
                self._update()
            if self._lost is not None:
                raise self._lost
            append_lines(self.path / name, map(encode, records))

    def _update(self, **changes: Any) -> None:
        with self._lock, exclusive(self.path):
            current = read_info(self.path)
            if current is not None and current.owner != self._info.owner:
                self._lost = UsageError(
                    f"run {self._info.run_id} was taken over by pid {current.pid} on "
                    f"{current.host}; this process stops writing it"
                )
                raise self._lost
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
) -> RunInfo:
    old = read_info(path)
    now = time.time()
    mine: dict[str, Any] = {
        "status": RunStatus.RUNNING,
        "heartbeat": now,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "owner": uuid.uuid4().hex,
        "error": None,
    }
    if old is None:
        mine |= {"provenance": provenance, "expected_trials": expected_trials}
        return RunInfo(run_id=path.name, spec=spec, created=now, **mine)
    who = holder(old, now)
    if who is not None:
        raise UsageError(f"run {old.run_id} is being written by {who}; wait for it or stop it")
    changed = _changes(old.spec, spec) | _changes(spec, old.spec)
    if changed:
        name = min(changed)
        raise UsageError(
            f"{path} holds a run of another spec: {name} is {old.spec.get(name)!r} there and "
            f"{spec.get(name)!r} here; choose another --out"
        )
    if expected_trials is not None:
        mine["expected_trials"] = expected_trials
    mine["wall_s"] = old.wall_s + _unwritten_s(path, old)
    resumed = old.model_copy(update=mine | {"resumes": [*old.resumes, Resume(at=now)]})
    return resumed.model_copy(update=_annotated(resumed, provenance))


def _unwritten_s(path: Path, info: RunInfo) -> float:
    """Return the seconds a killed writer played after its last heartbeat, if records prove any.

    Its trials count, so their time must: without it every kill would make the run look faster.
    """
    if info.status is not RunStatus.RUNNING:
        return 0.0
    try:
        last = (path / "samples.jsonl").stat().st_mtime
    except FileNotFoundError:
        return 0.0
    return min(max(0.0, last - info.heartbeat), STALE_S)


def _annotated(info: RunInfo, provenance: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of `info` that new provenance changes."""
    if not info.resumes:
        return {"provenance": info.provenance | provenance}
    shared = {name: value for name, value in provenance.items() if name in info.provenance}
    *earlier, last = info.resumes
    changed = last.changed | _changes(info.provenance, shared)
    return {
        "provenance": provenance | info.provenance,
        "resumes": [*earlier, last.model_copy(update={"changed": changed})],
    }


def _changes(old: dict[str, Any], new: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    missing = object()
    return {k: (old.get(k), value) for k, value in new.items() if old.get(k, missing) != value}


def _plain(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the mapping as it will read back from JSON."""
    return dict(json.loads(json_bytes(dict(data))))


def transcript_name(sample_id: str, trial: int) -> str:
    """Return the path of a trial's transcript; a hash keeps sample ids apart that look alike."""
    slug = re.sub(r"[^A-Za-z0-9._-]+", "_", sample_id).strip("._")[:80] or "sample"
    digest = hashlib.sha256(sample_id.encode("utf-8", "replace")).hexdigest()
    return f"transcripts/{slug}-{digest[:8]}-t{trial}.json"
