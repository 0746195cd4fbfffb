"""Past sessions that later ones bring back: read once, kept in the engine's memory banks."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from agentbench_kv.engines.base import Engine
from agentbench_kv.gateway.messages import Message
from agentbench_kv.gateway.planning import Planner
from agentbench_kv.gateway.session import Session
from agentbench_kv.methods.spans import Hints
from agentbench_kv.phases.machine import PhaseTable


@dataclass(frozen=True)
class Remembered:
    """What it took to read a past session."""

    tokens: int
    seconds: float


class Memories:
    """The banks of a gateway's sessions: each has the name of the session that began it."""

    def __init__(self, engine: Engine, planner: Planner, table: PhaseTable) -> None:
        self._engine = engine
        self._planner = planner
        self._table = table
        self._lock = threading.Lock()
        self._banks: dict[str, str] = {}  # session -> bank
        self._read: Counter[str] = Counter()  # past sessions of a bank

    def bank_of(self, session: str) -> str:
        """Return the bank that a session brings back from; empty if it has none."""
        with self._lock:
            return self._banks.get(session, "")

    def share(self, session: str, other: str) -> None:
        """Have another session, not open yet, bring back from a session's bank."""
        with self._lock:
            if session in self._banks:
                self._banks[other] = self._banks[session]

    def remember(self, session: str, messages: Sequence[Message]) -> Remembered:
        """Read messages as a session of their own and keep its rows for a session, not open yet.

        Raises ContextLimitError if they are longer than the model's context.
        """
        started = time.perf_counter()
        with self._lock:
            bank = self._banks.setdefault(session, session)
            self._read[bank] += 1
            name = f"{bank} past {self._read[bank]}"
        past = Session(name, self._engine, self._table)
        plan = self._planner.past(past, messages)
        past.prepare(plan)
        try:
            past.extend(plan.ids, Hints())
            self._feed(past)
            self._engine.memorise(name, bank, len(plan.ids))
        finally:
            past.close()
        return Remembered(len(plan.ids), time.perf_counter() - started)

    def _feed(self, past: Session) -> None:
        """Have the model read what is pending: a token behind it is given, and not fed itself."""
        end = self._engine.info.eos_token_ids[:1] or (past.tokens[-1],)
        for _ in self._engine.force(past.id, end):
            pass

    def forget(self, session: str) -> None:
        """Let go of a session's name, and of the bank if the session began it."""
        with self._lock:
            began = self._banks.pop(session, "") == session
        if began:
            self._engine.forget(session)
