"""System messages that sessions have in common: computed by the first, begun with by the others."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from agentbench_kv.engines.core.prefixes import PREFIXES, PrefixTable, plan_prefix
from agentbench_kv.engines.core.rows import WorkerRows
from agentbench_kv.engines.llamacpp.server.rows import SequenceRows
from agentbench_kv.engines.llamacpp.server.session import BackendSession
from agentbench_kv.methods.base import Method

_numbers = itertools.count(1)


@dataclass
class SequencePrefix:
    """A session at rest that was fed a prefix and nothing else; its cells are others' too."""

    session: BackendSession
    release: Callable[[BackendSession], None]

    @property
    def rows(self) -> int:
        return self.session.rows.live

    @property
    def rows_in_use(self) -> bool:
        """Whether sessions have its rows."""
        return self.session.rows.shared > 0

    def free(self) -> None:
        """Give it up: its cells go with the last session that has them."""
        self.release(self.session)


class SequencePrefixes:
    """The prefixes of one method, with sequences of their own; on the scheduler's thread."""

    def __init__(self, method: Method, worker: WorkerRows, scratch: int) -> None:
        self._method = method
        self._worker = worker
        self._keys: dict[SequenceRows | None, bytes] = {}  # of those that are there
        # One is stored before the one that makes room for it is dropped.
        count = min(PREFIXES + 1, scratch // 2) if method.prefix == "shared" else 0
        self._table: PrefixTable[BackendSession, SequencePrefix] = PrefixTable(count - 1)
        self.first_sequence = scratch - count  # all before it are sessions'
        self._sequences = list(range(self.first_sequence, scratch))

    def plan(self, session: BackendSession) -> None:
        """Note what a session that is about to read its tokens has to share, if it begins so."""
        if session.memory is None:
            plan_prefix(session, self._method, session.tokens, 1, copies=True)

    def ready(self, session: BackendSession) -> bool:
        """Whether a session has no prefix, finds it or computes it; else another one does."""
        key = session.prefix_key
        if key is None or session.computes_prefix or self._table.find(key) is not None:
            return True
        session.computes_prefix = self._table.computed_by(key, session)
        return session.computes_prefix

    def find(self, session: BackendSession) -> BackendSession | None:
        """Return the prefix that a session is to begin with, if it is there."""
        key = session.prefix_key
        stored = None if key is None or session.computes_prefix else self._table.find(key)
        return None if stored is None else stored.session

    def ended(self, session: BackendSession) -> bytes | None:
        """Return the key of the prefix whose last token a session has just been fed, if it has."""
        at_end = session.computes_prefix and session.ledger.fed == session.prefix_tokens
        return session.prefix_key if at_end else None

    def take(self, session: BackendSession, key: bytes) -> None:
        """Store the prefix that a session has come to the end of."""
        name = f"kvbench prefix {next(_numbers)}"
        prefix = session.leave_prefix(name, self._sequences.pop())
        self._worker.fork(session.name, name)
        self._keys[prefix.rows] = key
        self._table.store(key, SequencePrefix(prefix, self._release))

    def begin(self, session: BackendSession, prefix: BackendSession) -> None:
        """Let a session, which has a sequence and no rows, go on from a prefix."""
        session.begin_with(prefix)
        self._worker.fork(prefix.name, session.name)

    def give_up(self, session: BackendSession) -> None:
        """Let others compute what a session will not come to the end of."""
        session.prefix_key, session.computes_prefix = None, False
        self._table.give_up(session)

    def make_room(self, session: BackendSession) -> bool:
        """Drop a prefix that nobody has, but for the session's; False if there is none."""
        return self._table.make_room(self._keys.get(session.rows.prefix, session.prefix_key))

    def drop_unread(self) -> None:
        """Drop all that nobody has."""
        self._table.drop_unread()

    def clear(self) -> bool:
        """Drop all, whoever has them; False if there was none."""
        found = bool(self._keys)
        self._table.clear()
        return found

    def _release(self, prefix: BackendSession) -> None:
        del self._keys[prefix.rows]
        self._sequences.append(prefix.rows.sequence)
        prefix.rows.free()
        self._worker.drop(prefix.name)
