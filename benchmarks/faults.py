"""Random faults over real runs, and whether any trial was lost, doubled or false.

    python benchmarks/faults.py --out FOLDER [--engines embedded,bfcl,tau2] [--cases 80] [--seed 0]

Each case is a `kvbench run` in processes of its own that several faults befall, one after the
other. The same command is given again until the run is complete; then it is compared with the run
of that command to which nothing happened. Cases that are in FOLDER already are not played again.
Prints the tables of docs/records.md and every problem with the command that repeats its case; exit
code 1 if there is any. A case of one's own: `--only embedded-0007`, or `--kinds "int twice,kill"`.

A full disk is a limit on the size of the run's files (RLIMIT_FSIZE), set from outside while it
runs: the kernel refuses the write, the last one half-done. Everything else is done for real. One
attempt in 16 loads PyTorch itself; the others are forked from a process that has loaded it.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import queue
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from faults_case import PATIENCE_S, Player, Result, Stopped, forget
from faults_check import Problem, Undisturbed, check_finished, run_folder
from faults_plan import SETUPS, Case, draw_case
from faults_processes import Attempt, Launcher, end_all

from agentbench_kv.environments import python_of
from agentbench_kv.errors import PrerequisiteError

WHATS = ("lost", "doubled", "false", "left", "ended")
CALM_S = 1800.0  # that an undisturbed run may take
Document = dict[str, Any]


class NotCalmError(Exception):
    """There is no undisturbed run to compare with."""


class Campaign:
    """Cases in a folder, played by several threads."""

    def __init__(self, out: Path, seed: int) -> None:
        self._out = out
        self._seed = seed
        self._calm: dict[tuple[str, int], tuple[Undisturbed, float]] = {}
        self._making: defaultdict[tuple[str, int], threading.Lock] = defaultdict(threading.Lock)
        self._launchers: list[Launcher] = []  # at rest
        self.stop = threading.Event()  # ends the campaign; the cases in progress are given up

    def play(self, cases: Sequence[Case], jobs: int) -> list[Document]:
        """Play the cases that have no result yet; return the results of all."""
        todo: queue.SimpleQueue[Case] = queue.SimpleQueue()
        for case in cases:
            if self._read(case) is None:
                todo.put(case)
        errors: list[BaseException] = []
        threads = [threading.Thread(target=self._work, args=(todo, errors)) for _ in range(jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return [result for case in cases if (result := self._read(case)) is not None]

    def _work(self, todo: queue.SimpleQueue[Case], errors: list[BaseException]) -> None:
        launcher = self._launchers.pop() if self._launchers else Launcher()
        try:
            while not errors and not self.stop.is_set():
                self._play(todo.get_nowait(), launcher)
        except (queue.Empty, Stopped):
            pass
        except BaseException as error:  # noqa: BLE001  the main thread raises it
            errors.append(error)
        finally:
            self._launchers.append(launcher)

    def close(self) -> None:
        """End the processes that start runs."""
        while self._launchers:
            self._launchers.pop().close()

    def __enter__(self) -> Self:
        self._out.mkdir(parents=True, exist_ok=True)
        self._lock = (self._out / ".lock").open("ab")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise SystemExit(f"another campaign is at work in {self._out}") from None
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self._lock.close()

    def _play(self, case: Case, launcher: Launcher) -> None:
        folder = self._folder(case)
        try:
            with self._making[case.setup, case.variant]:
                calm, seconds = self._undisturbed(case, launcher)
            player = Player(case, folder, calm, seconds, self.stop)
            result = player.play(launcher)
        except (NotCalmError, ValueError) as error:
            result = Result(case.name, list(case.options))
            unplayed = Problem("ended", "the undisturbed run", str(error))
            result.problems.append({"fault": "nothing", **asdict(unplayed)})
            folder.mkdir(parents=True, exist_ok=True)
        document = {**asdict(result), "seed": self._seed}
        (folder / "result.json").write_text(json.dumps(document, indent=1))
        if not result.problems:
            forget(folder)
        for problem in result.problems:
            print(f"{case.name} after {problem['fault']}: {_said(problem)}", flush=True)

    def _undisturbed(self, case: Case, launcher: Launcher) -> tuple[Undisturbed, float]:
        """Return the run of a case's options that nothing befell, and the seconds it took.

        It is played twice, and must come to the same.
        """
        key = case.setup, case.variant
        if key not in self._calm:
            folder = self._out / f"seed{self._seed}" / f"calm-{case.setup}-{case.variant}"
            seconds = [self._play_calmly(case, folder / name, launcher) for name in ("a", "b")]
            first, second = (run_folder(folder / name) for name in ("a", "b"))
            if first is None or second is None:
                raise NotCalmError(f"there is none in {folder}")
            calm = Undisturbed(first)
            if differences := check_finished(second, calm):
                raise NotCalmError(f"another one differs ({folder}): {differences[0]}")
            self._calm[key] = calm, min(seconds)
        return self._calm[key]

    def _play_calmly(self, case: Case, out: Path, launcher: Launcher) -> float:
        """Play a command undisturbed, unless that was done before; return the seconds it took."""
        note, log = out.with_suffix(".seconds"), out.with_suffix(".err")
        if note.exists():
            return float(note.read_text())
        shutil.rmtree(out, ignore_errors=True)
        out.parent.mkdir(parents=True, exist_ok=True)
        words = ["run", *case.options, "--out", str(out), "-q", "--json"]
        with tempfile.TemporaryDirectory(prefix="kvf-") as scratch:
            attempt = Attempt.start(launcher, words, log, Path(scratch))
            deadline = attempt.began + CALM_S
            while not attempt.wait(1.0):
                if self.stop.is_set() or time.monotonic() > deadline:
                    attempt.signal(signal.SIGKILL)
                    attempt.wait(PATIENCE_S)
                    end_all(attempt.family)
        if self.stop.is_set():
            raise Stopped
        if attempt.ended:
            raise NotCalmError(f"kvbench {' '.join(words)}: {log.read_text()[-500:]}")
        seconds = time.monotonic() - attempt.began
        note.write_text(f"{seconds:.2f}")
        return seconds

    def _folder(self, case: Case) -> Path:
        return self._out / f"seed{self._seed}" / case.name

    def _read(self, case: Case) -> Document | None:
        try:
            return dict(json.loads((self._folder(case) / "result.json").read_bytes()))
        except (OSError, ValueError):
            return None


def _said(problem: Document) -> str:
    return f"{problem['what']}: {problem['where']}: {problem['detail']}"


@dataclass(frozen=True)
class Table:
    """A Markdown table; the first column is text, the others are numbers."""

    head: Sequence[str]
    rows: Sequence[Sequence[object]]

    def __str__(self) -> str:
        align = ["---", *["--:"] * (len(self.head) - 1)]
        lines = [self.head, align, *self.rows]
        return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def by_engine(results: Sequence[Document]) -> Table:
    """Count what happened to the runs of each engine or benchmark."""
    rows = []
    for setup in _setups(results):
        own = [each for each in results if _setup(each) == setup]
        whats = Counter(problem["what"] for each in own for problem in each["problems"])
        counts = [len(own), sum(len(each["struck"]) for each in own)]
        counts += [sum(each[name] for each in own) for name in ("attempts", "trials", "extra")]
        rows.append([setup, *counts, *(whats[what] for what in WHATS)])
    head = ("runs of", "cases", "faults", "attempts", "trials", "attempts more than needed")
    return Table([*head, *("lost", "doubled", "false", "left behind", "bad ends")], rows)


def by_kind(results: Sequence[Document]) -> Table:
    """Count faults of each kind by engine, and the problems that came after them."""
    setups = _setups(results)
    struck = Counter((kind, _setup(each)) for each in results for kind in each["struck"])
    bad = Counter(problem["fault"] for each in results for problem in each["problems"])
    rows = [
        [kind, *(struck[kind, setup] for setup in setups), bad[kind]]
        for kind in sorted({kind for kind, _ in struck} | set(bad))
    ]
    total = [sum(struck[kind, setup] for kind in {k for k, _ in struck}) for setup in setups]
    rows.append(["all", *total, bad.total()])
    return Table(["fault", *setups, "problems"], rows)


def _setup(result: Document) -> str:
    return str(result["case"]).rpartition("-")[0]


def _setups(results: Sequence[Document]) -> list[str]:
    return sorted({_setup(each) for each in results}, key=list(SETUPS).index)


def print_report(results: Sequence[Document], out: Path) -> int:
    """Print tables and problems; return the exit code."""
    print(f"\n{by_engine(results)}\n\n{by_kind(results)}")
    wrong = [each for each in results if each["problems"]]
    for each in wrong:
        again = f"--engines {_setup(each)} --seed {each['seed']} --only {each['case']}"
        print(f"\n{each['case']}: python benchmarks/faults.py --out {out}-again {again}")
        print(f"  kvbench run {' '.join(each['options'])}")
        for end in each["ended"]:
            print(f"  {end}")
        for problem in each["problems"][:8]:
            print(f"  after {problem['fault']}: {_said(problem)}")
    missed = sum(each["missed"] for each in results)
    print(f"\n{len(wrong)} of {len(results)} cases have problems; {missed} faults came too late")
    return 1 if wrong else 0


def _chosen(given: argparse.Namespace) -> list[Case]:
    """Return the cases of the command line, in turns of engines."""
    engines = []
    for name in given.engines.split(","):
        environment = SETUPS[name].environment
        try:
            if environment:
                python_of(environment)
            engines.append(name)
        except PrerequisiteError as error:
            print(f"{name} is left out: {error}")
    kinds = tuple(filter(None, given.kinds.split(",")))
    cases = [
        draw_case(name, given.seed, number, kinds)
        for number in range(given.first, given.first + given.cases)
        for name in engines
    ]
    if given.only:
        wanted = given.only.split(",")
        numbers = [each.rpartition("-") for each in wanted]
        return [draw_case(name, given.seed, int(number), kinds) for name, _, number in numbers]
    return cases


def main() -> int:
    """Play what was asked for."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--out", type=Path, required=True, help="folder of cases and results")
    options.add_argument("--engines", default="embedded,bfcl,tau2", help=", ".join(SETUPS))
    options.add_argument("--cases", type=int, default=80, help="of each engine")
    options.add_argument("--first", type=int, default=0, help="number of the first case")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--only", default="", help="names of cases")
    options.add_argument("--kinds", default="", help="these faults, in this order, in every case")
    options.add_argument("--jobs", type=int, default=2, help="cases at a time")
    given = options.parse_args()
    cases = _chosen(given)
    out = given.out.resolve()
    with Campaign(out, given.seed) as campaign:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: campaign.stop.set())
        results = campaign.play(cases, given.jobs)
    return print_report(results, out)


if __name__ == "__main__":
    sys.exit(main())
