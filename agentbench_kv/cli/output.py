"""What the verbs print: tables or one JSON document, and how a run shows that it advances."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from agentbench_kv.cli.options import print_json
from agentbench_kv.engines.base import Capability
from agentbench_kv.errors import KVBenchError
from agentbench_kv.methods.kvpress import HINT
from agentbench_kv.registry import load_engine, load_method, load_task, names
from agentbench_kv.results.records import TrialRecord
from agentbench_kv.results.run_reader import RunReader
from agentbench_kv.results.show import finer_tables, summary_table
from agentbench_kv.results.summary import Summary
from agentbench_kv.results.terminal import console, new_table
from agentbench_kv.run.spec import RunSpec

AMPLE = 1 << 20  # a budget that every method takes


def show_plan(specs: Sequence[RunSpec], out: Path, as_json: bool) -> None:
    """Print what would run."""
    if as_json:
        print_json([{"run_id": spec.id, "spec": spec.document()} for spec in specs])
        return
    screen = console()
    for spec in specs:
        screen.print(f"{out / spec.id}", markup=False, soft_wrap=True)
    screen.print(f"{len(specs)} runs; nothing was started", markup=False)


def show_outcome(summaries: Sequence[Summary], out: Path, as_json: bool) -> int:
    """Print the tables of finished runs and where they are; return the exit code."""
    if as_json:
        documents = [(each.model_dump(mode="json"), out / each.run_id) for each in summaries]
        print_json([{**document, "path": str(path)} for document, path in documents])
        return 0
    screen = console()
    for table in (summary_table(summaries), *finer_tables(summaries)):
        screen.print(table)
    for summary in summaries:
        for note in (*summary.validity.reasons, *summary.notes):
            screen.print(f"{summary.run_id}: {note}", markup=False, soft_wrap=True)
    for summary in summaries:
        screen.print(str(out / summary.run_id), markup=False, soft_wrap=True)
    return 0


def show_lost(summaries: Sequence[Summary], out: Path) -> int:
    """Name the runs most of whose trials were lost, and to what; return the exit code."""
    lost = [each for each in summaries if 2 * each.lost >= max(1, each.trials)]
    for each in lost:
        trials = RunReader(out / each.run_id).trials()
        errors = [record.error for record in trials if not record.finished and record.error]
        last = _cause(errors[-1]) if errors else "no reason was given"
        click.echo(
            f"kvbench: {each.lost} of {each.trials} trials of {each.run_id} were lost to engine or "
            f"infrastructure, the last to: {last}; the same command tries them again",
            err=True,
        )
    return 1 if lost else 0


def _cause(error: str) -> str:
    """Return the line of an error that says what happened: a traceback's last one."""
    lines = error.strip().splitlines() or [""]
    return lines[-1 if lines[0].startswith("Traceback") else 0]


def show_listing(kind: str, engine: str | None, as_json: bool) -> None:
    """Print the methods, engines or tasks there are."""
    if kind == "methods":
        able = set() if engine is None else set(load_engine(engine).capabilities)
        rows = _described("method", lambda name: _method(name, engine, able))
    elif kind == "engines":
        rows = _described("engine", _engine)
    else:
        rows = _described("task", lambda name: {"name": name, "summary": load_task(name).summary})
    if as_json:
        print_json(rows)
        return
    columns = [column.replace("_", " ") for column in (rows[0] if rows else ())]
    cells = [map(_cell, row.values()) for row in rows]
    console().print(new_table(*columns, rows=cells))
    if kind == "methods":
        console().print(RULED, markup=False, soft_wrap=True)
        console().print(HINT, markup=False, soft_wrap=True)


RULED = (
    "NAME@system and NAME@prompt are a method's default preset that never evicts the system "
    "message with its tools, or anything before the first generated token "
    "(--set protect=N: the first N tokens)"
)


def _described(kind: str, describe: Callable[[str], dict[str, Any]]) -> list[dict[str, Any]]:
    """Describe every registered name; a plug-in that does not load is named and left out."""
    rows = []
    for name in names(kind):
        try:
            rows.append(describe(name))
        except KVBenchError as error:
            click.echo(f"kvbench: {kind} {name!r} is left out: {error}", err=True)
    return rows


def _method(name: str, engine: str | None, able: set[Capability]) -> dict[str, Any]:
    cls = load_method(name)
    plain = cls.create("", AMPLE if cls.compresses else None)
    row: dict[str, Any] = {
        "name": name,
        "summary": cls.summary,
        "presets": {key: dict(value) for key, value in cls.presets.items()},
        "presets_by_rule": sorted(cls.known_presets().keys() - cls.presets.keys()),
        "default_preset": cls.default_preset or None,
        "needs_budget": cls.compresses,
        "parameters": [
            {"name": key, "default": getattr(plain, key), "allowed": p.allowed(), "doc": p.doc}
            for key, p in cls.parameters().items()
        ],
        "source": cls.source,
    }
    return row if engine is None else row | {f"on_{engine}": plain.needs <= able}


def _engine(name: str) -> dict[str, Any]:
    cls = load_engine(name)
    summary = (cls.__doc__ or "").strip().splitlines()[0]
    return {"name": name, "summary": summary, "capabilities": sorted(cls.capabilities)}


def _cell(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(map(str, value))
    if isinstance(value, list):
        shown = (f"{i['name']}={i['default']}" if isinstance(i, dict) else str(i) for i in value)
        return ", ".join(shown)
    return "" if value is None else str(value)


LINES_PER_RUN = 10
FIRST_WORD_S = 60.0  # of a run in which nothing ends


class Quiet:
    """Shows nothing. Runs enter it, call it for each trial and leave it at the end."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __call__(
        self, spec: RunSpec, done: int, expected: int, record: TrialRecord | str | None
    ) -> None:
        """Report the state after `record`; None: a run or its first trial begins; or in words."""


def run_progress(quiet: bool = False, console: Console | None = None) -> Quiet:
    """Return what fits: nothing if `quiet`, a live bar if stderr is a terminal, else lines."""
    if quiet:
        return Quiet()
    console = console or Console(stderr=True, highlight=False, soft_wrap=True)
    return LiveProgress(console) if console.is_terminal else PlainProgress(console)


@dataclass
class Tally:
    """Figures of the trials that ended since this process began to play them."""

    began: float = field(default_factory=lambda: time.monotonic())
    tokens: int = 0  # generated
    events: int = 0  # compressions
    failed: int = 0  # trials without a score
    peaks: list[int] = field(default_factory=list)  # peak live tokens of each trial

    def add(self, record: TrialRecord) -> None:
        self.tokens += record.kv.decode_tokens
        self.events += record.kv.events
        self.failed += record.score is None
        if record.kv.logical:
            self.peaks.append(record.kv.peak_live)

    def __str__(self) -> str:
        seconds = max(time.monotonic() - self.began, 1e-9)
        words = [f"{self.tokens / seconds:,.0f} tok/s"]
        if self.peaks:
            words.append(f"live {sum(self.peaks) / len(self.peaks):,.0f}")
        words.append(f"{self.events:,} events")
        if self.failed:
            words.append(f"{self.failed} failed")
        return ", ".join(words)


class PlainProgress(Quiet):
    """A line when a run starts and about ten on the way, for logs and pipes.

    While no trial ends there is one after a minute, and then ever more rarely.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._tally = Tally()
        self._spec: RunSpec | None = None
        self._last = time.monotonic()  # when something ended or began
        self._patience = FIRST_WORD_S

    def __call__(
        self, spec: RunSpec, done: int, expected: int, record: TrialRecord | str | None
    ) -> None:
        if isinstance(record, str):
            self.wait(done, expected, record)
            return
        self._last, self._patience = time.monotonic(), FIRST_WORD_S
        if record is not None:
            self._tally.add(record)
            self.advance(done, expected)
            return
        self._tally = Tally()  # speed counts from the first trial on, not from the engine's start
        if spec is not self._spec:
            self._spec = spec
            self.begin(_title(spec), done, expected)

    def begin(self, title: str, done: int, expected: int) -> None:
        resumed = f" ({done} done before)" if done else ""
        self._console.print(f"{title}: {expected} trials{resumed}", markup=False)

    def wait(self, done: int, expected: int, words: str) -> None:
        if time.monotonic() - self._last >= self._patience:
            self._patience *= 2
            self._console.print(f"  {done}/{expected} trials, {words}", markup=False)

    def advance(self, done: int, expected: int) -> None:
        if done == expected or done % max(1, expected // LINES_PER_RUN) == 0:
            self._console.print(f"  {done}/{expected} trials, {self._tally}", markup=False)


class LiveProgress(PlainProgress):
    """One bar per run: trials, speed, live tokens, events, time left."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._bar: TaskID | None = None
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}", markup=False),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            console=console,
        )

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()  # what was drawn stays

    def begin(self, title: str, done: int, expected: int) -> None:
        self._bar = self._progress.add_task(title, total=expected, completed=done, figures="")

    def wait(self, done: int, expected: int, words: str) -> None:  # noqa: ARG002
        if self._bar is not None:
            self._progress.update(self._bar, figures=words)

    def advance(self, done: int, expected: int) -> None:  # noqa: ARG002
        if self._bar is not None:
            self._progress.update(self._bar, completed=done, figures=str(self._tally))


def _title(spec: RunSpec) -> str:
    if spec.budget is None:
        return f"{spec.method} on {spec.task}"
    unit = "tokens" if spec.budget.share is None else "of the session"
    return f"{spec.method} at {spec.budget} {unit} on {spec.task}"
