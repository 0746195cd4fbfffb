"""A memory of plain text for tests, which keeps what it is told word for word."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import IO

from agentbench_kv.adapters.base import PastSession
from agentbench_kv.gateway import Gateway, Options
from agentbench_kv.gateway.recall import Recollection


class Parrot:
    """Keeps every message word for word and finds those that share a word with a query.

    `step` is called before and after everything that it does for a bank.
    """

    def __init__(self, gateway: Gateway, step: Callable[[str], None] = lambda _: None) -> None:
        self.banks: dict[str, list[Recollection]] = {}
        self.searched: list[str] = []
        self._gateway = gateway
        self._step = step

    def add(self, bank: str, session: str, past: PastSession) -> int:
        kept = self.banks.setdefault(bank, [])
        for message, number in zip(past.messages, past.numbers, strict=True):
            if number is not None:
                text = str(message["content"])
                self._step("before a request")
                # As a package does: it asks the run's model, each time something else.
                asked = [{"role": "user", "content": f"Remember this: {text}"}]
                self._gateway.chat(session, asked, options=Options(max_tokens=3))
                kept.append(Recollection(text, (number,)))
                self._step("after a request")
        return sum("lost" in str(message["content"]) for message in past.messages)

    def search(self, bank: str, session: str, query: str) -> list[Recollection]:  # noqa: ARG002
        self.searched.append(query)
        words = set(query.lower().split())
        return [each for each in self.banks[bank] if words & set(each.text.lower().split())]

    def drop(self, bank: str) -> None:
        self.banks.pop(bank, None)

    def versions(self) -> Mapping[str, str]:
        return {"parrot": "1"}

    def pack(self, bank: str, file: IO[bytes]) -> None:
        for each in self.banks[bank]:
            file.write(json.dumps([each.text, *each.messages]).encode() + b"\n")
            self._step("in the middle of a checkpoint")

    def unpack(self, bank: str, file: IO[bytes]) -> None:
        kept = self.banks.setdefault(bank, [])
        for line in file:
            text, *numbers = json.loads(line)
            kept.append(Recollection(text, tuple(numbers)))
            self._step("while it goes on")


def past(*texts: str, first: int = 1) -> PastSession:
    said = [{"role": "user", "content": text} for text in texts]
    system = {"role": "system", "content": "Remember."}
    return PastSession([system, *said], [None, *range(first, first + len(texts))])
