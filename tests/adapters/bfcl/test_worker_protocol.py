"""The worker protocol with a worker that misbehaves on request."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from agentbench_kv.adapters import worker_child
from agentbench_kv.adapters.worker import (
    Limits,
    RemoteError,
    TrialLimitError,
    WorkerDiedError,
    WorkerPool,
    WorkerTimeoutError,
    WorkerTiming,
)
from agentbench_kv.errors import PrerequisiteError

DUMMY = Path(__file__).with_name("worker_dummy.py")
FAST = WorkerTiming(heartbeat=0.1, start=20, stall=10, grace=0.5)


def make(timing=FAST, **more):
    return WorkerPool(Path(sys.executable), DUMMY, timing=timing, **more)


@pytest.fixture
def pool():
    with make() as made:
        yield made


def test_answers(pool):
    assert pool.call("echo", {"a": [1, "Zürich", None]}) == {"a": [1, "Zürich", None]}


def test_lone_surrogates_survive(pool):
    assert pool.call("echo", {"text": "\ud800"}) == {"text": "\ud800"}


def test_many_requests_share_one_worker(pool, tmp_path):
    where = {"folder": str(tmp_path), "count": 16}
    with ThreadPoolExecutor(16) as threads:
        results = list(threads.map(lambda _: pool.call("meet", where, timeout=60), range(16)))
    assert results == ["met"] * 16


def test_handler_failure_is_an_error_and_the_worker_lives_on(pool):
    before = pool.call("environment")["pid"]
    with pytest.raises(RemoteError, match="no such thing") as caught:
        pool.call("fail")
    assert caught.value.kind == "ValueError"
    assert pool.call("environment")["pid"] == before


def test_unknown_command_is_an_error(pool):
    with pytest.raises(RemoteError, match="nonsense"):
        pool.call("nonsense")


def test_prints_do_not_reach_the_protocol(pool):
    assert pool.call("shout") == "fine"


def test_big_lines(pool):
    assert len(pool.call("big", {"size": 20_000_000})) == 20_000_000
    assert len(pool.call("echo", {"x": "y" * 5_000_000})["x"]) == 5_000_000


def waiting(pool, threads, seconds=60):
    """Start a request that waits; return its future once its process is there."""
    future = threads.submit(pool.call, "wait", {"seconds": seconds})
    while pool._process is None or not pool._process._pending:
        time.sleep(0.01)
    return future


@pytest.mark.parametrize(
    ("command", "args", "said"),
    [
        ("die", {}, "exit code 7"),
        ("killed", {"signal": signal.SIGKILL}, "signal 9"),
        ("killed", {"signal": signal.SIGTERM}, "signal 15"),
    ],
)
def test_a_request_killed_from_outside_costs_no_other_and_nobody_is_blamed(
    pool, command, args, said
):
    before = pool.call("environment")["pid"]
    with ThreadPoolExecutor(2) as threads:
        other = waiting(pool, threads, 1)
        with pytest.raises(WorkerDiedError, match=said):
            pool.call(command, args)
        assert other.result(20) == "waited"
    assert pool.call("environment")["pid"] == before


LIMITED = Limits(call_cpu_s=1, address_space=3 << 30, file_size=1 << 20, open_files=64)
BOMBS = [
    ("hold", {}, "a call took over 1 s of processor time"),
    ("loop", {}, "a call took over 1 s of processor time"),
    ("calls", {"calls": 1, "seconds": 8}, "a call took over 1 s of processor time"),
    ("deep", {}, "RecursionError: it nested deeper"),
    ("killed", {"signal": signal.SIGSEGV}, "a call crashed its process (SIGSEGV)"),
    ("hog", {}, "MemoryError: it needed more memory"),
    ("grow", {"size": 600 << 20}, "its process was killed, having grown by"),
    ("big", {"size": 65 << 20}, "its record is longer than 64 MiB"),
    ("killed", {"signal": signal.SIGABRT}, "a call crashed its process (SIGABRT)"),
]


def test_bombs_harm_themselves_alone():
    with make(limits=LIMITED) as pool, ThreadPoolExecutor(32) as threads:
        before = pool.call("environment")["pid"]
        bombs = [threads.submit(pool.call, command, args) for command, args, _ in BOMBS]
        others = [threads.submit(pool.call, "wait", {"seconds": 3}) for _ in range(16)]
        for bomb, (*_, said) in zip(bombs, BOMBS, strict=True):
            error = bomb.exception(60)
            assert isinstance(error, TrialLimitError), error
            assert said in str(error)
            assert error.status == "infra_error"  # until it happens again
        assert [each.result(60) for each in others] == ["waited"] * 16
        assert pool.call("environment")["pid"] == before


def test_processor_time_counts_from_answer_to_answer():
    with make(limits=LIMITED) as pool:
        assert pool.call("calls", {"calls": 6, "seconds": 0.6}) == "done"


@pytest.mark.parametrize("command", ["files", "fill"])
def test_files_are_limited(command):
    with make(limits=LIMITED) as pool, pytest.raises(RemoteError) as caught:
        pool.call(command)
    assert caught.value.kind == "OSError"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux asks whom to kill")
def test_a_kernel_out_of_memory_takes_the_request_first(pool):
    request, worker = (int(each) for each in pool.call("first_to_go"))
    assert request == 1000 > worker


def test_requests_share_no_state(pool):
    assert [pool.call("remember") for _ in range(3)] == [1, 1, 1]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_that_is_killed_or_stopped_is_replaced_and_nobody_is_blamed(number):
    with make(replace(FAST, stall=2.5)) as pool, ThreadPoolExecutor(2) as threads:
        other = waiting(pool, threads)
        with pytest.raises(WorkerDiedError, match=r"exit code -9|no sign of life"):
            pool.call("worker", {"signal": number})
        with pytest.raises(WorkerDiedError):
            other.result(20)
        assert pool.call("echo", {"again": True}) == {"again": True}


@pytest.mark.parametrize("how", ["close", "kill"])
def test_no_request_outlives_its_worker(pool, how):
    with ThreadPoolExecutor(2) as threads:
        lost = waiting(pool, threads)
        worker = pool.call("environment")["pid"]
        if how == "close":
            pool.close()
        else:
            os.kill(worker, signal.SIGKILL)
        with pytest.raises(WorkerDiedError):
            lost.result(20)
    deadline = time.monotonic() + 30
    while group_lives(worker):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def group_lives(leader):
    """Say whether a process of the worker's group still runs; one that is a zombie does not."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, group = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(group) == leader and state != "Z":
            return True
    return False


@pytest.mark.parametrize(
    "line",
    [b"rubbish", b"[]", b'{"v": 2, "id": null, "event": "result", "data": 1}', b'{"v": 1}'],
)
def test_rubbish_ends_the_worker(pool, line):
    with ThreadPoolExecutor(1) as threads:
        lost = waiting(pool, threads)
        assert not pool._process._handle(line)
        with pytest.raises(WorkerDiedError, match="not protocol 1"):
            lost.result(20)
    assert pool.call("echo") == {}


def test_timeout_ends_the_request_and_keeps_the_worker(pool):
    before = pool.call("environment")["pid"]
    for command in ("wait", "loop"):
        with pytest.raises(WorkerTimeoutError, match=rf"{command} took more than 0\.2 s"):
            pool.call(command, {"seconds": 60}, timeout=0.2)
    assert pool.call("environment")["pid"] == before
    assert not pool._process._pending


def test_worker_that_cannot_start_is_given_up():
    with make(environment={"DUMMY_BROKEN": "1"}) as pool:
        for _ in range(3):
            with pytest.raises(WorkerDiedError, match="told to break"):
                pool.call("echo")
        with pytest.raises(PrerequisiteError, match="told to break"):
            pool.call("echo")


def test_start_that_takes_too_long():
    timing = WorkerTiming(heartbeat=0.1, start=0.5, stall=5, grace=0.5)
    with (
        make(timing=timing, environment={"DUMMY_SLOW": "1"}) as pool,
        pytest.raises(WorkerDiedError, match=r"not ready after 0\.5 s"),
    ):
        pool.call("echo")


def test_closed_pool_refuses_and_scratch_is_gone():
    pool = make()
    scratch = Path(pool.call("environment")["cwd"])
    pool.close()
    assert not scratch.exists()
    with pytest.raises(WorkerDiedError, match="closed"):
        pool.call("echo")


def test_environment_is_minimal(monkeypatch):
    monkeypatch.setenv("KVBENCH_API_KEY", "secret")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with make(environment={"BFCL_PROJECT_ROOT": "{scratch}/bfcl"}) as pool:
        seen = pool.call("environment")
    assert "secret" not in seen.values()
    assert seen["PYTHONSAFEPATH"] == "1"
    assert seen["HF_HUB_OFFLINE"] == "1"
    assert seen["BFCL_PROJECT_ROOT"] == f"{seen['cwd']}/bfcl"


@pytest.fixture(scope="module")
def guarded():
    with make(environment={"DUMMY_GUARDED": "1"}) as made:
        yield made


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield {"host": "127.0.0.1", "port": server.getsockname()[1]}


@pytest.mark.parametrize("command", ["spawn", "shell", "write"])
def test_guard_refuses_processes_and_writing(guarded, command):
    with pytest.raises(RemoteError, match="refused in this worker") as caught:
        guarded.call(command)
    assert caught.value.kind == "RefusedError"


@pytest.mark.parametrize("command", ["read", "listing"])
def test_guard_refuses_files_that_the_benchmark_does_not_need(guarded, command, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("x")
    (tmp_path / "link").symlink_to(Path(json.__file__))
    home = Path(guarded.call("environment")["cwd"])
    other = home / "link"
    other.symlink_to(secret)
    places = [
        secret,
        other,
        home / ".." / secret.relative_to("/"),
        Path("/etc/passwd"),
        Path.home(),
    ]
    for place in places:
        path = str(place if command == "read" else place.resolve().parent)
        with pytest.raises(RemoteError, match="refused in this worker: reading") as caught:
            guarded.call(command, {"path": path})
        assert caught.value.kind == "RefusedError"
    other.unlink()
    package = Path(json.__file__)
    allowed = package if command == "read" else package.parent
    assert guarded.call(command, {"path": str(allowed)})


def test_guard_refuses_every_address_but_the_endpoint(guarded, listener):
    with pytest.raises(RemoteError, match="refused in this worker"):
        guarded.call("connect", listener)
    assert guarded.call("connect", {**listener, "allow": True}) == "connected"
    with pytest.raises(RemoteError, match="refused in this worker"):
        guarded.call("connect", {"host": "127.0.0.1", "port": 9})
    with pytest.raises(RemoteError, match="refused in this worker"):
        guarded.call("connect", {"host": "example.org", "port": 80})


def test_unguarded_worker_may_connect(pool, listener):
    assert pool.call("connect", listener) == "connected"


def test_a_pool_that_nobody_closed_leaves_no_folder(tmp_path):
    program = (
        "from pathlib import Path\n"
        "from agentbench_kv.adapters.worker import WorkerPool\n"
        f"pool = WorkerPool(Path('python'), Path({str(DUMMY)!r}))\n"
        "raise KeyboardInterrupt\n"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    words = [sys.executable, "-c", program]
    ended = subprocess.run(words, env=environment, capture_output=True, check=False)
    assert b"KeyboardInterrupt" in ended.stderr
    assert not list(tmp_path.glob("kvbench-worker-*"))


@pytest.mark.parametrize(
    ("database", "allowed"),
    [
        (":memory:", True),
        ("file:any/name.db?mode=memory&cache=shared", True),
        ("file:{known}?mode=ro", True),
        ("{known}", False),
        ("file:{known}", False),
        ("file:{known}?mode=rw", False),
        ("file:{known}?mode=ro&mode=rwc", False),
        ("file:{known}?mode=ro&%6dode=rwc", False),
        ("file:{secret}?mode=ro", False),
        ("file:{known}/..%2F{secret}?mode=ro", False),
        ("", False),
    ],
)
def test_guard_opens_databases_in_memory_or_for_reading(tmp_path, database, allowed):
    guard = worker_child.Guard()
    known, secret = tmp_path / "known.db", tmp_path.parent / "secret.db"
    guard._folders = (str(known),)
    name = database.format(known=known, secret=secret)
    if allowed:
        guard._check_database(name)
    else:
        with pytest.raises(worker_child.RefusedError, match="refused in this worker"):
            guard._check_database(name)
