"""Commands run on the thread that owns the cache; whoever asked gets what they did."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from agentbench_kv.engines.core.commands import CommandQueue
from agentbench_kv.errors import KVBenchError


class Owner:
    """A thread that runs commands when it is woken."""

    def __init__(self) -> None:
        self.bell = threading.Event()
        self.queue = CommandQueue(self.bell.set)
        self.stopping = False
        self.thread = threading.Thread(target=self.loop, daemon=True)
        self.thread.start()

    def loop(self) -> None:
        while self.bell.wait() and not self.stopping:
            self.bell.clear()
            self.queue.run()

    def stop(self) -> None:
        self.stopping = True
        self.bell.set()
        self.thread.join()


@pytest.fixture
def owner() -> Iterator[Owner]:
    made = Owner()
    yield made
    made.stop()


def test_every_command_runs_once_on_the_owners_thread(owner: Owner) -> None:
    ran: list[int] = []
    with ThreadPoolExecutor(8) as threads:
        work = [lambda n=n: (ran.append(n), threading.get_ident())[1] for n in range(200)]
        threads_of_commands = set(threads.map(owner.queue.call, work))
    assert threads_of_commands == {owner.thread.ident}
    assert sorted(ran) == list(range(200))


def test_an_error_is_the_callers(owner: Owner) -> None:
    with pytest.raises(ZeroDivisionError):
        owner.queue.call(lambda: 1 // 0)
    assert owner.queue.call(lambda: 1) == 1


def test_nobody_waits_for_an_owner_that_is_gone() -> None:
    queued = threading.Event()
    queue = CommandQueue(queued.set)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(queue.call, lambda: 1)
        assert queued.wait(10)
        queue.close(KVBenchError("shut down"))
        with pytest.raises(KVBenchError, match="shut down"):
            waiting.result(10)
    with pytest.raises(KVBenchError, match="shut down"):
        queue.call(lambda: 1)


def test_a_caller_need_not_wait_for_ever_and_what_it_gave_up_is_not_done() -> None:
    queue, done = CommandQueue(lambda: None), list[int]()
    with pytest.raises(TimeoutError):
        queue.call(lambda: done.append(1), timeout=0.01)
    queue.run()
    assert (done, len(queue)) == ([], 0)
    with pytest.raises(TimeoutError):
        queue.call(lambda: done.append(1), timeout=0.01)
    queue.close(KVBenchError("shut down"))
    assert done == []
