"""Past sessions that later ones bring back: whose they are, and those kept in an engine's banks."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agentbench_kv.adapters.base import PastSession, Recalled
from agentbench_kv.engines.base import Engine
from agentbench_kv.errors import EngineGoneError, KVBenchError, MemoryLostError
from agentbench_kv.gateway.messages import Message
from agentbench_kv.gateway.planning import Planner
from agentbench_kv.gateway.session import Session
from agentbench_kv.methods.spans import Hints, SpanRange
from agentbench_kv.phases.machine import PhaseTable

# Before a bank's name: the session in which a memory of plain text asks the run's model.
ASIDE = "memory|"


@dataclass(frozen=True)
class Remembered:
    """What it took to take a past session in."""

    calls: int
    tokens: int  # prefilled and generated
    seconds: float
    failed: int = 0  # parts of it that are lost, because the model's answers were of no use
    files: int = 0  # sessions that came from a file: calls, tokens and seconds are those it took
    files_s: float = 0.0  # that this took instead


@dataclass(frozen=True)
class Appended:
    """What finished turns added to a memory, beside the agent."""

    tokens: int = 0
    seconds: float = 0.0  # in which the agent may have gone on

    def __add__(self, other: Appended) -> Appended:
        return Appended(self.tokens + other.tokens, self.seconds + other.seconds)


class Memories(ABC):
    """The memories of a gateway's sessions: each has the name of the session that began it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._banks: dict[str, str] = {}  # session -> bank
        self._taken: dict[str, tuple[int, int]] = {}  # by bank: past sessions, their tokens

    def bank_of(self, session: str) -> str:
        """Return the bank that a session brings back from; empty if it has none."""
        with self._lock:
            return self._banks.get(session, "")

    def share(self, session: str, other: str) -> None:
        """Have another session, not open yet, bring back from a session's bank."""
        with self._lock:
            if session in self._banks:
                self._banks[other] = self._banks[session]

    def remember(self, session: str, past: PastSession) -> Remembered:
        """Take in a past session for a session that is not open yet."""
        took = self._take_in(session, past)
        with self._lock:
            sessions, tokens = self._taken.get(session, (0, 0))
            self._taken[session] = (sessions + 1, tokens + took.tokens)
        return took

    @abstractmethod
    def _take_in(self, session: str, past: PastSession) -> Remembered:
        """Take in a past session, and say what it took."""

    def taken(self, session: str) -> tuple[int, int]:
        """Return how many past sessions were taken in for a session, and the tokens this took.

        Tokens that one which is being taken in has taken so far are among them.
        """
        with self._lock:
            return self._taken.get(session, (0, 0))

    @abstractmethod
    def recalled(self, session: str) -> Recalled | None:
        """Return what was put before the model for a session's last answer."""

    def shown(self, session: str, messages: Sequence[Message]) -> Sequence[Message]:  # noqa: ARG002
        """Return a request's messages as the model is shown them."""
        return messages

    def settle(self, session: str) -> None:  # noqa: B027
        """Wait for what is being appended to a session's bank; raise what went wrong, if anything.

        Prompts that hang on it, and whoever adds to the bank, call it first.
        """

    def append(self, state: Session) -> None:  # noqa: B027
        """Begin to add what a session has read and written to its bank; it is at rest."""

    def appended(self, session: str) -> Appended:  # noqa: ARG002
        """Return what has been appended to a session's bank; it waits for what is under way."""
        return Appended()

    def cancel(self, session: str) -> None:  # noqa: B027
        """End what is being taken in for a session."""

    def forget(self, session: str) -> None:
        """Let go of a session's name, and of the bank if the session began it."""
        with self._lock:
            began = self._banks.pop(session, "") == session
            self._taken.pop(session, None)
        if began:
            self._free(session)

    @abstractmethod
    def _free(self, bank: str) -> None:
        """Let go of a bank."""

    def _bank_for(self, session: str) -> str:
        with self._lock:
            return self._banks.setdefault(session, session)


class BankMemories(Memories):
    """Rows of past sessions, which the model reads once, in the engine's memory banks.

    `appends`: those of finished turns are added on a thread beside. They are whoever's session
    begins, or asks, later; the session itself has them anyway.
    """

    def __init__(
        self, engine: Engine, planner: Planner, table: PhaseTable, *, appends: bool = False
    ) -> None:
        super().__init__()
        self._appends = appends
        # One after the other, in the order in which turns ended.
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="kvbench-append")
        self._adding: dict[str, Future[Appended]] = {}  # by bank: all of its appends so far
        self._engine = engine
        self._planner = planner
        self._table = table
        self._read: Counter[str] = Counter()  # past sessions of a bank
        self._rows: Counter[str] = Counter()  # of a bank
        # Which of a bank's rows are the contents of which messages, by their numbers.
        self._places: dict[str, dict[int, SpanRange]] = defaultdict(dict)

    def _take_in(self, session: str, past: PastSession) -> Remembered:
        """Read messages as a session of their own and keep its rows.

        If the engine has their rows in a file, they are not read. Raises ContextLimitError if they
        are longer than the model's context.
        """
        self.settle(session)
        started = time.perf_counter()
        bank = self._bank_for(session)
        with self._lock:
            self._read[bank] += 1
            name = f"{bank} past {self._read[bank]}"
        state = Session(name, self._engine, self._table)
        plan, contents = self._planner.past(state, past.messages)
        state.prepare(plan)
        try:
            took = self._engine.recollect(name, bank, plan.ids)
            if took is None:
                state.extend(plan.ids, Hints())
                self._feed(state)
                self._engine.memorise(name, bank, len(plan.ids))
        finally:
            state.close()
        for number, span in zip(past.numbers, contents, strict=True):
            if number is not None and span is not None:
                start, end = span
                self._places[bank][number] = (self._rows[bank] + start, self._rows[bank] + end)
        self._rows[bank] += len(plan.ids)
        seconds = time.perf_counter() - started
        if took is not None:
            return Remembered(1, len(plan.ids), took, files=1, files_s=seconds)
        self._engine.preserve(bank, plan.ids, seconds)
        return Remembered(1, len(plan.ids), seconds)

    def settle(self, session: str) -> None:
        adding = self._adding.get(self.bank_of(session))
        if adding is not None:
            adding.result()

    def append(self, state: Session) -> None:
        bank = self.bank_of(state.id)
        if not (self._appends and bank):
            return
        with self._lock:
            before = self._adding.get(bank)
            self._adding[bank] = self._beside.submit(self._append, state, bank, before)

    def _append(self, state: Session, bank: str, before: Future[Appended] | None) -> Appended:
        so_far = Appended() if before is None else before.result()  # one that failed fails the next
        started = time.perf_counter()
        try:
            rows = self._engine.memorise(state.id, bank, start=state.appended)
        except (EngineGoneError, MemoryLostError):
            raise
        except Exception as error:
            what = f"a turn of session {state.id} could not be added to its memory"
            gone = isinstance(error, OSError)  # the backend, with the bank and the session
            raise (MemoryLostError if gone else KVBenchError)(f"{what}: {error}") from error
        state.appended += rows
        self._rows[bank] += rows
        return so_far + Appended(rows, time.perf_counter() - started)

    def appended(self, session: str) -> Appended:
        adding = self._adding.get(self.bank_of(session))
        if adding is None or adding.exception() is not None:
            return Appended()
        return adding.result()

    def recalled(self, session: str) -> Recalled | None:
        """Return how much of each past message came back, a mean over layers, and in each."""
        bank = self.bank_of(session)
        if not bank:
            return None
        found = shares(self._engine.recalled(session), self._places[bank])
        means = {number: float(layers.mean()) for number, layers in found.items()}
        return Recalled((), means, {number: layers.tolist() for number, layers in found.items()})

    def _feed(self, past: Session) -> None:
        """Have the model read what is pending: a token behind it is given, and not fed itself."""
        end = self._engine.info.eos_token_ids[:1] or (past.tokens[-1],)
        for _ in self._engine.force(past.id, end):
            pass

    def _free(self, bank: str) -> None:
        for each in (self._read, self._rows, self._places, self._adding):
            each.pop(bank, None)
        self._engine.forget(bank)


def shares(
    rows: NDArray[np.int64], places: Mapping[int, SpanRange]
) -> dict[int, NDArray[np.float64]]:
    """Return how much of each place is among rows [layers, rows], which ascend: for each layer.

    Places of which nothing is there are left out.
    """
    found: dict[int, NDArray[np.float64]] = {}
    for number, (start, end) in places.items():
        held = np.array([np.diff(np.searchsorted(layer, (start, end)))[0] for layer in rows])
        if held.any():
            found[number] = held / (end - start)
    return found
