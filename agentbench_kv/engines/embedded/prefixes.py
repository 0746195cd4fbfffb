"""System messages that sessions have in common: computed by the first, begun with by the others."""

from __future__ import annotations

from agentbench_kv.engines.core.prefixes import PREFIXES, PrefixTable
from agentbench_kv.engines.embedded.session import EmbeddedSession, SessionPrefix


class PrefixStore:
    """The engine's prefixes; on its thread."""

    def __init__(self, limit: int = PREFIXES) -> None:
        self._table: PrefixTable[EmbeddedSession, SessionPrefix] = PrefixTable(limit)

    @property
    def rows(self) -> int:
        """Rows held of all prefixes, each counted once."""
        return self._table.rows

    def expected(self, session: EmbeddedSession) -> int:
        """Return how many rows a session that is about to begin need not hold itself."""
        key = session.prefix_key
        return session.rows_elsewhere if key is not None and key in self._table else 0

    def admit(self, session: EmbeddedSession) -> bool:
        """Return whether a session may be fed; it then has its prefix, or computes it."""
        key = session.prefix_key
        if key is None or session.computes_prefix:
            return True
        stored = self._table.find(key)
        if stored is not None:
            session.begin_with(stored)
            return True
        session.computes_prefix = self._table.computed_by(key, session)
        return session.computes_prefix

    def take(self, session: EmbeddedSession) -> bool:
        """Store the prefix that a session has computed, if it has just come to its end."""
        key = session.prefix_key
        if key is None or session.fed < session.prefix_tokens:
            return False
        self._table.store(key, session.leave_prefix())
        return True

    def give_up(self, session: EmbeddedSession) -> None:
        """Let others compute what a session that broke was about to."""
        self._table.give_up(session)

    def make_room(self, session: EmbeddedSession) -> bool:
        """Drop a prefix that nobody reads, but for the session's; False if there is none."""
        return self._table.make_room(session.prefix_key)

    def drop_unread(self) -> None:
        """Drop all that nobody reads."""
        self._table.drop_unread()
