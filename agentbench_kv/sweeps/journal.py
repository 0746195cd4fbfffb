"""What the workers of a sweep write down: one file each, read by all."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec
from msgspec import Struct

from agentbench_kv.errors import KVBenchError
from agentbench_kv.results.objects import Objects

ENDS = ("done", "failed", "lost", "held", "interrupted")


class Event(Struct, frozen=True, omit_defaults=True):
    """A worker started or ended, or began a run, which ended in one of the ways of `ENDS`."""

    at: float  # seconds since 1970, by the worker's clock: for people
    command: str  # the `kvbench sweep` that started the worker
    event: str
    run: str = ""
    seconds: float = 0.0  # a run took
    words: str = ""  # why it failed, or where the worker is


class Journal:
    """The file of one worker."""

    def __init__(self, objects: Objects, folder: str, worker: str, command: str) -> None:
        self._objects = objects
        self._name = f"{folder}/{worker}.jsonl"
        self._command = command
        self._lines: list[bytes] = []

    def note(self, event: str, run: str = "", seconds: float = 0.0, words: str = "") -> None:
        line = Event(time.time(), self._command, event, run, seconds, words[:500])
        self._lines.append(msgspec.json.encode(line))
        # Written whole every time: an object store cannot append.
        self._objects.write(self._name, b"\n".join(self._lines) + b"\n")


@dataclass
class RunHistory:
    """What the journals say about one run under one command."""

    failed: int = 0
    begun: dict[str, float] = field(default_factory=dict)  # workers that did not say how it ended
    seconds: float = 0.0  # that it took when it was done
    error: str = ""  # of the last failure


@dataclass
class Histories:
    """What the journals say about all runs."""

    runs: dict[str, RunHistory]  # by run
    started: set[str]  # workers
    seconds: list[float]  # of the runs that were done, whatever command played them

    def of(self, run: str) -> RunHistory:
        return self.runs.get(run) or RunHistory()


def read_journals(objects: Objects, folder: str) -> dict[str, list[Event]]:
    """Return the events of every worker; a line that is none is passed over."""
    found: dict[str, list[Event]] = {}
    decode = msgspec.json.Decoder(Event).decode
    for name in objects.names(folder):
        events = found.setdefault(name.removesuffix(".jsonl"), [])
        for line in (objects.read(f"{folder}/{name}") or b"").splitlines():
            try:
                events.append(decode(line))
            except (msgspec.MsgspecError, UnicodeDecodeError):
                continue
    return found


def histories(journals: Mapping[str, Iterable[Event]], command: str) -> Histories:
    """Sum up journals: failures of one command's workers, times of everybody's."""
    found = Histories({}, set(), [])
    for worker, events in journals.items():
        for event in events:
            if event.event == "done":
                found.seconds.append(event.seconds)
            if event.command == command:
                found.started.add(worker)
                _add(found.runs.setdefault(event.run, RunHistory()), worker, event)
    return found


def _add(history: RunHistory, worker: str, event: Event) -> None:
    if event.event == "began":
        history.begun[worker] = event.at
    if event.event in ENDS:
        history.begun.pop(worker, None)
    if event.event == "done":
        history.seconds = event.seconds
    if event.event == "failed":
        history.failed += 1
        history.error = event.words


def quietly(journal: Journal, event: str, run: str = "", words: str = "") -> None:
    """Note what can be noted where a worker ends anyway, by an error that counts more."""
    try:
        journal.note(event, run, words=words)
    except KVBenchError:
        return
