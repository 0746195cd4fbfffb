"""Blocking gateway calls behind an event loop: a bounded pool, results as async iterators."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from agentbench_kv.gateway.api_errors import ApiError
from agentbench_kv.gateway.cancellation import Cancellation
from agentbench_kv.gateway.types import Answer, Item

Work = Callable[[Cancellation], Answer]


class Job:
    """One request being answered in a pool thread; iterate it in the event loop."""

    def __init__(self, work: Work, release: Callable[[], None]) -> None:
        self._work = work
        self._release = release
        self._loop = asyncio.get_running_loop()
        self._items: asyncio.Queue[Item | BaseException | None] = asyncio.Queue()
        self._cancellation = Cancellation()
        # Nobody reads on. The gateway may also end the generation alone: its result is still due.
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """Stop the generation; harmless when it has ended."""
        self._cancelled.set()
        self._cancellation.cancel()

    async def items(self) -> AsyncIterator[Item]:
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
            self._release()
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

    def _put(self, item: Item | BaseException | None) -> None:
        # The loop is gone when the server stopped while the engine was still at it.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._items.put_nowait, item)


class JobPool:
    """Runs `threads` jobs at once, lets `queue` wait and refuses more."""

    def __init__(self, threads: int, queue: int) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="kvbench-gateway")
        self._most = threads + queue
        self._lock = threading.Lock()
        self.admitted = 0  # requests running or waiting

    def submit(self, work: Work) -> Job:
        """Start or queue a job; 429 when the queue is full."""
        with self._lock:
            if self.admitted >= self._most:
                message = f"{self.admitted} requests are running or waiting; try again later"
                raise ApiError(429, message, code="queue_full", headers={"Retry-After": "1"})
            self.admitted += 1
        job = Job(work, self._release)
        self._executor.submit(job.run)
        return job

    def shutdown(self) -> None:
        """Take no more jobs; those that run end by themselves."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _release(self) -> None:
        with self._lock:
            self.admitted -= 1
