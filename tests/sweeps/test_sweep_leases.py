"""Runs on an object store: claims by created objects, results published once and whole."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import fsspec
import pytest

from agentbench_kv.errors import KVBenchError
from agentbench_kv.results.objects import FolderObjects, Objects, RemoteObjects, objects_at
from agentbench_kv.results.run_info import RunHeldError
from agentbench_kv.results.store import RunLostError
from agentbench_kv.sweeps import leases
from agentbench_kv.sweeps.grid import SweepRun
from agentbench_kv.sweeps.leases import CLAIMS, PUBLISHED, STAGED, RemotePlace
from agentbench_kv.sweeps.place import State
from agentbench_kv.sweeps.supervise import Supervisor, SweepReport
from agentbench_kv.sweeps.sweep import Sweep
from agentbench_kv.sweeps.worker import Order, Worker


@pytest.fixture
def url() -> str:
    return f"memory://{uuid.uuid4().hex}"


@pytest.fixture
def objects(url: str) -> Objects:
    return objects_at(url)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "LEASE_S", 0.3)
    monkeypatch.setattr(leases, "BEAT_S", 0.02)


class Clock:
    """A clock that moves when it is told to, so that a busy machine lapses no claim."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(leases, "time", clock)
    return clock


def download(objects: Objects, out: Path, jobs: Sequence[SweepRun]) -> Path:
    for job in jobs:
        for name in ("run.json", "samples.jsonl", "summary.json", "turns.jsonl"):
            FolderObjects(out).write(
                f"{job.name}/{name}", objects.read(f"{job.name}/{name}") or b""
            )
    return out


def silent(*_: Any) -> None: ...


def test_three_workers_on_one_store_play_every_run_once(
    url, objects, jobs, tmp_path, sequential, played, monkeypatch
):
    runs, done = jobs(6), []
    publish = RemotePlace._publish

    def noted(place: RemotePlace, run: str, *rest: Any) -> None:
        publish(place, run, *rest)
        done.append(run)

    monkeypatch.setattr(RemotePlace, "_publish", noted)
    sweep = Sweep.of(objects, runs)
    command = sweep.register("here", 1, None)
    threads = [
        threading.Thread(target=Worker(Order(url, sweep.name, command.id, name), silent).work)
        for name in ("a", "b", "c")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rows, _ = sweep.rows(RemotePlace(objects), command)
    assert [row.state for row in rows] == ["done"] * 6
    assert sorted(done) == sorted(job.name for job in runs)
    assert played(download(objects, tmp_path / "got", runs), runs) == sequential(runs)
    for job in runs:
        assert objects.names(f"{job.name}/transcripts")
        assert len([n for n in objects.names(CLAIMS) if n.startswith(job.name)]) == 1
    assert not any(objects.names(f"{STAGED}/{job.name}.1") for job in runs)


class Bucket(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """An object store of several processes: whole objects, exclusive creation."""

    protocol = "bucket"
    cachable = False

    def __init__(self, **_: Any) -> None:
        super().__init__()
        self._root = Path(os.environ["BUCKET"])

    def _file(self, path: str) -> Path:
        return self._root / quote(self._strip_protocol(path), safe="")

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        whole = self._root / f"part-{uuid.uuid4().hex}"
        whole.write_bytes(value)
        if mode == "overwrite":
            whole.replace(self._file(path))
            return
        try:
            os.link(whole, self._file(path))
        finally:
            whole.unlink()

    def cat_file(self, path: str, **_: Any) -> bytes:
        return self._file(path).read_bytes()

    def rm_file(self, path: str) -> None:
        self._file(path).unlink()

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        del detail
        names = (unquote(each.name) for each in self._root.iterdir())
        inside = self._strip_protocol(path) + "/"
        return [
            {"name": name, "type": "file", "size": 0}
            for name in names
            if name.startswith(inside) and "/" not in name.removeprefix(inside)
        ]


@pytest.mark.usefixtures("impatient")
def test_three_processes_on_one_store_of_which_two_are_killed(
    jobs, fork, tmp_path, sequential, played, monkeypatch
):
    fsspec.register_implementation("bucket", Bucket, clobber=True)
    (tmp_path / "bucket").mkdir()
    monkeypatch.setenv("BUCKET", str(tmp_path / "bucket"))
    monkeypatch.setattr(leases, "LEASE_S", 3.0)
    runs, objects = jobs(6, limit=4), objects_at("bucket://runs")
    sweep = Sweep.of(objects, runs)
    command = sweep.register("here", 1, None)
    kills = [2, 1]

    def kill(report: SweepReport) -> None:
        if kills and report.count("running") >= kills[-1]:
            alive = [each for each in fork.workers if each.process.is_alive()]
            os.kill(alive[0].process.pid, signal.SIGKILL)
            kills.pop()

    place = RemotePlace(objects)
    supervisor = Supervisor("bucket://runs", sweep, place, command, fork, 3, kill)
    assert supervisor.run().over
    assert not kills
    assert played(download(objects, tmp_path / "got", runs), runs) == sequential(runs)
    published = objects.names(PUBLISHED)
    assert sorted(published) == sorted(job.name for job in runs)


@pytest.mark.usefixtures("impatient")
def test_a_claim_holds_while_it_moves_and_not_longer(objects, jobs, clock):
    (job,) = jobs(1)
    mine, theirs = RemotePlace(objects), RemotePlace(objects)
    number = mine._taken(job.name)
    assert theirs.standings([job.name])[job.name].state is State.HELD
    with pytest.raises(RunHeldError):
        theirs._taken(job.name)
    with leases.Lease(objects, job.name, number):
        before = objects.read(f"{CLAIMS}/{job.name}.{number}")
        while objects.read(f"{CLAIMS}/{job.name}.{number}") == before:
            time.sleep(0.01)
        clock.now += 0.6  # twice as long as a lease, whose claim is rewritten all the time
        assert theirs.standings([job.name])[job.name].state is State.HELD
        assert theirs.standings([job.name])[job.name].state is State.HELD
    assert theirs.standings([job.name])[job.name].state is State.FREE  # released: at once
    dead = theirs._taken(job.name)
    assert dead == 2
    assert mine.standings([job.name])[job.name].state is State.HELD
    clock.now += 0.4
    assert mine.standings([job.name])[job.name].state is State.FREE


@pytest.mark.usefixtures("impatient")
def test_of_many_that_take_over_one_succeeds(objects, jobs, clock):
    (job,), taken, held = jobs(1), [], []
    RemotePlace(objects)._taken(job.name)
    ready = threading.Barrier(9)

    def take() -> None:
        place = RemotePlace(objects)
        place.standings([job.name])
        ready.wait(60)
        ready.wait(60)
        try:
            taken.append(place._taken(job.name))
        except RunHeldError as error:
            held.append(error)

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    ready.wait(60)
    clock.now += 0.4
    ready.wait(60)
    for thread in threads:
        thread.join()
    assert (taken, len(held)) == ([2], 7)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("moment", ["before", "created"])
def test_a_worker_that_wakes_after_it_was_taken_over_publishes_nothing(
    objects, jobs, tmp_path, sequential, played, monkeypatch, moment
):
    """Stopped for long right before it publishes; or right after it looked whether it may."""
    (job,), woken = jobs(1), threading.Event()
    check = leases.Lease.check
    asleep = threading.Event()

    def stopped(lease: leases.Lease) -> None:
        if threading.current_thread().name == "zombie" and lease.number == 1:
            if moment == "created":
                check(lease)
            asleep.set()
            woken.wait(60)
            if moment == "created":
                return
        check(lease)

    monkeypatch.setattr(leases.Lease, "check", stopped)
    monkeypatch.setattr(leases.Lease, "_beat", lambda _: None)  # a stopped process has no threads
    caught: list[KVBenchError] = []

    def zombie() -> None:
        try:
            RemotePlace(objects).play(job.spec, silent)
        except KVBenchError as error:
            caught.append(error)

    thread = threading.Thread(target=zombie, name="zombie")
    thread.start()
    assert asleep.wait(60)
    other = RemotePlace(objects)
    while other.standings([job.name])[job.name].state is State.HELD:
        time.sleep(0.05)
    other.play(job.spec, silent)
    before = {n: objects.read(f"{job.name}/{n}") for n in objects.names(job.name)}
    woken.set()
    thread.join()
    assert isinstance(caught[0], RunLostError)
    assert {n: objects.read(f"{job.name}/{n}") for n in objects.names(job.name)} == before
    assert objects.read(f"{PUBLISHED}/{job.name}") == b"2"
    assert played(download(objects, tmp_path / "got", [job]), [job]) == sequential([job])


class Crash(BaseException):
    """The process is gone."""


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("after", [0, 3, 6, 9, 12])
def test_a_crash_at_any_write_of_publishing_is_mended_by_the_next_worker(
    objects, jobs, tmp_path, sequential, played, monkeypatch, after
):
    (job,), writes = jobs(1), 0
    dying = RemotePlace(objects)

    def crash(act: Callable[..., Any]) -> Callable[..., Any]:
        def acting(*args: Any) -> Any:
            nonlocal writes
            writes += 1
            if writes > after:
                raise Crash
            return act(*args)

        return acting

    publish = RemotePlace._publish
    monkeypatch.setattr(leases.Lease, "_beat", lambda _: None)  # a dead process has no threads
    monkeypatch.setattr(leases.Lease, "__exit__", lambda *_: None)  # nor is a claim released
    whole = RemoteObjects(dying._objects.url)

    def staged_publish(place: RemotePlace, *args: Any) -> None:
        for name in ("write", "create", "delete"):
            setattr(place._objects, name, crash(getattr(whole, name)))
        publish(place, *args)

    monkeypatch.setattr(RemotePlace, "_publish", staged_publish)
    with contextlib.suppress(Crash):
        dying.play(job.spec, silent)
    monkeypatch.setattr(RemotePlace, "_publish", publish)
    alive = RemotePlace(whole)
    deadline = time.monotonic() + 60
    while (state := alive.standings([job.name])[job.name].state) is not State.DONE:
        assert time.monotonic() < deadline
        if state is State.FREE:
            alive.play(job.spec, silent)
        time.sleep(0.02)
    assert played(download(whole, tmp_path / "got", [job]), [job]) == sequential([job])


def test_what_was_played_before_a_failure_is_not_played_again(objects, jobs, monkeypatch):
    (job,) = jobs(1, limit=4, concurrency=1)
    play, played = leases.run_one, []

    def failing(spec: Any, out: Path, progress: Any, shelf: Any) -> Any:
        def counted(spec: Any, done: int, expected: int, record: Any) -> None:
            if record is not None and not isinstance(record, str):
                played.append(record.key)
                if len(played) == 2:
                    raise RuntimeError("kaputt")
            progress(spec, done, expected, record)

        return play(spec, out, counted, shelf)

    monkeypatch.setattr(leases, "run_one", failing)
    place = RemotePlace(objects)
    with pytest.raises(RuntimeError):
        place.play(job.spec, silent)
    assert place.standings([job.name])[job.name].state is State.FREE
    place.play(job.spec, silent)
    assert len(played) == len(set(played)) <= 4
    info = json.loads(objects.read(f"{job.name}/run.json") or b"")
    assert (info["status"], len(info["resumes"])) == ("complete", 1)
    assert place.standings([job.name])[job.name].state is State.DONE


def test_a_store_with_odd_names_is_read_all_the_same(objects, jobs):
    (job,) = jobs(1)
    objects.write(f"{CLAIMS}/{job.name}.x", b"")
    objects.write(f"{CLAIMS}/{job.name}.1", b"\xff no json")
    assert RemotePlace(objects).standings([job.name])[job.name].state is State.HELD
