"""Workers that share a folder: every run once, whoever dies, fails, stops or is cancelled."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentbench_kv.engines.embedded.model import _load
from agentbench_kv.errors import EngineGoneError, PrerequisiteError, UsageError
from agentbench_kv.results import run_info, store
from agentbench_kv.results.objects import FolderObjects
from agentbench_kv.results.run_reader import RunReader
from agentbench_kv.results.store import RunStore
from agentbench_kv.run import runner, trial
from agentbench_kv.run.spec import RunSpec, resolve
from agentbench_kv.sweeps import place as places
from agentbench_kv.sweeps import sweep as sweeps
from agentbench_kv.sweeps import worker as workers
from agentbench_kv.sweeps.grid import SweepRun
from agentbench_kv.sweeps.journal import Histories
from agentbench_kv.sweeps.place import LocalPlace, RunStanding, State, check_locks
from agentbench_kv.sweeps.supervise import Supervisor, SweepReport, report_of
from agentbench_kv.sweeps.sweep import RunRow, Sweep
from agentbench_kv.sweeps.worker import Order, Worker


def supervised(
    out: Path,
    jobs: Sequence[SweepRun],
    executor: Any,
    *,
    most: int = 2,
    retries: int = 1,
    until: float | None = None,
    show: Callable[[SweepReport], None] = lambda _: None,
) -> SweepReport:
    sweep = Sweep.of(FolderObjects(out), jobs)
    command = sweep.register("fork", retries, until)
    return Supervisor(str(out), sweep, LocalPlace(out), command, executor, most, show).run()


def worker_here(out: Path, jobs: Sequence[SweepRun], **command: Any) -> tuple[Sweep, Worker]:
    sweep = Sweep.of(FolderObjects(out), jobs)
    told = sweep.register("here", command.get("retries", 1), command.get("until"))
    return sweep, Worker(Order(str(out), sweep.name, told.id, "w"), lambda *_: None)


def slowly(monkeypatch: pytest.MonkeyPatch, seconds: float = 0.1) -> None:
    """Make every trial take a while, so that there is a middle to strike at."""
    play = runner.play_trial

    def slow(*args: Any) -> Any:
        time.sleep(seconds)
        return play(*args)

    monkeypatch.setattr(runner, "play_trial", slow)


def test_workers_play_every_run_once_with_the_same_figures(
    tmp_path, jobs, fork, sequential, played
):
    runs = jobs(4)
    report = supervised(tmp_path / "out", runs, fork)
    assert [row.state for row in report.rows] == ["done"] * 4
    assert played(tmp_path / "out", runs) == sequential(runs)
    for job in runs:
        assert not RunReader(tmp_path / "out" / job.name).info.resumes
    assert 1 <= len(fork.workers) <= 3
    again = supervised(tmp_path / "out", runs, fork)
    assert again.over
    assert all(not RunReader(tmp_path / "out" / job.name).info.resumes for job in runs)


def test_workers_that_are_killed_are_replaced(
    tmp_path, jobs, fork, sequential, played, monkeypatch
):
    slowly(monkeypatch)
    runs, rng, killed = jobs(4, limit=4), random.Random(0), 0

    def kill(_: SweepReport) -> None:
        nonlocal killed
        alive = [each for each in fork.workers if each.process.is_alive()]
        if alive and killed < 5 and rng.random() < 0.3:
            os.kill(rng.choice(alive).process.pid, signal.SIGKILL)
            killed += 1

    report = supervised(tmp_path / "out", runs, fork, show=kill)
    assert killed >= 2
    assert [row.state for row in report.rows] == ["done"] * 4
    assert played(tmp_path / "out", runs) == sequential(runs)


def test_two_sweeps_on_one_folder_share_the_runs(
    tmp_path, jobs, fork, sequential, played, monkeypatch
):
    slowly(monkeypatch)
    runs, out = jobs(4), tmp_path / "out"
    sweep = Sweep.of(FolderObjects(out), runs)
    started = []
    for name in ("a", "b", "c"):
        command = sweep.register(name, 1, None)
        started.append(fork.start(Order(str(out), sweep.name, command.id, name)))
    for each in started:
        each.process.join()
    assert all(each.process.exitcode == 0 for each in started)
    assert played(out, runs) == sequential(runs)
    done = [
        event.run
        for name in ("a", "b", "c")
        for line in (
            FolderObjects(out).read(f".sweeps/{sweep.name}/workers/{name}.jsonl") or b""
        ).splitlines()
        if (event := sweeps_event(line)).event == "done"
    ]
    assert sorted(done) == sorted(job.name for job in runs)


def sweeps_event(line: bytes) -> Any:
    import msgspec

    from agentbench_kv.sweeps.journal import Event

    return msgspec.json.decode(line, type=Event)


def test_a_worker_that_was_stopped_writes_nothing_after_it_was_taken_over(
    tmp_path, jobs, sequential, played, monkeypatch
):
    """Stopped where it hurts most: its heartbeat is fresh, and it is about to append."""
    (job,), out = jobs(1), tmp_path / "out"
    reached, go_on = threading.Event(), threading.Event()
    append = store.RunDir._append

    def held_up(run: store.RunDir, name: str, records: Any) -> None:
        if not reached.is_set():
            reached.set()
            go_on.wait(60)
        append(run, name, records)

    monkeypatch.setattr(store.RunDir, "_append", held_up)
    caught: list[UsageError] = []

    def zombie() -> None:
        try:
            LocalPlace(out).play(job.spec, lambda *_: None)
        except UsageError as error:
            caught.append(error)

    thread = threading.Thread(target=zombie)
    thread.start()
    assert reached.wait(60)
    # The zombie's token is no longer held here, as if its process were another one's, and dead.
    info = RunReader(out / job.name).info
    run_info.HELD.discard(info.owner)
    LocalPlace(out).play(job.spec, lambda *_: None)
    go_on.set()
    thread.join()
    assert isinstance(caught[0], store.RunLostError)
    assert played(out, [job]) == sequential([job])
    assert RunReader(out / job.name).info.status is run_info.RunStatus.COMPLETE


def test_a_run_that_fails_is_tried_again_and_then_left(tmp_path, jobs, monkeypatch):
    runs, calls = jobs(3), []
    play = LocalPlace.play

    def broken(place: LocalPlace, spec: Any, *rest: Any) -> Any:
        calls.append(spec.seed)
        if spec.seed == 1:
            raise RuntimeError("kaputt")
        if spec.seed == 2 and calls.count(2) == 1:
            raise PrerequisiteError("for a moment")
        return play(place, spec, *rest)

    monkeypatch.setattr(LocalPlace, "play", broken)
    sweep, one = worker_here(tmp_path, runs, retries=2)
    one.work()
    rows, _ = sweep.rows(LocalPlace(tmp_path), sweep.commands()[-1])
    assert [row.state for row in rows] == ["done", "given up", "done"]
    assert (rows[1].failed, rows[1].error) == (3, "RuntimeError: kaputt")
    assert sorted(calls) == [0, 1, 1, 1, 2, 2]
    # Another command tries again what the first one gave up.
    _, again = worker_here(tmp_path, runs, retries=0)
    again.work()
    assert calls.count(1) == 4


@pytest.mark.usefixtures("told_task")
def test_lost_trials_are_a_failure(tmp_path, jobs):
    (job,) = jobs(1)
    sweep, one = worker_here(tmp_path, [job], retries=1)
    one.work()
    rows, _ = sweep.rows(LocalPlace(tmp_path), sweep.commands()[-1])
    assert rows[0].state == "given up"
    assert rows[0].failed == 2
    assert "2 of 2 trials were lost" in rows[0].error


@pytest.fixture
def told_task(monkeypatch):
    """Let every trial be lost to the engine."""
    from agentbench_kv.adapters.base import Outcome
    from agentbench_kv.results.records import TrialStatus

    lost = Outcome(TrialStatus.ENGINE_ERROR, error="gone")
    monkeypatch.setattr(trial, "_outcome", lambda *_: lost)


def test_a_run_that_kills_its_workers_is_left_alone(tmp_path, jobs, fork, monkeypatch):
    play = LocalPlace.play

    def deadly(place: LocalPlace, spec: Any, *rest: Any) -> Any:
        if spec.seed == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return play(place, spec, *rest)

    monkeypatch.setattr(LocalPlace, "play", deadly)
    monkeypatch.setattr(sweeps, "MOST_DEATHS", 2)
    report = supervised(tmp_path / "out", jobs(3), fork)
    assert [row.state for row in report.rows] == ["done", "given up", "done"]
    # Two workers may have chosen it before either died of it.
    assert report.rows[1].died in (2, 3)
    assert report.rows[1].error == "its workers died"


def test_cancel_ends_workers_and_the_same_runs_go_on_later(
    tmp_path, jobs, fork, sequential, played, monkeypatch
):
    slowly(monkeypatch, 0.3)
    runs, out = jobs(3, limit=6, concurrency=1), tmp_path / "out"

    def cancel(report: SweepReport) -> None:
        if report.count("running") and any(row.standing.finished for row in report.rows):
            assert Sweep.of(FolderObjects(out), runs).cancel() == 1

    report = supervised(out, runs, fork, show=cancel)
    assert report.why == "it was cancelled"
    assert not report.over
    assert all(not each.process.is_alive() for each in fork.workers)
    begun = sum(len(RunReader(out / j.name).trials()) for j in runs if (out / j.name).exists())
    assert 0 < begun < 18
    assert supervised(out, runs, fork).over
    assert played(out, runs) == sequential(runs)


def test_a_budget_of_hours_interrupts_what_is_under_way(tmp_path, jobs, fork, monkeypatch):
    slowly(monkeypatch, 0.5)
    runs = jobs(2, limit=20, concurrency=1)
    report = supervised(tmp_path / "out", runs, fork, until=time.time() + 2)
    assert report.why == "its time is up"
    assert not report.over
    assert all(not each.process.is_alive() for each in fork.workers)


@pytest.mark.parametrize("why", ["cancelled", "out of time"])
def test_a_worker_ends_by_itself_wherever_its_starter_is(tmp_path, jobs, fork, monkeypatch, why):
    slowly(monkeypatch, 0.3)
    runs, out = jobs(1, limit=50, concurrency=1), tmp_path / "out"
    sweep = Sweep.of(FolderObjects(out), runs)
    until = time.time() + 10 if why == "out of time" else None
    command = sweep.register("nobody", 1, until)
    started = fork.start(Order(str(out), sweep.name, command.id, "w"))
    while not LocalPlace(out).standings([runs[0].name])[runs[0].name].finished:
        time.sleep(0.05)
        assert started.process.is_alive()
    if why == "cancelled":
        sweep.cancel()
    started.process.join()
    assert started.process.exitcode == 130
    lines = (FolderObjects(out).read(f".sweeps/{sweep.name}/workers/w.jsonl") or b"").splitlines()
    assert sweeps_event(lines[-1]).event == "interrupted"
    rows, _ = sweep.rows(LocalPlace(out), command)
    assert (rows[0].state, rows[0].failed, rows[0].died) == ("waiting", 0, 0)


def test_workers_take_only_the_runs_they_have_the_cores_for(tmp_path, jobs):
    runs = [replace(job, cpus=1 + number % 2) for number, job in enumerate(jobs(4))]
    sweep, one = worker_here(tmp_path, runs)
    one.work()
    rows, _ = sweep.rows(LocalPlace(tmp_path), sweep.commands()[-1])
    assert [row.state for row in rows] == ["done", "waiting"] * 2


def test_workers_that_cannot_begin_end_the_sweep(tmp_path, jobs, fork, monkeypatch):
    def broken(*_: Any) -> None:
        raise PrerequisiteError("no such thing")

    monkeypatch.setattr(workers, "opened", broken)
    with pytest.raises(EngineGoneError, match="end before they begin: exit code 1"):
        supervised(tmp_path / "out", jobs(1), fork)


def test_what_a_worker_has_loaded_it_plays_first(jobs, tmp_path):
    mixed = [SweepRun(job.spec) for job in jobs(2)] + [
        SweepRun(replace(job.spec, model="null")) for job in jobs(2)
    ]
    order = [mixed[0], mixed[2], mixed[1], mixed[3]]
    sweep, one = worker_here(tmp_path, order)
    one.work()
    lines = FolderObjects(tmp_path).read(f".sweeps/{sweep.name}/workers/w.jsonl") or b""
    begun = [e.run for e in map(sweeps_event, lines.splitlines()) if e.event == "began"]
    models = ["null" if "-null-" in name else "gold" for name in begun]
    assert models in (["gold", "gold", "null", "null"], ["null", "null", "gold", "gold"])


def test_a_run_of_another_process_is_waited_for_by_nobody(tmp_path, jobs):
    """A worker leaves what others hold, and the sweep's own process sees it through."""
    held, free = jobs(2)
    with RunStore(tmp_path).open(held.name, held.spec.document(), {}, 2):
        sweep, one = worker_here(tmp_path, [held, free])
        one.work()
        rows, _ = sweep.rows(LocalPlace(tmp_path), sweep.commands()[-1])
        assert [row.state for row in rows] == ["running", "done"]
        assert str(os.getpid()) in rows[0].standing.holder


def test_a_folder_without_locks_is_refused(tmp_path, monkeypatch):
    check_locks(tmp_path)

    def no_locks(*_: Any) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(places.fcntl, "flock", no_locks)
    with pytest.raises(PrerequisiteError, match=r"cannot be locked .*not supported.*s3://") as it:
        check_locks(tmp_path)
    assert "\n" not in str(it.value)


@pytest.mark.parametrize(
    ("options", "refused"),
    [("rw,vers=4.2", False), ("rw,nolock", True), ("rw,local_lock=all", True)],
)
def test_a_mount_whose_locks_stay_on_one_machine_is_refused(
    tmp_path, monkeypatch, options, refused
):
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "1 0 0:1 / / rw - ext4 /dev/x rw,nolock\n"
        f"2 1 0:2 / {tmp_path} rw,noatime shared:1 - nfs4 server:/x {options}\n"
    )
    monkeypatch.setattr(places, "_MOUNTS", mounts)
    if refused:
        with pytest.raises(PrerequisiteError, match="locks stay on one machine"):
            check_locks(tmp_path / "runs")
    else:
        check_locks(tmp_path / "runs")


def test_a_plan_that_is_damaged_is_one_line(tmp_path, jobs, damaged):
    sweep = Sweep.of(FolderObjects(tmp_path), jobs(2))
    path = tmp_path / ".sweeps" / f"{sweep.name}.json"
    whole, rng = path.read_bytes(), random.Random(0)
    for _ in range(60):
        path.write_bytes(damaged(rng, whole))
        try:
            Sweep.load(FolderObjects(tmp_path), sweep.name)
        except UsageError as error:
            assert "\n" not in str(error)  # noqa: PT017


def test_the_time_left_is_by_what_was_done(jobs):
    states = [State.DONE, State.DONE, State.HELD, State.FREE]
    rows = [RunRow(job, RunStanding(state)) for job, state in zip(jobs(4), states, strict=True)]
    known = Histories({}, set(), [8.0, 12.0])
    # One run waits and one is taken for half done, for the one worker that plays.
    assert report_of(rows, known).left_s == 15.0
    assert report_of(rows, Histories({}, set(), [])).left_s is None
    assert report_of(rows[:2], known).left_s == 0.0
    lost = RunRow(rows[3].job, rows[3].standing, given_up=True)
    assert report_of([*rows[:2], lost], known).over


@pytest.mark.slow
def test_a_model_is_loaded_once_for_all_runs_of_a_worker(tmp_path, sequential, played):
    def run(method: str, budget: int, seed: int) -> SweepRun:
        spec = RunSpec("embedded", "micro", method, budget, "micro/recall-1k", seed=seed, limit=1)
        return SweepRun(resolve(spec, {}))

    runs = [run("snapkv", 64, 0), run("streamingllm", 96, 0), run("snapkv", 96, 1)]
    _load.cache_clear()
    _, one = worker_here(tmp_path / "out", runs)
    one.work()
    assert _load.cache_info().misses == 1
    _load.cache_clear()
    assert played(tmp_path / "out", runs) == sequential(runs)
