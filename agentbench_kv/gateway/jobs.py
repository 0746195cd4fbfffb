"""A bounded pool of threads that answer requests, behind an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

from agentbench_kv.gateway.api_errors import ApiError
from agentbench_kv.gateway.exchange import Cancellation

Work = Callable[[Cancellation], Iterator[Any]]
T = TypeVar("T")


class Job:
    """One request being answered in a pool thread; iterate it in the event loop."""

    def __init__(self, work: Work, release: Callable[[Job], None]) -> None:
        self._work = work
        self._release = release
        self._loop = asyncio.get_running_loop()
        self._items: asyncio.Queue[Any] = asyncio.Queue()
        self._cancellation = Cancellation()
        # Nobody reads on. The gateway may also end the generation alone: its result is still due.
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """Stop the generation; harmless when it has ended."""
        self._cancelled.set()
        self._cancellation.cancel()

    def end(self, error: ApiError) -> None:
        """Stop the generation and have its reader raise an error."""
        self._put(error)
        self.cancel()

    async def items(self) -> AsyncIterator[Any]:
        """Yield what the work yields; raise what it raises."""
        while (item := await self._items.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item

    def run(self) -> None:
        try:
            if not self._cancelled.is_set():
                self._pull()
        except BaseException as error:  # noqa: BLE001 - handed to the reader, who raises it
            self._put(error)
        finally:
            self._release(self)
            self._put(None)

    def _pull(self) -> None:
        iterator = self._work(self._cancellation)
        try:
            for item in iterator:
                self._put(item)
                if self._cancelled.is_set():
                    return
        finally:
            if isinstance(iterator, Generator):
                iterator.close()

    def _put(self, item: object) -> None:
        # The loop is gone when the server stopped while the engine was still at it.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._items.put_nowait, item)


class JobPool:
    """Runs `threads` jobs at once, lets `queue` wait and refuses more.

    A job that hangs in the engine does not keep the process: its thread is a daemon.
    """

    def __init__(self, threads: int, queue: int) -> None:
        self._threads = threads
        self._most = threads + queue
        self._lock = threading.Lock()
        self._waiting: SimpleQueue[Job | None] = SimpleQueue()
        self._started = 0
        self._jobs: set[Job] = set()  # running or waiting

    @property
    def admitted(self) -> int:
        """How many requests are running or waiting."""
        return len(self._jobs)

    def submit(self, work: Work) -> Job:
        """Start or queue a job; 429 when the queue is full."""
        with self._lock:
            if len(self._jobs) >= self._most:
                message = f"{len(self._jobs)} requests are running or waiting; try again later"
                raise ApiError(429, message, code="queue_full", headers={"Retry-After": "1"})
            job = Job(work, self._release)
            self._jobs.add(job)
            if self._started < min(self._threads, len(self._jobs)):
                name = f"kvbench-gateway-{self._started}"
                threading.Thread(target=self._work, name=name, daemon=True).start()
                self._started += 1
        self._waiting.put(job)
        return job

    async def ask(self, call: Callable[[], T]) -> T:
        """Return what a call returns that may take a while."""
        job = self.submit(lambda _: iter([call()]))
        answers: list[T] = [answer async for answer in job.items()]
        return answers[0]

    def end_all(self, error: ApiError) -> None:
        """Have all readers raise an error; the jobs that run end by themselves."""
        with self._lock:
            jobs = list(self._jobs)
        for job in jobs:
            job.end(error)

    def shutdown(self) -> None:
        """Let the threads go when their jobs have ended."""
        with self._lock:
            for _ in range(self._started):
                self._waiting.put(None)

    def _work(self) -> None:
        while (job := self._waiting.get()) is not None:
            job.run()

    def _release(self, job: Job) -> None:
        with self._lock:
            self._jobs.discard(job)
