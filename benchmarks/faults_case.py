"""Playing one case: a run, its faults, the same command again until it is complete, the check."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import shutil
import signal
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from faults_check import Problem, Undisturbed, check_finished, check_records, run_folder
from faults_plan import KINDS, Case, Fault
from faults_processes import Attempt, Launcher, describe, end_all, start_time, users_of

PATIENCE_S = 90.0  # for a process that was told to end, or has lost what it needs
TIDY_S = 40.0  # for processes to be gone after their run
LONELY = 4  # attempts that may fail without a fault before the case is given up
STALE_S = 3.0  # after which a stopped writer counts as dead, in cases of taking over
ROUNDS = 3  # runs in a case: another one begins if faults are left when one is complete
OWN_LOAD = 0.06  # share of attempts that load PyTorch themselves: faults strike that time, too


class Stopped(Exception):  # noqa: N818  nothing went wrong
    """The campaign was asked to end; the case begins anew next time."""


@dataclass
class Result:
    """What a case came to."""

    case: str
    options: list[str]
    rounds: int = 0
    trials: int = 0
    attempts: int = 0
    struck: list[str] = field(default_factory=list)  # kinds, in order
    extra: int = 0  # attempts that ended incomplete though no ending fault had struck
    missed: int = 0  # faults whose moment never came: the run was complete before
    taken_over: int = 0  # times another process took the run from its writer
    ended: list[str] = field(default_factory=list)  # how each attempt ended
    problems: list[dict[str, str]] = field(default_factory=list)  # with the fault before each
    seconds: float = 0.0


class Player:
    """Plays one case in its folder."""

    def __init__(
        self,
        case: Case,
        folder: Path,
        calm: Undisturbed,
        seconds: float,
        stop: threading.Event | None = None,
    ) -> None:
        self._case, self._folder, self._calm = case, folder, calm
        self._calm_s = seconds  # that an undisturbed run takes
        self._out = folder / "runs0"
        self._rng = random.Random(f"how {case.name} {case.faults}")
        self._holes = 0
        self._known: set[tuple[str, str]] = set()
        self._family: dict[int, str] = {}
        self._old: set[Path] = set()  # what earlier attempts left in the temporary folder
        # Short: sockets of serving engines lie in it.
        self._scratch = Path(tempfile.mkdtemp(prefix="kvf-"))
        self._patience = PATIENCE_S + 5 * seconds
        self._stop = stop
        self.result = Result(case.name, list(case.options))

    @property
    def _run(self) -> Path | None:
        return run_folder(self._out)

    def play(self, launcher: Launcher) -> Result:
        """Play until the run is complete, and check it."""
        began = time.monotonic()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        plan = deque(self._case.faults)
        try:
            for number in range(ROUNDS):
                self._out, self._holes = self._folder / f"runs{number}", 0
                self._round(launcher, plan)
                if not plan:
                    break
        finally:
            end_all(self._family | users_of(self._scratch))
            shutil.rmtree(self._scratch, ignore_errors=True)
        self.result.missed = len(plan)
        self.result.seconds = round(time.monotonic() - began, 1)
        return self.result

    def _round(self, launcher: Launcher, plan: deque[Fault]) -> None:
        """Play one run until it is complete, and check it."""
        self.result.rounds += 1
        self.result.trials += len(self._calm.trials)
        lonely = 0
        while lonely < LONELY and not self._calm.complete(self._run):
            left = len(plan)
            self._attempt(launcher, plan)
            lonely += left == len(plan)
        self._finish()

    def _attempt(self, launcher: Launcher, plan: deque[Fault]) -> None:
        own = self._rng.random() < OWN_LOAD
        attempt = self._start(None if own else launcher)
        struck: list[str] = []
        clock = self._clock()
        while attempt.poll(0.006) is None:
            if self._stop is not None and self._stop.is_set():
                attempt.note_family()
                self._family |= attempt.family
                attempt.signal(signal.SIGKILL)
                attempt.wait(PATIENCE_S)
                raise Stopped
            if time.monotonic() - attempt.began > self._patience:
                self._hung(attempt, struck, "went on and on")
                break
            if not plan or not clock.due(plan[0]):
                continue
            if (after := self._strike(attempt, plan[0])) is None:
                continue  # its target is not there yet
            fault = plan.popleft()
            struck.append(fault.kind)
            self.result.struck.append(fault.kind)
            attempt, clock = after, self._clock()
            if KINDS[fault.kind].ends and fault.kind != "takeover":
                if not attempt.wait(self._patience):
                    self._hung(attempt, struck, "did not end")
                if fault.kind == "torn files":
                    self._holes += tear(self._run, self._rng, fault.how)
                break
        self._after(attempt, struck)

    def _start(self, launcher: Launcher | None) -> Attempt:
        self.result.attempts += 1
        self._old = set(self._scratch.iterdir())
        words = ["run", *self._case.options, "--out", str(self._out), "-q", "--json"]
        log = self._folder / f"attempt{self.result.attempts}.err"
        hurry = any(fault.kind == "takeover" for fault in self._case.faults)
        return Attempt.start(launcher, words, log, self._scratch, STALE_S if hurry else None)

    def _clock(self) -> _Clock:
        return _Clock(self._count, len(self._calm.trials), self._calm_s)

    def _count(self) -> int:
        with contextlib.suppress(OSError):
            run = self._run
            return 0 if run is None else (run / "samples.jsonl").read_bytes().count(b"\n")
        return 0

    def _strike(self, attempt: Attempt, fault: Fault) -> Attempt | None:
        """Let a fault happen; return the attempt that goes on, None if there is nothing to hit."""
        verb = fault.kind.split()[0]
        target = attempt.target(KINDS[fault.kind].target, fault.how)
        if target is None:
            return None
        attempt.note_family()
        if verb in ("kill", "torn"):
            with contextlib.suppress(ProcessLookupError):
                (os.killpg if fault.kind == "kill group" else os.kill)(target, signal.SIGKILL)
        elif verb == "stop":
            with contextlib.suppress(ProcessLookupError):
                os.kill(target, signal.SIGSTOP)
                time.sleep(0.1 + fault.how)
                os.kill(target, signal.SIGCONT)
        elif verb == "int":
            attempt.signal(signal.SIGINT)
            if fault.kind == "int twice" and attempt.poll(fault.how**2 * 2) is None:
                attempt.signal(signal.SIGINT)
        elif verb == "term":
            attempt.signal(signal.SIGTERM)
        elif verb == "full":
            sizes = [each.stat().st_size for each in (self._run or Path()).glob("*.jsonl")]
            attempt.fill_disk(int(min(sizes, default=0) + 2000 * fault.how))
        else:
            return self._take_over(attempt)
        return attempt

    def _take_over(self, first: Attempt) -> Attempt | None:
        """Stop the writer for so long that another one takes the run; then let it go on."""
        if self._run is None or not (self._run / "run.json").is_file():
            return None
        self._stop_outside_the_lock(first, self._run)
        time.sleep(STALE_S * 1.2)
        second = self._start(None)
        deadline = time.monotonic() + self._patience
        while second.poll(0.05) is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError, ValueError):
                if json.loads((self._run / "run.json").read_bytes())["pid"] == second.pid:
                    break
        first.signal(signal.SIGCONT)
        if second.poll() is not None:
            return first  # it was refused
        self.result.taken_over += 1
        if not first.wait(self._patience):
            self._hung(first, ["takeover"], "went on after another had taken the run over")
        self._after(first, ["takeover"])
        return second

    @staticmethod
    def _stop_outside_the_lock(first: Attempt, run: Path) -> None:
        """Stop a writer where it does not hold the run's lock: with that it holds the run."""
        for _ in range(1000):
            first.signal(signal.SIGSTOP)
            time.sleep(0.02)
            fd = os.open(run / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                first.signal(signal.SIGCONT)
                time.sleep(0.005)
            else:
                return
            finally:
                os.close(fd)

    def _hung(self, attempt: Attempt, struck: list[str], detail: str) -> None:
        self._add(Problem("ended", f"attempt {self.result.attempts}", f"hung: {detail}"), struck)
        attempt.note_family()
        attempt.signal(signal.SIGKILL)
        attempt.wait(PATIENCE_S)

    def _after(self, attempt: Attempt, struck: list[str]) -> None:
        """Check what an attempt left."""
        self._family |= attempt.family
        text = attempt.log.read_text(errors="replace") if attempt.log.exists() else ""
        last = (text.strip().splitlines() or [""])[-1][:200]
        self.result.ended.append(f"{'+'.join(struck) or 'nothing'}: {attempt.ended} {last}")
        where = f"attempt {self.result.attempts}"
        complete = self._calm.complete(self._run)
        if "Traceback" in text:
            self._add(Problem("ended", where, f"a traceback: {last}"), struck)
        self.result.extra += not complete and not any(KINDS[kind].ends for kind in struck)
        if attempt.ended == 0 and not complete:
            self._add(Problem("ended", where, "said 0 with trials missing"), struck)
        if self._run is not None:
            for problem in check_records(self._run, self._calm):
                self._add(problem, struck)
        if not any(KINDS[kind].untidy for kind in struck):
            self._check_tidy(struck, where)

    def _check_tidy(self, struck: list[str], where: str) -> None:
        deadline = time.monotonic() + TIDY_S
        while (left := self._alive()) and time.monotonic() < deadline:
            time.sleep(0.1)
        for pid in left:
            self._add(Problem("left", where, f"process {describe(pid)}"), struck)
        end_all(left)
        for path in sorted(set(self._scratch.iterdir()) - self._old):
            if not path.name.startswith("torchinductor_"):  # PyTorch keeps it on purpose
                detail = f"{path.name} in the temporary folder"
                self._add(Problem("left", where, detail), struck)

    def _alive(self) -> dict[int, str]:
        family = {pid: began for pid, began in self._family.items() if start_time(pid) == began}
        return family | users_of(self._scratch)

    def _finish(self) -> None:
        if self._run is None or not self._calm.complete(self._run):
            self._add(Problem("lost", "the run", "never complete"), [])
            return
        for problem in check_finished(self._run, self._calm, self._holes):
            self._add(problem, [])
        self._old |= set(self._scratch.iterdir())
        self._check_tidy([], "the end")

    def _add(self, problem: Problem, struck: list[str]) -> None:
        # A false record makes its turns, its transcript and the summary differ, too.
        same = problem.what, f"{self.result.rounds} {problem.where}"
        if same in self._known:
            return
        self._known.add(same)
        fault = struck[-1] if struck else (self.result.struck or ["nothing"])[-1]
        self.result.problems.append({"fault": fault, **asdict(problem)})


def forget(folder: Path) -> None:
    """Delete the runs of a case, for which there is no use once they are checked."""
    for path in folder.glob("runs*"):
        shutil.rmtree(path, ignore_errors=True)


class _Clock:
    """When the next fault of an attempt is due."""

    def __init__(self, count: Callable[[], int], trials: int, calm_s: float) -> None:
        self._began = time.monotonic()
        self._count = count  # of records, by now
        self._records = count()
        self._missing = max(0, trials - self._records)
        # A third for loading and starting, whatever is missing.
        self._seconds = calm_s * (1 + 2 * self._missing / trials) / 3
        self._since: float | None = None  # when the moment came

    def due(self, fault: Fault) -> bool:
        now = time.monotonic()
        if self._since is None:
            if fault.by_time:
                come = now - self._began >= fault.share * self._seconds
            else:
                come = self._count() >= self._records + int(fault.share * self._missing)
            self._since = now if come else None
        return self._since is not None and now - self._since >= fault.delay


def tear(run: Path | None, rng: random.Random, how: float) -> int:
    """Leave the files of a dead run as a crash of the machine can; return the unreadable lines.

    What was forced to the disk stays. So only the last record of `samples.jsonl` can be damaged,
    when the machine died before that was done; more of `turns.jsonl` can have been on its way; and
    of a file that is replaced, the new content can lie in its temporary file.
    """
    if run is None:
        return 0
    samples, turns = run / "samples.jsonl", run / "turns.jsonl"
    holes = 0
    match rng.randrange(6):
        case 0:
            _damage_last(samples, lambda line: line[: int(how * len(line))])
        case 1:
            cut = 1 + int(how * 100)
            _damage_last(samples, lambda line: line[:-cut] + bytes(min(cut, len(line))))
        case 2:
            # Blocks reach the disk in any order: the end is there, what is before it is not.
            cut = 1 + int(how * 100)
            holes = _damage_last(samples, lambda line: bytes(cut) + line[cut:])
        case 3:
            lines = turns.read_bytes().splitlines() if turns.exists() else []
            with turns.open("ab") as file:
                file.write(lines[-1][: int(how * len(lines[-1]))] if lines else b"")
        case 4:
            for path in (samples, turns):
                if not path.exists():
                    path.touch()  # made, and nothing written yet
            (run / "transcripts").mkdir(exist_ok=True)
        case _:
            # Written whole or in part, and never renamed.
            whole = (run / "run.json").read_bytes() if (run / "run.json").exists() else b"{"
            (run / ".run.json.4194999.1.tmp").write_bytes(whole[: int(how * len(whole))])
            (run / "transcripts").mkdir(exist_ok=True)
            (run / "transcripts" / ".x-00000000-t0.json.4194999.1.tmp").write_bytes(b"")
    return holes


def _damage_last(path: Path, damage: Callable[[bytes], bytes]) -> int:
    """Damage the last line; return whether a whole, unreadable line is there now."""
    data = path.read_bytes() if path.exists() else b""
    start = data.rfind(b"\n", 0, len(data) - 1) + 1
    last = data[start:]
    if not last:
        return 0
    changed = damage(last)
    path.write_bytes(data[:start] + changed)
    return int(changed.endswith(b"\n"))
