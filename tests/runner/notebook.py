"""`kvbench` with a package of plain-text memory that is nothing but a list, run as a script.

It asks the run's model over HTTP as a package does. `NOTEBOOK_STOP=add:N:SIGNAL` sends this
process a signal at the Nth message that it is told, `pack:N:SIGNAL` at the Nth that is put into
checkpoints, and with `DIED` in place of a signal the package fails there. `NOTEBOOK_SEEN` is a file
that each search appends the whole memory to.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import httpx

from agentbench_kv.adapters.base import PastSession
from agentbench_kv.adapters.worker import RemoteError, WorkerDiedError
from agentbench_kv.gateway.recall import Recollection
from agentbench_kv.methods.memory.plain import PlainMemory
from agentbench_kv.run import memories

_steps = {"add": itertools.count(1), "pack": itertools.count(1)}


def step(kind: str) -> bool:
    """Send this process a signal if it is time; say whether it was."""
    chosen, number, name = os.environ.get("NOTEBOOK_STOP", "add:0:SIGKILL").split(":")
    due = (kind, next(_steps[kind])) == (chosen, int(number))
    if due and name == "DIED":
        raise WorkerDiedError("the request's process ended with signal 9")
    if due:
        os.kill(os.getpid(), signal.Signals[name])
    return due


class Notebook:
    """Stands for `memories.store.PackageStore`."""

    def __init__(self, method: PlainMemory, url: str, model: str, size: int) -> None:
        assert size > 0
        self._method, self._url, self._model = method, url, model
        self._banks: dict[str, list[Recollection]] = {}

    def __enter__(self) -> Notebook:
        return self

    def __exit__(self, *_: object) -> None:
        self._banks.clear()

    def add(self, bank: str, session: str, past: PastSession) -> int:
        kept = self._banks.setdefault(bank, [])
        for message, number in zip(past.messages, past.numbers, strict=True):
            if number is None:
                continue
            text = str(message["content"])
            if step("add"):
                while True:  # until it is refused
                    self._ask(session, text)
            self._ask(session, text)
            kept.append(Recollection(text, (number,)))
        return 0

    def search(self, bank: str, session: str, query: str) -> list[Recollection]:  # noqa: ARG002
        kept = self._banks[bank]
        with Path(os.environ["NOTEBOOK_SEEN"]).open("a") as file:
            file.write(json.dumps([[each.text, each.messages] for each in kept]) + "\n")
        words = set(query.split())
        found = sorted(kept, key=lambda each: -len(words & set(each.text.split())))
        return found[: self._method.topk]

    def drop(self, bank: str) -> None:
        self._banks.pop(bank, None)

    def versions(self) -> Mapping[str, str]:
        return {"notebook": os.environ.get("NOTEBOOK_VERSION", "1")}

    def pack(self, bank: str, file: IO[bytes]) -> None:
        for each in self._banks.get(bank, []):
            file.write(json.dumps([each.text, *each.messages]).encode() + b"\n")
            step("pack")

    def unpack(self, bank: str, file: IO[bytes]) -> None:
        rows = map(json.loads, file)
        self._banks[bank] = [Recollection(text, tuple(numbers)) for text, *numbers in rows]

    def _ask(self, session: str, text: str) -> None:
        said = [{"role": "user", "content": f"Remember this: {text}"}]
        asked = {"model": self._model, "messages": said, "max_tokens": 2, "temperature": 0.0}
        named = {"X-KVBench-Session": session}
        answer = httpx.post(f"{self._url}/chat/completions", json=asked, headers=named, timeout=600)
        if answer.status_code != 200:
            raise RemoteError("APIStatusError", answer.text)


if __name__ == "__main__":
    from agentbench_kv.cli import main

    memories.PackageStore = Notebook  # type: ignore[assignment, misc]
    memories.python_of = lambda _: Path()
    main()
