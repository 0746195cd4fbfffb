"""`kvbench ls runs`, and the index that lists thousands of runs in seconds.

One file in the folder, `.kvbench-index.json`, holds what is shown of each run, with the times,
sizes and inodes of the files it was derived from. It is a cache and nothing else: what does not
fit the files is derived again, and where it cannot be written, the answer is the same. It is
replaced atomically, so any number of processes may use it.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from agentbench_kv.errors import KVBenchError, UsageError
from agentbench_kv.results import terminal
from agentbench_kv.results.files import sweep, write_atomic
from agentbench_kv.results.run_info import RunStatus, ahead, holder, read_info
from agentbench_kv.results.terminal import failures, megabytes, number, plain, share

FILE = ".kvbench-index.json"
_VERSION = 4
_LEFT_S = 3600.0  # after which a half-written index is nobody's
_SOURCES = ("run.json", "samples.jsonl")
# Time of change in ns, size and inode of each source; zeros for one that is missing.
Stamp = tuple[int, ...]


class EntryScore(Struct, frozen=True, gc=False):
    """The headline score with its 95% interval, in [0, 1]."""

    point: float
    low: float
    high: float


class RunEntry(Struct, frozen=True, gc=False):
    """What a listing shows of one run; tokens are per (layer, KV head)."""

    run_id: str
    # `running`, `complete`, `failed`; `interrupted` if it says `running` and nobody writes it,
    # `unclear` if its heartbeat is ahead of this machine's clock.
    status: str = "failed"
    taken_over: bool = False  # from a writer that had gone silent, and of which no more is known
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
    score: EntryScore | None = None  # None without trials
    peak_bytes: float = 0.0  # medians over trials; bytes are 0 where they are not known
    peak_live: float | None = None
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


class _Kept(Struct, frozen=True, gc=False, array_like=True):  # an entry, its files' stamp
    stamp: Stamp
    entry: RunEntry


class _Index(Struct):  # the file's content: entries by folder name
    version: int
    runs: dict[str, _Kept]


def read_index(folder: Path) -> list[RunEntry]:
    """Return an entry for every run directly in a folder, sorted by folder name.

    Entries that no longer fit their files are derived again and the index file is refreshed; a
    damaged one is rebuilt, and one that cannot be written is done without.
    """
    old = _load(folder)
    fresh = {name: _refreshed(folder / name, stamp, old) for name, stamp in _stamps(folder)}
    if fresh != old:
        with contextlib.suppress(KVBenchError, OSError):
            write_atomic(folder / FILE, msgspec.json.encode(_Index(_VERSION, fresh)))
            sweep(folder, _LEFT_S)
    now = time.time()
    return [_with_status(folder / name, kept.entry, now) for name, kept in sorted(fresh.items())]


def _load(folder: Path) -> dict[str, _Kept]:
    try:
        index = msgspec.json.decode((folder / FILE).read_bytes(), type=_Index)
    except (OSError, msgspec.MsgspecError, ValueError):
        return {}
    return index.runs if index.version == _VERSION else {}


def _stamps(folder: Path) -> Iterator[tuple[str, Stamp]]:
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


def _derived(path: Path) -> RunEntry:
    # Imported here: scipy takes two seconds, which a warm index does without.
    from agentbench_kv.results.runs import load_run

    try:
        run = load_run(path)
    except (UsageError, OSError, ValueError) as error:
        return RunEntry(path.name, problem=" ".join(str(error).split()))
    summary = run.summary
    score, kv = summary.score, summary.kv
    return RunEntry(
        **{name: getattr(summary, name) for name in _SAME},
        status=summary.status.value,
        created=run.info.created,
        taken_over=any(resume.taken_over for resume in run.info.resumes),
        score=EntryScore(score.point, score.low, score.high) if score else None,
        peak_bytes=kv.median_peak_bytes if kv else 0.0,
        peak_live=kv.median_peak_live if kv else None,
        logical=kv.median_logical if kv else None,
        live_over_logical=kv.live_over_logical if kv else None,
        events=kv.events if kv else 0,
        evicted=kv.evicted if kv else 0,
        run_state=summary.validity.state.value,
    )


def _with_status(path: Path, entry: RunEntry, now: float) -> RunEntry:
    """Say `interrupted` of a run that nobody writes any more: no file changes when that happens."""
    if entry.status != RunStatus.RUNNING:
        return entry
    with contextlib.suppress(UsageError, OSError):
        info = read_info(path)
        if info is not None and holder(info, now) is None:
            status = "unclear" if ahead(info, now) else "interrupted"
            return msgspec.structs.replace(entry, status=status)
    return entry


_TAKEN = {False: "", True: "taken_over"}
_LAST = float("inf")


def _most(value: float | None) -> float:
    """Sort the largest first, what is missing last."""
    return _LAST if value is None else -value


SORTS: dict[str, Callable[[RunEntry], Any]] = {
    "name": lambda entry: entry.run_id,
    "newest": lambda entry: _most(entry.created),
    "score": lambda entry: _most(entry.score.point if entry.score else None),
    "kv": lambda entry: _LAST if entry.live_over_logical is None else entry.live_over_logical,
    "speed": lambda entry: _most(entry.tokens_per_s),
    "failures": lambda entry: _most(sum(entry.failures.values())),
}


@dataclass(frozen=True)
class Query:
    """Which runs to list, by names or shell patterns (`micro/*`), and in which order."""

    task: str | None = None
    method: str | None = None  # without `@` all of its presets
    model: str | None = None  # or its last path component
    status: str | None = None  # of the run (`complete`), its validity (`valid`), or `taken_over`
    sort: str = "name"  # a key of `SORTS`

    def wants(self, entry: RunEntry) -> bool:
        method, model = entry.method or "", entry.model or ""
        return (
            _matches(self.task, entry.task or "")
            and _matches(self.method, method, method.partition("@")[0])
            and _matches(self.model, model, model.rstrip("/").rsplit("/", 1)[-1])
            and self.status in (None, entry.status, entry.run_state, _TAKEN[entry.taken_over])
        )


def select_runs(entries: Sequence[RunEntry], query: Query) -> list[RunEntry]:
    wanted = sorted(filter(query.wants, entries), key=SORTS["name"])
    return sorted(wanted, key=SORTS[query.sort])


def list_runs(folder: Path, query: Query, limit: int, as_json: bool) -> None:
    """Print the runs of a folder, as JSON all, in a table `limit` of them; 0 is all."""
    entries = read_index(folder)
    wanted = select_runs(entries, query)
    if as_json:
        terminal.print_json(msgspec.to_builtins(wanted))
        return
    screen = terminal.console()
    if not wanted:
        tasks = ", ".join(sorted({entry.task for entry in entries if entry.task}))
        none = f"none of the {len(entries)} runs in {folder} is like that; tasks there: {tasks}"
        screen.print(plain(none if entries else f"no runs in {folder}"), soft_wrap=True)
        return
    shown = wanted[:limit] if limit else wanted
    if sys.stdout.isatty():
        width = screen.width
    else:
        width, screen.width = None, _UNLIMITED
    for line in runs_lines(shown, width):
        screen.print(line)
    for entry in shown:
        if entry.problem:
            screen.print(plain(f"{entry.run_id}: {entry.problem}"), soft_wrap=True)
    if len(shown) < len(wanted):
        more = len(wanted) - len(shown)
        screen.print(f"and {more} more; --limit 0 shows all, the filters fewer")


Columns = dict[str, Callable[[RunEntry], object]]

_MORE: Columns = {
    "kv": lambda entry: (
        None if entry.live_over_logical is None else f"{100 * entry.live_over_logical:.0f}%"
    ),
    "seed": lambda entry: entry.seed,
    "status": lambda entry: entry.status + (", taken over" if entry.taken_over else ""),
    "failures": lambda entry: failures(entry.failures),
    "peak live MB": lambda entry: megabytes(entry.peak_bytes),
    "peak live": lambda entry: number(entry.peak_live),
    "logical": lambda entry: number(entry.logical),
    "tok/s": lambda entry: number(entry.tokens_per_s),
}

_WIDE: Columns = {
    "run": lambda entry: entry.run_id,
    "method": lambda entry: entry.method,
    "budget": lambda entry: entry.budget,
    "task": lambda entry: entry.task,
    "score [95% CI]": lambda entry: (
        entry.score and share(entry.score.point, entry.score.low, entry.score.high)
    ),
    "trials": lambda entry: f"{entry.trials}/{entry.expected_trials or '?'}",
    "validity": lambda entry: entry.run_state or "unreadable",
    **_MORE,
}

_NARROW: Columns = {
    "method": _WIDE["method"],
    "budget": _WIDE["budget"],
    "score %": lambda entry: (
        entry.score
        and f"{100 * entry.score.point:.1f} "
        f"[{100 * entry.score.low:.0f}, {100 * entry.score.high:.0f}]"
    ),
    "n": _WIDE["trials"],
    "validity": _WIDE["validity"],
}

_FOLDED = ("run", "method", "validity")
_MOST = {"validity": 10}  # `budget_not_applied` takes two lines
_GAP = 2
_UNLIMITED = 100_000
_DIGEST = re.compile(r"-([0-9a-f]{8})[0-9a-f]{2}$")


def runs_lines(entries: Sequence[RunEntry], width: int | None) -> list[Table | Text]:
    """Return a table of one row per run, or what stands for it in a narrow terminal.

    Scores are in percent, KV figures in tokens per (layer, KV head). Where not everything fits,
    each task has a table of its own, an id is cut to the start of the hash that ends it, which
    names the run to every command that takes an id, and what matters less is shown as it fits.
    A width of None is as much as the table takes.
    """
    wide = {title: _cells(of, entries) for title, of in _WIDE.items()}
    widths = _widths(wide)
    if width is None or _total(widths) <= width:
        return [_table(wide, widths, fixed=True)]
    columns = {"run": [plain(name) for name in _short_ids(entries)]}
    columns |= {title: _cells(of, entries) for title, of in _NARROW.items()}
    widths = {title: min(size, _MOST.get(title, size)) for title, size in _widths(columns).items()}
    for title in _MORE:
        more = widths | _widths({title: wide[title]})
        if _total(more) <= width:
            columns[title], widths = wide[title], more
    lines: list[Table | Text] = []
    for task in dict.fromkeys(entry.task for entry in entries):
        rows = [index for index, entry in enumerate(entries) if entry.task == task]
        part = {title: [cells[row] for row in rows] for title, cells in columns.items()}
        lines += [plain(task), _table(part, widths, fixed=_total(widths) <= width)]
    lines.append(plain("run: the start of the hash in its id, enough for what takes an id"))
    if left_out := ", ".join(title for title in _MORE if title not in columns):
        lines.append(plain(f"left out: {left_out}; a wider terminal, a pipe or --json has all"))
    return lines


def _cells(of: Callable[[RunEntry], object], entries: Sequence[RunEntry]) -> list[Text]:
    return [plain(of(entry)) for entry in entries]


def _widths(columns: Mapping[str, Sequence[Text]]) -> dict[str, int]:
    return {
        title: max(map(cell_len, (title, *map(str, cells)))) for title, cells in columns.items()
    }


def _total(widths: Mapping[str, int]) -> int:
    return sum(widths.values()) + _GAP * (len(widths) - 1)


def _table(columns: Mapping[str, Sequence[Text]], widths: Mapping[str, int], fixed: bool) -> Table:
    """Return a table of columns as wide as told; unless fixed, words may be folded further."""
    table = terminal.new_table(*columns)
    for column, width in zip(table.columns, widths.values(), strict=True):
        column.no_wrap = column.header not in _FOLDED
        column.min_width, column.max_width = width if fixed else None, width
    for row in zip(*columns.values(), strict=True):
        table.add_row(*row)
    return table


def _short_ids(entries: Sequence[RunEntry]) -> list[str]:
    """Return the hash at the end of each id, where it has one that no other run here has."""
    found = [_DIGEST.search(entry.run_id) for entry in entries]
    count = Counter(match.group(1) for match in found if match)
    return [
        match.group(1) if match and count[match.group(1)] == 1 else entry.run_id
        for match, entry in zip(found, entries, strict=True)
    ]


def _matches(pattern: str | None, *names: str) -> bool:
    return pattern is None or any(fnmatchcase(name, pattern) for name in names)
