"""How a run shows that it advances: a live bar on a terminal, plain lines elsewhere, or nothing."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self

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

__all__ = ["LiveProgress", "PlainProgress", "Quiet", "RunProgress", "run_progress"]

LINES_PER_RUN = 10


class RunProgress(Protocol):
    """What runs report to: entered before the first, called for each trial, left at the end."""

    def __enter__(self) -> Self:
        """Begin to show."""
        ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the screen as it is."""
        ...

    def __call__(self, spec: RunSpec, done: int, expected: int, record: TrialRecord | None) -> None:
        """Report the state after `record`, or that a run or its first trial begins."""
        ...


def run_progress(quiet: bool = False, console: Console | None = None) -> RunProgress:
    """Return what fits: nothing if `quiet`, a live bar if stderr is a terminal, else lines."""
    console = console or Console(stderr=True, highlight=False, soft_wrap=True)
    if quiet:
        return Quiet()
    return LiveProgress(console) if console.is_terminal else PlainProgress(console)


@dataclass
class Tally:
    """Figures of the trials that ended since this process began to play them.

    Attributes
    ----------
    tokens, events, failed : int
        Generated tokens, compressions, trials without a score.
    peaks : list of int
        Peak live tokens of each trial.
    """

    began: float = field(default_factory=lambda: time.monotonic())
    tokens: int = 0
    events: int = 0
    failed: int = 0
    peaks: list[int] = field(default_factory=list)

    def add(self, record: TrialRecord) -> None:
        """Count a trial."""
        self.tokens += record.kv.decode_tokens
        self.events += record.kv.events
        self.failed += record.score is None
        if record.kv.logical:
            self.peaks.append(record.kv.peak_live)

    def __str__(self) -> str:
        """Say it in a few words."""
        seconds = max(time.monotonic() - self.began, 1e-9)
        words = [f"{self.tokens / seconds:,.0f} tok/s"]
        if self.peaks:
            words.append(f"live {sum(self.peaks) / len(self.peaks):,.0f}")
        words.append(f"{self.events:,} events")
        if self.failed:
            words.append(f"{self.failed} failed")
        return ", ".join(words)


class Quiet:
    """Shows nothing."""

    def __enter__(self) -> Self:
        """Do nothing."""
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing."""

    def __call__(self, spec: RunSpec, done: int, expected: int, record: TrialRecord | None) -> None:
        """Do nothing."""


class PlainProgress(Quiet):
    """A line when a run starts and about ten on the way, for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._tally = Tally()
        self._spec: RunSpec | None = None

    def __call__(self, spec: RunSpec, done: int, expected: int, record: TrialRecord | None) -> None:
        """Print a line now and then."""
        if record is None:
            self._tally = Tally()
            if spec is not self._spec:
                self._spec = spec
                resumed = f" ({done} done before)" if done else ""
                self._say(f"{_title(spec)}: {expected} trials{resumed}")
            return
        self._tally.add(record)
        if done == expected or done % max(1, expected // LINES_PER_RUN) == 0:
            self._say(f"  {done}/{expected} trials, {self._tally}")

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False)


class LiveProgress(Quiet):
    """One bar per run: trials, speed, live tokens, events, time left."""

    def __init__(self, console: Console) -> None:
        self._tally = Tally()
        self._spec: RunSpec | None = None
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
        """Begin to draw."""
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop drawing; what was drawn stays."""
        self._progress.stop()

    def __call__(self, spec: RunSpec, done: int, expected: int, record: TrialRecord | None) -> None:
        """Add a bar, or move the last one."""
        if record is None:
            self._tally = Tally()
            if spec is not self._spec:
                self._spec = spec
                self._bar = self._progress.add_task(
                    _title(spec), total=expected, completed=done, figures=""
                )
        elif self._bar is not None:
            self._tally.add(record)
            self._progress.update(self._bar, completed=done, figures=str(self._tally))


def _title(spec: RunSpec) -> str:
    if spec.budget is None:
        return f"{spec.method} on {spec.task}"
    size = (
        f"{spec.budget} tokens" if isinstance(spec.budget, int) else f"{spec.budget} of the session"
    )
    return f"{spec.method} at {size} on {spec.task}"
