"""System messages that sessions have in common: computed by the first, begun with by the others."""

from __future__ import annotations

from collections import OrderedDict

from agentbench_kv.engines.embedded.session import EmbeddedSession, StoredPrefix

PREFIXES = 16  # that are kept, as long as there is room


class PrefixStore:
    """Prefixes by their tokens and phases, the least recently used first; on the engine's thread.

    A session that comes while another one computes what it needs waits for that one.
    """

    def __init__(self, limit: int = PREFIXES) -> None:
        self._limit = limit
        self._stored: OrderedDict[bytes, StoredPrefix] = OrderedDict()
        self._computing: dict[bytes, EmbeddedSession] = {}
        self._dropped: list[StoredPrefix] = []  # sessions still read them

    @property
    def rows(self) -> int:
        """Rows held of all prefixes, each counted once."""
        self._dropped = [each for each in self._dropped if each.rows_in_use]
        return sum(each.rows for each in (*self._stored.values(), *self._dropped))

    def expected(self, session: EmbeddedSession) -> int:
        """Return how many rows a session that is about to begin need not hold itself."""
        key = session.prefix_key
        known = key in self._stored or self._computer(key) is not None
        return session.rows_elsewhere if known else 0

    def admit(self, session: EmbeddedSession) -> bool:
        """Return whether a session may be fed; it then has its prefix, or computes it."""
        key = session.prefix_key
        if key is None or session.computes_prefix:
            return True
        if key in self._stored:
            self._stored.move_to_end(key)
            session.begin_with(self._stored[key])
            return True
        if self._computer(key) is not None:
            return False
        self._computing[key] = session
        session.computes_prefix = True
        return True

    def take(self, session: EmbeddedSession) -> bool:
        """Store the prefix that a session has computed, if it has just come to its end."""
        key = session.prefix_key
        if key is None or session.fed < session.prefix_tokens:
            return False
        del self._computing[key]
        self._stored[key] = session.leave_prefix()
        while len(self._stored) > self._limit:
            self._drop(next(iter(self._stored)))
        return True

    def make_room(self, session: EmbeddedSession) -> bool:
        """Drop the least recently used prefix that nobody reads; False if there is none.

        The one that a session is about to begin with stays.
        """
        for key, stored in self._stored.items():
            if key != session.prefix_key and not stored.rows_in_use:
                self._drop(key)
                return True
        return False

    def _drop(self, key: bytes) -> None:
        stored = self._stored.pop(key)
        stored.free()
        self._dropped.append(stored)

    def _computer(self, key: bytes | None) -> EmbeddedSession | None:
        """Return the session that computes a prefix; one that broke will not."""
        found = None if key is None else self._computing.get(key)
        if key is not None and found is not None and found.broken is not None:
            del self._computing[key]
            return None
        return found
