"""An index of a folder of runs, so that thousands of them are listed in seconds.

One file in the folder, `.kvbench-index.json`, holds what `kvbench ls runs` shows of each run, with
the times, sizes and inodes of the files it was derived from. It is a cache and nothing else: what
does not fit the files is derived again, and without the file, or where it cannot be written, the
answer is the same. It is replaced atomically, so any number of processes may use it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from agentbench_kv.errors import KVBenchError, UsageError
from agentbench_kv.results.files import write_atomic
from agentbench_kv.results.runinfo import RunStatus, holder, read_info

FILE = ".kvbench-index.json"
_VERSION = 2
_SOURCES = ("run.json", "samples.jsonl")

Stamp = tuple[int, ...]
"""Time of change in ns, size and inode of each source; zeros for one that is missing."""


class Score(Struct, frozen=True, gc=False):
    """The headline score with its 95% interval, in [0, 1]."""

    point: float
    low: float
    high: float


class Entry(Struct, frozen=True, gc=False):
    """What a listing shows of one run; tokens are per (layer, KV head)."""

    run_id: str
    status: str = "failed"  # `running`, `complete`, `failed`, or `interrupted`: nobody writes it
    created: float = 0.0  # seconds since 1970
    task: str | None = None
    method: str | None = None
    budget: int | str | None = None
    engine: str | None = None
    model: str | None = None
    seed: int | None = None
    samples: int = 0
    trials: int = 0
    expected_trials: int | None = None
    score: Score | None = None  # None without trials
    peak_live: float | None = None  # medians over trials
    logical: float | None = None
    live_over_logical: float | None = None  # mean over trials of peak live / logical
    events: int = 0
    evicted: int = 0
    tokens_per_s: float | None = None
    failures: dict[str, int] = {}  # trials by kind
    run_state: str = ""  # the validity's word (`RunState`); empty for a run that cannot be read
    problem: str | None = None  # why the run cannot be read; its figures are then missing


# Fields that an entry takes over from a run's summary.
_SAME = (
    "run_id", "task", "method", "budget", "engine", "model", "seed", "samples", "trials",
    "expected_trials", "tokens_per_s", "failures",
)  # fmt: skip


class _Kept(Struct, frozen=True, gc=False, array_like=True):
    """An entry with the stamp of the files it was derived from."""

    stamp: Stamp
    entry: Entry


class _Index(Struct):
    """The file's content: entries by folder name."""

    version: int
    runs: dict[str, _Kept]


def read_index(folder: Path) -> list[Entry]:
    """Return an entry for every run directly in a folder, sorted by folder name.

    Entries that no longer fit their files are derived again and the index file is refreshed; a
    damaged one is rebuilt, and one that cannot be written is done without.
    """
    old = _load(folder)
    fresh = {name: _refreshed(folder / name, stamp, old) for name, stamp in _stamps(folder)}
    if fresh != old:
        with contextlib.suppress(KVBenchError, OSError):
            write_atomic(folder / FILE, msgspec.json.encode(_Index(_VERSION, fresh)))
    now = time.time()
    return [_with_status(folder / name, kept.entry, now) for name, kept in sorted(fresh.items())]


def _load(folder: Path) -> dict[str, _Kept]:
    try:
        index = msgspec.json.decode((folder / FILE).read_bytes(), type=_Index)
    except (OSError, msgspec.MsgspecError, ValueError):
        return {}
    return index.runs if index.version == _VERSION else {}


def _stamps(folder: Path) -> Iterator[tuple[str, Stamp]]:
    """Yield the name and stamp of every run directory."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        for each in entries:
            stamp = _stamp(each.path)
            if stamp[0]:
                yield each.name, stamp


def _stamp(path: str) -> Stamp:
    stamp: list[int] = []
    for name in _SOURCES:
        try:
            found = os.stat(f"{path}/{name}")  # noqa: PTH116  30,000 of these: Path costs a second
        except OSError:
            stamp += (0, 0, 0)
            if name == _SOURCES[0]:
                break
        else:
            stamp += (found.st_mtime_ns, found.st_size, found.st_ino)
    return tuple(stamp)


def _refreshed(path: Path, stamp: Stamp, old: dict[str, _Kept]) -> _Kept:
    kept = old.get(path.name)
    if kept is not None and kept.stamp == stamp:
        return kept
    return _Kept(stamp, _derived(path))


def _derived(path: Path) -> Entry:
    # Imported here: scipy takes two seconds, which a warm index does without.
    from agentbench_kv.results.runs import load_run

    try:
        run = load_run(path)
    except (UsageError, OSError, ValueError) as error:
        return Entry(path.name, problem=" ".join(str(error).split()))
    summary = run.summary
    score, kv = summary.score, summary.kv
    return Entry(
        **{name: getattr(summary, name) for name in _SAME},
        status=summary.status.value,
        created=run.info.created,
        score=Score(score.point, score.low, score.high) if score else None,
        peak_live=kv.median_peak_live if kv else None,
        logical=kv.median_logical if kv else None,
        live_over_logical=kv.live_over_logical if kv else None,
        events=kv.events if kv else 0,
        evicted=kv.evicted if kv else 0,
        run_state=summary.validity.state.value,
    )


def _with_status(path: Path, entry: Entry, now: float) -> Entry:
    """Say `interrupted` of a run that nobody writes any more: no file changes when that happens."""
    if entry.status != RunStatus.RUNNING:
        return entry
    with contextlib.suppress(UsageError, OSError):
        info = read_info(path)
        if info is not None and holder(info, now) is None:
            return msgspec.structs.replace(entry, status="interrupted")
    return entry
