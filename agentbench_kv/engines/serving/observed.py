"""Accounting of an engine as shipped, which has no ledger of ours: what its client can see."""

from __future__ import annotations

from agentbench_kv.engines.base import KVStats
from agentbench_kv.engines.serving.backend.ledger import SessionLedger
from agentbench_kv.methods.full import Full


class ObservedLedger:
    """One session of a server that evicts nothing within a request.

    A prefix cache may have dropped what the session had before; the server says how many tokens it
    found, and the others count as recomputed.
    """

    def __init__(self, bytes_per_token: int) -> None:
        self._ledger = SessionLedger(Full(), bytes_per_token)
        self._expected = 0
        self._before = 0

    def begin(self, tokens: int) -> None:
        """Expect a generation from a session of `tokens` tokens."""
        ledger = self._ledger
        # The last token it generated was never fed; it is no prompt of anybody's.
        seen = ledger.fed + (ledger.fed > 0)
        ledger.begin_turn(tokens - seen)
        self._before = ledger.fed
        self._expected = tokens - ledger.fed

    def token(self) -> None:
        """Count a generated token and the forward it came from."""
        self._ledger.forward(self._expected)
        self._ledger.sampled()
        self._expected = 1

    def end(self, cached_tokens: int | None) -> None:
        """Take in how many of the prompt's tokens the server had cached, where it says so."""
        if cached_tokens is not None:
            self._ledger.stats.recomputed += max(0, self._before - cached_tokens)

    def snapshot(self) -> KVStats:
        """Return the accounting as of now."""
        return self._ledger.snapshot()
