"""Events in SGLang's memory: rows move to the front, whole pages behind them become free."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from agentbench_kv.engines.base import SpanRange
from agentbench_kv.engines.serving.backend.ledger import Cut
from agentbench_kv.engines.serving.backend.orders import Removal
from agentbench_kv.engines.serving.backend.stores import PagedStore
from agentbench_kv.engines.sglang.backend.book import Session
from agentbench_kv.engines.sglang.backend.worker import Worker


class Compactor:
    """Carries out events."""

    def __init__(self, worker: Worker, allocator: Any, forward_stream: Any) -> None:
        self._worker = worker
        self._allocator = allocator
        self._forwards = forward_stream  # where forwards run while the scheduler works ahead

    def carry_out(self, session: Session, row: int, cut: Cut) -> None:
        """Keep what the method selects of a request's rows and free the rest."""
        self.wait_for_forward()
        self._move(session, row, cut, self._worker.rows.remove)

    def evict(self, session: Session, row: int, spans: Sequence[SpanRange]) -> Cut | None:
        """Remove whole tokens of a session at rest; None if none of them was there."""
        self.wait_for_forward()
        ledger, rows = session.ledger, self._worker.rows
        kept = rows.outside(session.name, session.recipe, ledger.live, ledger.fed, spans)
        if len(kept) == ledger.live:
            return None
        cut = ledger.evict(len(kept))
        self._move(session, row, cut, partial(rows.keep_tokens, kept=kept))
        return cut

    def wait_for_forward(self) -> None:
        """Let what follows on the device wait for the forward that may still run."""
        if torch.cuda.is_available() and self._forwards is not None:
            torch.cuda.current_stream().wait_stream(self._forwards)

    def _move(
        self, session: Session, row: int, cut: Cut, move: Callable[[Removal, PagedStore], int]
    ) -> None:
        """Move the kept rows to the front; free the whole pages behind them."""
        ledger, pool = session.ledger, self._worker.pool
        number = len(ledger.stats.events) - 1
        removal = Removal(session.name, number, cut, [])
        ledger.moved(number, move(removal, pool.store(row, cut.live)))
        self._worker.deficits[row] = ledger.deficit
        first = -(-cut.keep // pool.page) * pool.page
        if first < cut.live:
            # A copy: SGLang may keep the indices until the end of its step.
            self._allocator.free(pool.table[row, first : cut.live].to(torch.int64))


def shorten(holder: Any, removed: int) -> None:
    """Take removed rows off the lengths that a request or a session's slot keeps."""
    holder.kv_committed_len -= removed
    holder.kv_allocated_len -= removed
