"""Who may generate: cells and sequences of one context, lent to sessions."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from agentbench_kv.engines.llamacpp.server.cells import Cells
from agentbench_kv.engines.llamacpp.server.prefixes import SequencePrefixes
from agentbench_kv.engines.llamacpp.server.rows import SequenceRows
from agentbench_kv.engines.llamacpp.server.session import BackendGeneration, BackendSession
from agentbench_kv.errors import CapacityError
from agentbench_kv.methods.base import Method


class Admission:
    """Cells and sequences of one context, lent to sessions.

    A session at rest whose cells are needed is parked: its rows are copied out of the cache and put
    back by its next turn, to the last bit. Sessions that generate are never touched. Cells that
    several sessions share count once; whoever generates under a method that compresses may have to
    copy all of its shared ones, but for a prefix that no event changes.
    """

    def __init__(self, cells: Cells, method: Method, prefixes: SequencePrefixes) -> None:
        self._cells = cells
        self._context = cells.context
        self._copies = method.compresses
        self._prefixes = prefixes
        self._sequences = list(range(prefixes.first_sequence))
        self.parkings = 0  # how often a session was parked

    def admit(self, generation: BackendGeneration, sessions: Collection[BackendSession]) -> bool:
        """Lend a session its cells; False if it must wait, CapacityError if nothing else runs."""
        session = generation.session
        need = session.ledger.rows_needed(session.pending, generation.sampling.max_tokens)
        prefix = self._prefixes.find(session)
        if not self.bring_in(session, need, sessions, self._copied(session), prefix):
            if any(each.generating for each in sessions):
                return False
            raise CapacityError(
                f"the KV cache holds {self._context.cells} tokens, session {session.name} needs "
                f"{need}; lower --budget or --max-tokens, or give more: --engine-arg cells=N"
            )
        if prefix is not None:
            if prefix.rows.live:
                self._prefixes.begin(session, prefix)
            else:  # there was no room beside it
                self._prefixes.give_up(session)
        session.reserved, session.generating = need, True
        return True

    def bring_in(
        self,
        session: BackendSession,
        need: int,  # rows that it may come to hold
        sessions: Collection[BackendSession],
        copies: int = 0,  # shared ones among them that it may have to copy
        prefix: BackendSession | None = None,  # that it is about to begin with
    ) -> bool:
        """Bring `session` in, parking resting ones, oldest first; False if there is no room now."""
        others = [each for each in sessions if each is not session]
        generating = [each for each in others if each.generating]

        def left() -> int:  # rows in cells of its prefix that it will leave there
            return session.leaves_prefix(prefix.rows.live) if prefix else session.rows_elsewhere

        begun = (prefix.rows if prefix else session.rows.prefix, left())
        if self._together(generating, need - left(), begun) > self._context.cells:
            return False
        resting = [each for each in others if not each.generating and each.rows.sequence >= 0]
        resting.sort(key=lambda each: each.used)

        def crowded() -> bool:
            held = session.rows.resident or left()
            own = need - held + min(copies, session.rows.shared)
            return self._cells.used + own + sum(map(self._growth, generating)) > self._context.cells

        while (full := crowded()) or self._lacks_sequence(session):
            if full and self._prefixes.make_room(session):
                continue
            if not resting:
                # Rows that would be copied have no room beside the copies.
                if full and self._prefixes.clear():
                    continue
                break
            leaving = resting.pop(0)
            self._sequences.append(leaving.rows.sequence)
            leaving.rows.park()
            self.parkings += 1
        if self._lacks_sequence(session):
            return False
        if session.rows.sequence < 0:
            session.rows.unpark(self._sequences.pop())
        return True

    def _together(
        self,
        generating: Sequence[BackendSession],
        own: int,
        begun: tuple[SequenceRows | None, int],
    ) -> int:
        """Return the rows that those who generate may come to hold, and one more with `own`.

        Prefixes count once; `begun` is that of the one more, and how many rows it will leave.
        """
        common = dict([begun])
        for each in generating:
            rows = each.rows_elsewhere
            own += each.reserved - rows
            common[each.rows.prefix] = max(rows, common.get(each.rows.prefix, 0))
        return own + sum(common.values())

    def leave_prefix(self, session: BackendSession, sessions: Collection[BackendSession]) -> None:
        """Leave a prefix to others as its last token was fed, where copies of it have room."""
        if (key := self._prefixes.ended(session)) is None:
            return
        if self._may_leave(session, sessions):
            self._prefixes.take(session, key)
        else:
            self._prefixes.give_up(session)

    def _may_leave(self, session: BackendSession, sessions: Collection[BackendSession]) -> bool:
        rows = session.ledger.fed
        if session.leaves_prefix(rows):
            return True
        growth = sum(self._growth(each) for each in sessions if each.generating)
        return self._cells.used + growth + rows <= self._context.cells

    def lend(self) -> int:
        """Lend a fork a sequence; -1 if none is left."""
        return self._sequences.pop() if self._sequences else -1

    def _growth(self, session: BackendSession) -> int:
        """Return how many free cells a session that generates may still take."""
        return session.reserved - session.rows.resident + self._copied(session)

    def _copied(self, session: BackendSession) -> int:
        """Return how many shared cells it may have to copy, or to take others for."""
        if not self._copies and session.memory is None:
            return 0
        return session.rows.shared - session.rows_elsewhere

    def settle(self, session: BackendSession) -> None:
        """Take back what a session reserved for its turn and does not hold."""
        session.reserved, session.generating = session.rows.live, False

    def release(self, session: BackendSession) -> None:
        """Take a session's sequence back; its rows are gone."""
        if session.rows.sequence >= 0:
            self._sequences.append(session.rows.sequence)
            session.rows.sequence = -1
        session.reserved, session.generating = 0, False

    def _lacks_sequence(self, session: BackendSession) -> bool:
        return session.rows.sequence < 0 and not self._sequences
