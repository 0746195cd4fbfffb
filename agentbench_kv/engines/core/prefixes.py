"""System messages that sessions have in common: who computes one, who waits, which are kept."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np

from agentbench_kv.engines.core.ledger import SessionLedger
from agentbench_kv.methods.base import Method
from agentbench_kv.phases.machine import PromptPhases, cut_runs

PREFIXES = 16  # that are kept, as long as there is room


class PrefixSession(Protocol):
    """A session that may begin with a prefix, as `SchedulerSession` has it."""

    ledger: SessionLedger
    prompt: PromptPhases
    prefix_key: bytes | None
    prefix_tokens: int


def plan_prefix(
    session: PrefixSession,
    method: Method,
    tokens: Sequence[int],
    page: int,
    *,
    copies: bool = False,
) -> None:
    """Note what a session that is about to read `tokens` may share: whole pages of its system.

    `copies` says that the engine copies what an event changes.
    """
    count = session.prefix_tokens = session.ledger.system // page * page
    session.prefix_key = None
    if session.ledger.fed or method.prefix == "own" or not 0 < count < len(tokens):
        return
    if method.compresses and not copies and not session.ledger.protects(count):
        return  # events would evict from them
    runs = cut_runs(session.prompt.runs, count)
    parts = [count, *tokens[:count], *itertools.chain(*runs)]
    session.prefix_key = np.array(parts, np.int64).tobytes()


class StoredPrefix(Protocol):
    """The rows of a prefix, where an engine keeps them."""

    @property
    def rows(self) -> int: ...

    @property
    def rows_in_use(self) -> bool:
        """Whether sessions read its rows."""
        ...

    def free(self) -> None:
        """Give it up: its rows go with the last session that reads them."""
        ...


_Prefix = TypeVar("_Prefix", bound=StoredPrefix)
_Session = TypeVar("_Session")


class PrefixTable(Generic[_Session, _Prefix]):
    """Prefixes by their tokens and phases, the least recently used first.

    A session that comes while another one computes what it needs waits for that one.
    """

    def __init__(self, limit: int = PREFIXES) -> None:
        self._limit = limit
        self._stored: OrderedDict[bytes, _Prefix] = OrderedDict()
        self._computing: dict[bytes, _Session] = {}
        self._dropped: list[_Prefix] = []  # sessions still read them

    def __contains__(self, key: bytes) -> bool:
        """Whether a prefix is there, or is being computed."""
        return key in self._stored or key in self._computing

    @property
    def held(self) -> Iterable[_Prefix]:
        """All prefixes whose rows are there, the dropped ones that sessions read included."""
        self._dropped = [each for each in self._dropped if each.rows_in_use]
        return (*self._stored.values(), *self._dropped)

    @property
    def rows(self) -> int:
        """Rows held of all prefixes, each counted once."""
        return sum(each.rows for each in self.held)

    def find(self, key: bytes) -> _Prefix | None:
        """Return a prefix that is there; it is now the one used last."""
        if key in self._stored:
            self._stored.move_to_end(key)
        return self._stored.get(key)

    def computed_by(self, key: bytes, session: _Session) -> bool:
        """Let a session compute a prefix that is not there; False if another one does."""
        return self._computing.setdefault(key, session) is session

    def give_up(self, session: _Session) -> None:
        """Note that a session will not come to the end of what it computes."""
        self._computing = {k: each for k, each in self._computing.items() if each is not session}

    def store(self, key: bytes, prefix: _Prefix) -> None:
        """Keep what the session that computes it has come to the end of."""
        del self._computing[key]
        self._stored[key] = prefix
        while len(self._stored) > self._limit:
            self._drop(next(iter(self._stored)))

    def make_room(self, but: bytes | None) -> bool:
        """Drop the least recently used prefix that nobody reads; False if there is none.

        `but` is the one that a session is about to begin with: it stays.
        """
        for key, stored in self._stored.items():
            if key != but and not stored.rows_in_use:
                self._drop(key)
                return True
        return False

    def drop_unread(self) -> None:
        """Drop all that nobody reads."""
        while self.make_room(None):
            pass

    def clear(self) -> None:
        """Drop all that are there."""
        for key in list(self._stored):
            self._drop(key)

    def _drop(self, key: bytes) -> None:
        prefix = self._stored.pop(key)
        prefix.free()
        self._dropped.append(prefix)
