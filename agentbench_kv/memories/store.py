"""A memory package in its worker: what it is told, and what it is asked."""

from __future__ import annotations

import hashlib
import logging
import shutil
import tarfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self

from agentbench_kv.adapters.base import Message, PastSession
from agentbench_kv.adapters.worker import Limits, WorkerPool
from agentbench_kv.environments import python_of
from agentbench_kv.environments.archives import unpack_tar
from agentbench_kv.gateway.messages import spoken
from agentbench_kv.gateway.recall import Recollection
from agentbench_kv.methods.memory.plain import PlainMemory

_HERE = Path(__file__).parent
# How a past is told; checkpoints of banks that were told it otherwise are not gone on from.
TELLING = "texts, thoughts, calls, results, dates"
_LONGEST_WORD = 300  # characters of a failure that are shown
_log = logging.getLogger(__name__)
# A graph store maps terabytes of addresses; a package writes files as large as it wants.
_LIMITS = Limits(call_cpu_s=None, address_space=None, file_size=None)
_ENVIRONMENT = {
    "MEM0_TELEMETRY": "False",
    "MEM0_DIR": "{scratch}",
    "GRAPHITI_TELEMETRY_ENABLED": "false",
    # A session answers one request at a time.
    "SEMAPHORE_LIMIT": "1",
}


def parts(past: PastSession, size: int) -> Iterator[tuple[Sequence[Message], list[int]]]:
    """Return a past session as a package is told it, `size` messages at a time, 0 for all at once.

    Packages read texts of users and assistants alone. Messages without a word are left out.
    """
    said = [
        (message, number)
        for each, number in zip(past.messages, past.numbers, strict=True)
        if number is not None and (message := spoken(each))["content"].strip()
    ]
    for first in range(0, len(said), size or max(1, len(said))):
        part = said[first : first + (size or len(said))]
        yield [message for message, _ in part], [number for _, number in part]


class PackageStore:
    """A `gateway.recall.MemoryStore` over a package in its environment.

    Each bank has files of its own in the worker's scratch folder, which goes with the store. The
    package asks the server at `url` for a model's answers, and for embeddings, which have `size`
    dimensions.
    """

    def __init__(self, method: PlainMemory, url: str, model: str, size: int) -> None:
        self._method = method
        self._about = {
            "url": url,
            "model": model,
            "encoder": method.encoder,
            "size": size,
            "write_tokens": method.write_tokens,
        }
        python = python_of(method.environment)
        worker = _HERE / f"{method.environment}_worker.py"
        self._pool = WorkerPool(python, worker, environment=_ENVIRONMENT, limits=_LIMITS)
        self._lock = threading.Lock()
        self._warned = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.close()

    def add(self, bank: str, session: str, past: PastSession) -> int:
        """Tell a bank a past session, in parts of so many messages as the method says.

        Return how many parts the package failed at, because the model's answer was not what it
        asked for: these the bank does not hold.
        """
        when, failed = past.when.isoformat() if past.when else None, 0
        for messages, numbers in parts(past, self._method.batch):
            args = {"messages": messages, "numbers": numbers, "when": when}
            told = self._call("add", bank, session, args)
            if told["failed"]:
                failed += 1
                self._warn(told["failed"])
        return failed

    def search(self, bank: str, session: str, query: str) -> list[Recollection]:
        found = self._call("search", bank, session, {"query": query, "topk": self._method.topk})
        return [Recollection(each["text"], tuple(each["messages"])) for each in found]

    def drop(self, bank: str) -> None:
        shutil.rmtree(self._folder(bank), ignore_errors=True)

    def versions(self) -> Mapping[str, str]:
        found: dict[str, str] = self._pool.call("versions")
        return found

    def pack(self, bank: str, file: IO[bytes]) -> None:
        # Between two requests no process has the bank's files open.
        with tarfile.open(fileobj=file, mode="w|") as archive:
            if (folder := self._folder(bank)).is_dir():
                archive.add(folder, ".")

    def unpack(self, bank: str, file: IO[bytes]) -> None:
        with tarfile.open(fileobj=file, mode="r|") as archive:
            unpack_tar(archive, self._folder(bank))

    def _warn(self, failure: str) -> None:
        """Say once what a package stumbled over; the run counts the others."""
        with self._lock:
            first, self._warned = not self._warned, True
        if first:
            said = " ".join(failure.split())[:_LONGEST_WORD]
            _log.warning("kvbench: %s failed at what it was told: %s", self._method.name, said)

    def _call(self, command: str, bank: str, session: str, args: dict[str, Any]) -> Any:
        given = {**self._about, **args, "folder": str(self._folder(bank)), "session": session}
        return self._pool.call(command, given)

    def _folder(self, bank: str) -> Path:
        """Return where a bank's files are; a bank's name may hold anything."""
        return self._pool.scratch / hashlib.sha256(bank.encode()).hexdigest()[:32]
