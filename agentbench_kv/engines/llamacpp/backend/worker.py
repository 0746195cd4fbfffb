"""What the backend knows of its sessions' rows besides keys and values."""

from __future__ import annotations

from agentbench_kv.engines.serving.backend.rows import WorkerRows
from agentbench_kv.methods.base import Queries


class KeptRows(WorkerRows):
    """The common part, and what span-level methods ask of it."""

    def queries(self, session: str) -> list[Queries]:
        """Return a session's kept queries, oldest first, for every layer; empty before any."""
        rows = self._sessions.get(session)
        return [] if rows is None else rows.queries.layer_queries(self.shape.layers)

    def shift_queries(self, session: str, by: int) -> None:
        """Turn a session's kept queries by some positions, as the end of its cache moved."""
        rows = self._sessions.get(session)
        if rows is not None and self._frequencies is not None:
            rows.queries.shift(by, self._frequencies)
