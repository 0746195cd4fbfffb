"""The worker protocol with a worker that misbehaves on request."""

import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from agentbench_kv.adapters.worker import (
    Limits,
    RemoteError,
    WorkerDiedError,
    WorkerPool,
    WorkerTimeoutError,
    WorkerTiming,
)
from agentbench_kv.errors import PrerequisiteError

DUMMY = Path(__file__).with_name("worker_dummy.py")
FAST = WorkerTiming(heartbeat=0.1, start=20, stall=2.5, grace=0.5)


def make(n=1, timing=FAST, **more):
    return WorkerPool(Path(sys.executable), DUMMY, n, timing=timing, **more)


@pytest.fixture
def pool():
    with make() as made:
        yield made


def test_answers(pool):
    assert pool.call("echo", {"a": [1, "Zürich", None]}) == {"a": [1, "Zürich", None]}


def test_lone_surrogates_survive(pool):
    assert pool.call("echo", {"text": "\ud800"}) == {"text": "\ud800"}


def test_many_requests_share_one_worker(pool):
    started = time.monotonic()
    with ThreadPoolExecutor(16) as threads:
        results = list(threads.map(lambda _: pool.call("wait", {"seconds": 0.5}), range(16)))
    assert results == ["waited"] * 16
    assert time.monotonic() - started < 4


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


def test_death_costs_the_requests_in_flight_and_no_others(pool):
    with ThreadPoolExecutor(2) as threads:
        other = threads.submit(pool.call, "wait", {"seconds": 20})
        time.sleep(0.5)
        with pytest.raises(WorkerDiedError, match="exit code 7"):
            pool.call("die")
        with pytest.raises(WorkerDiedError):
            other.result(5)
    assert pool.call("echo", {"again": True}) == {"again": True}


def test_frozen_worker_is_replaced(pool):
    with pytest.raises(WorkerDiedError, match="no sign of life"):
        pool.call("freeze")
    assert pool.call("echo") == {}


@pytest.mark.parametrize(
    "text",
    ["rubbish", "[]", '{"v": 2, "id": null, "event": "result", "data": 1}', '{"v": 1}'],
)
def test_rubbish_ends_the_worker(pool, text):
    with pytest.raises(WorkerDiedError, match="not protocol 1"):
        pool.call("rubbish", {"text": text})
    assert pool.call("echo") == {}


def test_timeout_cancels_the_request_and_keeps_the_worker(pool):
    before = pool.call("environment")["pid"]
    with pytest.raises(WorkerTimeoutError, match=r"wait took more than 0\.2 s"):
        pool.call("wait", {"seconds": 20}, timeout=0.2)
    assert pool.call("environment")["pid"] == before


def test_request_that_ignores_cancellation_costs_the_worker(pool):
    before = pool.call("environment")["pid"]
    with pytest.raises(WorkerTimeoutError):
        pool.call("stubborn", {"seconds": 20}, timeout=0.2)
    assert pool.call("environment")["pid"] != before


def test_two_workers_share_the_load():
    with make(2) as pool, ThreadPoolExecutor(2) as threads:
        waiting = threads.submit(pool.call, "wait", {"seconds": 1})
        time.sleep(0.3)
        pids = {pool.call("environment")["pid"] for _ in range(3)}
        assert waiting.result(5) == "waited"
    assert len(pids) == 1


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


def test_memory_limit():
    with make(limits=Limits(address_space=1 << 30)) as pool:
        with pytest.raises(RemoteError) as caught:
            pool.call("hog")
        assert caught.value.kind == "MemoryError"
        assert pool.call("echo") == {}


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


def test_guard_refuses_every_address_but_the_endpoint(guarded, listener):
    with pytest.raises(RemoteError, match="refused in this worker"):
        guarded.call("connect", listener)
    assert guarded.call("connect", {**listener, "allow": True}) == "connected"
    with pytest.raises(RemoteError, match="refused in this worker"):
        guarded.call("connect", {"host": "127.0.0.1", "port": 9})
    with pytest.raises(RemoteError, match="refused in this worker"):
        guarded.call("connect", {"host": "example.org", "port": 80})


def test_guard_lets_requests_in_at_once(listener):
    with make(environment={"DUMMY_GUARDED": "1"}) as pool, ThreadPoolExecutor(16) as threads:
        wanted = {**listener, "allow": True}
        found = list(threads.map(lambda _: pool.call("connect", wanted), range(16)))
    assert found == ["connected"] * 16


def test_unguarded_worker_may_connect(pool, listener):
    assert pool.call("connect", listener) == "connected"
