"""How a run shows that it advances: a live bar on a terminal, plain lines otherwise, or nothing."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from agentbench_kv.results.records import TrialRecord
from agentbench_kv.spec import RunSpec

LINES_PER_RUN = 10


class Quiet:
    """Shows nothing. Runs enter it, call it for each trial and leave it at the end."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __call__(self, spec: RunSpec, done: int, expected: int, record: TrialRecord | None) -> None:
        """Report the state after `record`; None: a run or its first trial begins."""


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
    """A line when a run starts and about ten on the way, for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._tally = Tally()
        self._spec: RunSpec | None = None

    def __call__(self, spec: RunSpec, done: int, expected: int, record: TrialRecord | None) -> None:
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

    def advance(self, done: int, expected: int) -> None:  # noqa: ARG002
        if self._bar is not None:
            self._progress.update(self._bar, completed=done, figures=str(self._tally))


def _title(spec: RunSpec) -> str:
    if spec.budget is None:
        return f"{spec.method} on {spec.task}"
    unit = "tokens" if isinstance(spec.budget, int) else "of the session"
    return f"{spec.method} at {spec.budget} {unit} on {spec.task}"
