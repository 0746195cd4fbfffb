"""Memories of plain text: what a package finds stands before the user's new message."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from agentbench_kv.adapters.base import PastSession, Recalled
from agentbench_kv.gateway.base import AnyGateway
from agentbench_kv.gateway.memory import ASIDE, Memories, Remembered
from agentbench_kv.gateway.messages import Message, text_of
from agentbench_kv.gateway.session import UnknownSessionError

_TITLE = "Memories of earlier conversations:"


@dataclass(frozen=True)
class Recollection:
    """A text that a memory brings back, and the numbers of the messages that it was made of."""

    text: str
    messages: tuple[int, ...] = ()


class MemoryStore(Protocol):
    """A memory of plain text. Banks know nothing of each other; errors are `WorkerError`s."""

    def add(self, bank: str, session: str, past: PastSession) -> int:
        """Take in a past session; what a model is asked for that is asked in `session`.

        Return how many parts of it are lost, because the model's answer was of no use.
        """
        ...

    def search(self, bank: str, session: str, query: str) -> Sequence[Recollection]:
        """Return what is to be put before a message, best first."""
        ...

    def drop(self, bank: str) -> None:
        """Forget all of a bank."""
        ...


@dataclass(frozen=True)
class _Search:
    """What was found for a message."""

    query: str
    found: tuple[Recollection, ...]
    seconds: float


class PlainMemories(Memories):
    """What a store keeps; the run's own model writes it, in a session of each bank."""

    def __init__(self, gateway: AnyGateway, store: MemoryStore) -> None:
        super().__init__()
        self._gateway = gateway
        self._store = store
        self._searches: dict[str, dict[int, _Search]] = defaultdict(dict)  # by message

    def remember(self, session: str, past: PastSession) -> Remembered:
        """Have the store take in a past session.

        Tokens and calls are those of the model that writes what is kept; an encoder's are not
        counted, its seconds are.
        """
        started, bank = time.perf_counter(), self._bank_for(session)
        calls, tokens = self._asked(bank)
        failed = self._store.add(bank, ASIDE + bank, past)
        now_calls, now_tokens = self._asked(bank)
        seconds = time.perf_counter() - started
        return Remembered(now_calls - calls, now_tokens - tokens, seconds, failed)

    def share(self, session: str, other: str) -> None:
        super().share(session, other)
        self._searches[other] = {**self._searches[session]}

    def shown(self, session: str, messages: Sequence[Message]) -> Sequence[Message]:
        """Return messages with what was found before every one of the user that came last once."""
        bank, searches = self.bank_of(session), self._searches[session]
        if not bank:
            return messages
        last = len(messages) - 1
        query = text_of(messages[last].get("content"))
        known = searches.get(last)
        if messages[last].get("role") == "user" and (known is None or known.query != query):
            started = time.perf_counter()
            found = tuple(self._store.search(bank, ASIDE + bank, query))
            searches[last] = _Search(query, found, time.perf_counter() - started)
        return [
            _reminded(message, searches[at].found) if at in searches else message
            for at, message in enumerate(messages)
        ]

    def recalled(self, session: str) -> Recalled | None:
        searches = self._searches.get(session)
        if not searches:
            return None
        last = searches[max(searches)]
        numbers = [number for each in last.found for number in each.messages]
        texts = tuple(each.text for each in last.found)
        return Recalled(texts, dict.fromkeys(numbers, 1.0), seconds=last.seconds)

    def cancel(self, session: str) -> None:
        self._gateway.cancel(ASIDE + session)

    def forget(self, session: str) -> None:
        self._searches.pop(session, None)
        super().forget(session)

    def _free(self, bank: str) -> None:
        with suppress(UnknownSessionError):
            self._gateway.close_report(ASIDE + bank)
        self._store.drop(bank)

    def _asked(self, bank: str) -> tuple[int, int]:
        """Return how often, and for how many tokens, the model was asked for a bank."""
        try:
            turns = self._gateway.report(ASIDE + bank).turns
        except UnknownSessionError:
            return 0, 0
        return len(turns), sum(turn.prefill_tokens + turn.output_tokens for turn in turns)


def _reminded(message: Message, found: Sequence[Recollection]) -> Message:
    """Return a message with memories before its text."""
    if not found:
        return message
    listed = "\n".join(f"- {' '.join(each.text.split())}" for each in found)
    return {**message, "content": f"{_TITLE}\n{listed}\n\n{text_of(message.get('content'))}"}
