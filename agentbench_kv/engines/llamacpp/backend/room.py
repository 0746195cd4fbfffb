"""Who is in the cache: admission against its size, and parking of sessions at rest."""

from __future__ import annotations

from collections.abc import Collection

from agentbench_kv.engines.llamacpp.backend.context import Context
from agentbench_kv.engines.llamacpp.backend.session import BackendGeneration, BackendSession
from agentbench_kv.errors import CapacityError
from agentbench_kv.methods.base import Method


class Admission:
    """Cells and sequences of one context, lent to sessions.

    A session at rest whose cells are needed is parked: its rows are copied out of the cache and put
    back by its next turn, to the last bit. Sessions that generate are never touched.
    """

    def __init__(self, context: Context, method: Method) -> None:
        self._context = context
        self._method = method
        self._sequences = list(range(context.scratch))
        self.parkings = 0  # how often a session was parked

    def admit(self, generation: BackendGeneration, sessions: Collection[BackendSession]) -> bool:
        """Lend a generation's session its cells; False if it must wait for those that run.

        CapacityError if nothing runs and it still does not fit.
        """
        session = generation.session
        need = self._need(generation)
        if not self._bring_in(session, need, sessions):
            if any(each.generating for each in sessions):
                return False
            raise CapacityError(
                f"the KV cache holds {self._context.cells} tokens, session {session.name} needs "
                f"{need}; lower the budget or max tokens, or raise --max-live-tokens"
            )
        session.reserved, session.generating = need, True
        return True

    def bring_in(
        self, session: BackendSession, cells: int, sessions: Collection[BackendSession]
    ) -> None:
        """Put a resting session's rows back into the cache, with room for `cells` in all."""
        if not self._bring_in(session, cells, sessions):
            raise CapacityError(
                f"the KV cache holds {self._context.cells} tokens and has no room for "
                f"{cells} of session {session.name}"
            )

    def settle(self, session: BackendSession) -> None:
        """Take back what a session reserved for its turn and does not hold."""
        session.reserved, session.generating = session.rows.live, False

    def release(self, session: BackendSession) -> None:
        """Take a session's sequence back; its rows are gone."""
        if session.rows.sequence >= 0:
            self._sequences.append(session.rows.sequence)
            session.rows.sequence = -1
        session.reserved, session.generating = 0, False

    def _need(self, generation: BackendGeneration) -> int:
        """Cells the session may hold before it ends or an event frees some."""
        session, method = generation.session, self._method
        start = session.rows.live + session.pending
        whole = start + generation.sampling.max_tokens
        if not method.compresses or method.trigger == "turn":
            return whole
        longest = session.ledger.fed + whole
        return min(whole, max(start, method.budget_at(longest)) + method.interval)

    def _bring_in(
        self, session: BackendSession, need: int, sessions: Collection[BackendSession]
    ) -> bool:
        """Park resting sessions, oldest first, until `need` cells are free; bring `session` in."""
        others = [each for each in sessions if each is not session]
        resting = sorted(
            (each for each in others if not each.generating and each.rows.sequence >= 0),
            key=lambda each: each.used,
        )
        taken = sum(each.reserved for each in others if each.generating)
        if taken + need > self._context.cells:
            return False
        taken += sum(each.rows.resident for each in resting)
        while resting and (taken + need > self._context.cells or self._lacks_sequence(session)):
            leaving = resting.pop(0)
            taken -= leaving.rows.resident
            sequence = leaving.rows.sequence
            leaving.rows.park()
            self._sequences.append(sequence)
            self.parkings += 1
        if self._lacks_sequence(session):
            return False
        if session.rows.sequence < 0:
            session.rows.unpark(self._sequences.pop())
        return True

    def _lacks_sequence(self, session: BackendSession) -> bool:
        return session.rows.sequence < 0 and not self._sequences
