"""Memories of plain text: what a package finds stands before the user's new message."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

from agentbench_kv.adapters.base import PastSession, Recalled
from agentbench_kv.gateway.base import AnyGateway
from agentbench_kv.gateway.checkpoints import Checkpoints, PackingStore, Telling
from agentbench_kv.gateway.memory import ASIDE, Memories, Remembered
from agentbench_kv.gateway.messages import Message, text_of
from agentbench_kv.gateway.reports import SessionReport
from agentbench_kv.gateway.session import UnknownSessionError

_TITLE = "Memories of earlier conversations:"


@dataclass(frozen=True)
class Recollection:
    """A text that a memory brings back, and the numbers of the messages that it was made of."""

    text: str
    messages: tuple[int, ...] = ()


class MemoryStore(PackingStore, Protocol):
    """A memory of plain text. Banks know nothing of each other; errors are `WorkerError`s."""

    def add(self, bank: str, session: str, past: PastSession) -> int:
        """Take in a past session; what a model is asked for that is asked in `session`.

        Return how many parts of it are lost, because the model's answer was of no use.
        """
        ...

    def search(self, bank: str, session: str, query: str) -> Sequence[Recollection]:
        """Return what is to be put before a message, best first."""
        ...


@dataclass(frozen=True)
class _Search:
    """What was found for a message."""

    query: str
    found: tuple[Recollection, ...]


class PlainMemories(Memories):
    """What a store keeps; the run's own model writes it, in a session of each past session.

    With `checkpoints` a bank is kept behind every past session, and a later bank of the same trial
    goes on from there. What a past session takes, and what comes of it, hang on no interruption:
    the model's cache is empty when it begins.
    """

    def __init__(
        self, gateway: AnyGateway, store: MemoryStore, checkpoints: Checkpoints | None = None
    ) -> None:
        super().__init__()
        self._gateway = gateway
        self._store = store
        self._checkpoints = checkpoints
        self._told: dict[str, Telling] = {}  # by bank
        self._searches: dict[str, dict[int, _Search]] = defaultdict(dict)  # by message
        self._searched: dict[str, float] = defaultdict(
            float
        )  # seconds that no answer has been told of

    def _take_in(self, session: str, past: PastSession) -> Remembered:
        """Have the store take in a past session, unless a checkpoint holds it.

        Tokens and calls are those of the model that writes what is kept; an encoder's are not
        counted, its seconds are. UsageError if a checkpoint holds another past.
        """
        started, bank = time.perf_counter(), self._bank_for(session)
        told = self._telling(bank)
        if (held := told.find(past)) is not None:
            return replace(held, files=1, files_s=time.perf_counter() - started)
        try:
            failed = self._store.add(bank, ASIDE + bank, past)
        finally:
            calls, tokens = self._asked(bank)
        took = Remembered(calls, tokens, time.perf_counter() - started, failed)
        # What was told while the run came to its end may have failed for that.
        self._gateway.check()
        told.add(past, took)
        if self._checkpoints is not None:
            self._checkpoints.save(bank, self._store, told.taken)
        return took

    def taken(self, session: str) -> tuple[int, int]:
        sessions, tokens = super().taken(session)
        if ASIDE + session in self._gateway.sessions():  # else the last one's report would count
            with suppress(UnknownSessionError):
                tokens += _tokens(self._gateway.report(ASIDE + session))
        return sessions, tokens

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
            if bank in self._told:
                self._told[bank].check_ended()
            started = time.perf_counter()
            found = tuple(self._store.search(bank, ASIDE + bank, query))
            searches[last] = _Search(query, found)
            self._searched[session] += time.perf_counter() - started
        return [
            _reminded(message, searches[at].found) if at in searches else message
            for at, message in enumerate(messages)
        ]

    def recalled(self, session: str) -> Recalled | None:
        """Return what stood before the last answer; seconds if it was searched for this one."""
        searches = self._searches.get(session)
        if not searches:
            return None
        last, seconds = searches[max(searches)], self._searched.pop(session, 0.0)
        numbers = [number for each in last.found for number in each.messages]
        texts = tuple(each.text for each in last.found)
        return Recalled(texts, dict.fromkeys(numbers, 1.0), seconds=seconds)

    def cancel(self, session: str) -> None:
        self._gateway.cancel(ASIDE + session)

    def forget(self, session: str) -> None:
        self._searches.pop(session, None)
        self._searched.pop(session, None)
        super().forget(session)

    def _free(self, bank: str) -> None:
        with suppress(UnknownSessionError):
            self._gateway.close_report(ASIDE + bank)
        self._told.pop(bank, None)
        self._store.drop(bank)

    def _telling(self, bank: str) -> Telling:
        if bank not in self._told:
            kept = self._checkpoints
            held = [] if kept is None else kept.load(bank, self._store)
            self._told[bank] = Telling(held, None if kept is None else kept.path(bank))
        return self._told[bank]

    def _asked(self, bank: str) -> tuple[int, int]:
        """End the session in which the model was asked; return how often, for how many tokens."""
        try:
            report = self._gateway.close_report(ASIDE + bank)
        except UnknownSessionError:
            return 0, 0
        return len(report.turns), _tokens(report)


def _tokens(report: SessionReport) -> int:
    return sum(turn.prefill_tokens + turn.output_tokens for turn in report.turns)


def _reminded(message: Message, found: Sequence[Recollection]) -> Message:
    """Return a message with memories before its text."""
    if not found:
        return message
    listed = "\n".join(f"- {' '.join(each.text.split())}" for each in found)
    return {**message, "content": f"{_TITLE}\n{listed}\n\n{text_of(message.get('content'))}"}
