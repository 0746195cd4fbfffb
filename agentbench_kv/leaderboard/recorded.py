"""An engine that says what a record holds, token by token, and keeps the account that follows.

Lengths under a token-level method follow from the method alone (`SessionLedger`), so a recorded
session has only one honest KV account, and no model is needed to derive it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from agentbench_kv.engines.base import (
    Engine,
    EngineInfo,
    FinishReason,
    Generation,
    KVStats,
    Phase,
    PhaseLabeller,
    Sampling,
)
from agentbench_kv.engines.serving.backend.ledger import SessionLedger
from agentbench_kv.errors import ContextLimitError, KVBenchError

Recorded = Callable[[str], list[list[int]]]
"""From a session's id to the ids of its generations, in order."""


@dataclass
class _Session:
    labeller: PhaseLabeller
    ledger: SessionLedger
    length: int = 0
    waiting: int = 0
    """Tokens the cache does not hold yet: a prompt, and what was generated last."""
    prompt: int = 0


class RecordedEngine(Engine):
    """Replays recorded ids; the k-th generation of a session id is its k-th record.

    Parameters
    ----------
    recorded : callable
    info : EngineInfo
        Of the engine that is stood in for: its tokenizer's folder, its limits.
    ledger : callable
        Makes the account of a session.
    """

    def __init__(
        self, recorded: Recorded, info: EngineInfo, ledger: Callable[[], SessionLedger]
    ) -> None:
        self.info = info
        self._recorded = recorded
        self._ledger = ledger
        self._sessions: dict[str, _Session] = {}
        self._turns: dict[str, int] = {}
        self._lock = threading.Lock()

    def open(self, session: str, labeller: PhaseLabeller) -> None:
        """Start an empty session; after a reset its records go on where they were."""
        self._sessions[session] = _Session(labeller, self._ledger())

    def extend(self, session: str, tokens: Sequence[int], phases: Sequence[Phase]) -> None:
        """Append prompt tokens."""
        del phases
        state = self._sessions[session]
        if state.length + len(tokens) > self.info.context_limit:
            raise ContextLimitError(f"the limit is {self.info.context_limit} tokens")
        state.length += len(tokens)
        state.waiting += len(tokens)
        state.prompt += len(tokens)

    def generate(self, session: str, sampling: Sampling) -> Generation:
        """Replay the session's next generation."""
        with self._lock:
            turn = self._turns.get(session, 0)
            self._turns[session] = turn + 1
        generations = self._recorded(session)
        if turn >= len(generations):
            raise KVBenchError(f"the record has {len(generations)} generations, one more was asked")
        limit = self.info.context_limit
        return _RecordedGeneration(self._sessions[session], generations[turn], sampling, limit)

    def stats(self, session: str) -> KVStats:
        """Return a snapshot of the account."""
        state = self._sessions[session]
        return replace(state.ledger.snapshot(), logical=state.ledger.fed + state.waiting)

    def close(self, session: str) -> KVStats:
        """Forget the session and return its account."""
        stats = self.stats(session)
        del self._sessions[session]
        return stats

    def unsaid(self, session: str) -> int:
        """Return how many recorded generations nobody asked for."""
        return len(self._recorded(session)) - self._turns.get(session, 0)


class _RecordedGeneration(Generation):
    """One generation being replayed; it ends where the record does, for a reason that must be."""

    def __init__(self, state: _Session, ids: list[int], sampling: Sampling, limit: int) -> None:
        self._state = state
        self._ids = ids
        self._sampling = sampling
        self._limit = limit
        self._start = time.perf_counter()

    def __iter__(self) -> Iterator[int]:
        """Yield the recorded ids."""
        state = self._state
        state.ledger.begin_turn(state.prompt)
        state.prompt = 0
        for count, token in enumerate(self._ids, start=1):
            if self.finish_reason is not None:
                raise KVBenchError(f"the record goes on after {self.finish_reason.value}")
            state.ledger.forward(state.waiting)
            state.ledger.sampled()
            state.labeller.label(token)
            state.length, state.waiting = state.length + 1, 1
            self.finish_reason = self._reason(token, count)
            self.last_token_s = time.perf_counter() - self._start
            self.first_token_s = self.first_token_s or self.last_token_s
            yield token
        if not self._ids and state.length >= self._limit:
            self.finish_reason = FinishReason.CONTEXT_LIMIT
        if self.finish_reason is None:
            raise KVBenchError(f"the record ends after {len(self._ids)} tokens for no reason")
        state.ledger.end_turn()

    def cancel(self) -> None:
        """Do nothing: a record is as long as it is."""

    def _reason(self, token: int, count: int) -> FinishReason | None:
        asked = self._sampling.stop is not None and self._sampling.stop(token)
        if asked or token in self._sampling.stop_token_ids:
            return FinishReason.STOP
        if count >= self._sampling.max_tokens:
            return FinishReason.LENGTH
        return FinishReason.CONTEXT_LIMIT if self._state.length >= self._limit else None
