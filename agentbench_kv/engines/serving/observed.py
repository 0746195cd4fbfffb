"""Accounting of an engine as shipped, which has no ledger of ours: what its client can see."""

from __future__ import annotations

from agentbench_kv.engines.serving.backend.ledger import SessionLedger
from agentbench_kv.methods.full import Full


class ObservedLedger(SessionLedger):
    """One session of a server that evicts nothing within a request.

    A prefix cache may have dropped what the session had before; the server says how many tokens it
    found, and the others count as recomputed.
    """

    def __init__(self, bytes_per_token: int) -> None:
        super().__init__(Full(), bytes_per_token)
        self._expected = 0  # rows the next forward writes
        self._before = 0  # rows the session had when the generation began

    def begin(self, tokens: int) -> None:
        """Expect a generation from a session of `tokens` tokens."""
        # The last token it generated was never fed; it is part of no prompt.
        self.begin_turn(tokens - (self.fed + (self.fed > 0)))
        self._before = self.fed
        self._expected = tokens - self.fed

    def token(self) -> None:
        """Count a generated token and the forward it came from."""
        self.forward(self._expected)
        self.sampled()
        self._expected = 1

    def end(self, cached_tokens: int | None) -> None:
        """Take in how many of the prompt's tokens the server had cached, where it says so."""
        if cached_tokens is not None:
            self.stats.recomputed += max(0, self._before - cached_tokens)
