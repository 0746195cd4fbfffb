"""Events in SGLang's memory: rows move to the front, whole pages behind them become free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from agentbench_kv.engines.base import SpanRange
from agentbench_kv.engines.serving.backend.ledger import Cut
from agentbench_kv.engines.serving.backend.orders import Removal
from agentbench_kv.engines.sglang.backend.book import Held
from agentbench_kv.engines.sglang.backend.worker import Worker


class Compactor:
    """Carries out events."""

    def __init__(self, worker: Worker, allocator: Any, forward_stream: Any) -> None:
        self._worker = worker
        self._allocator = allocator
        self._forwards = forward_stream

    def carry_out(self, held: Held, row: int, cut: Cut) -> None:
        """Keep what the method selects of a request's rows and free the rest."""
        self.wait_for_forward()
        number = len(held.ledger.stats.events) - 1
        store = self._worker.pool.store(row, cut.live)
        moved = self._worker.rows.remove(Removal(held.name, number, cut, []), store)
        held.ledger.moved(number, moved)
        self._free(held, row, cut)

    def evict(self, held: Held, row: int, spans: Sequence[SpanRange]) -> Cut | None:
        """Remove whole tokens of a session at rest; None if none of them was there."""
        self.wait_for_forward()
        ledger, rows = held.ledger, self._worker.rows
        kept = rows.outside(held.name, held.recipe, ledger.live, ledger.fed, spans)
        if len(kept) == ledger.live:
            return None
        cut = ledger.evict(len(kept))
        number = len(ledger.stats.events) - 1
        store = self._worker.pool.store(row, cut.live)
        moved = rows.keep_tokens(Removal(held.name, number, cut, []), store, kept)
        ledger.moved(number, moved)
        self._free(held, row, cut)
        return cut

    def wait_for_forward(self) -> None:
        """Let what follows on the device wait for the forward that may still run."""
        if torch.cuda.is_available() and self._forwards is not None:
            torch.cuda.current_stream().wait_stream(self._forwards)

    def _free(self, held: Held, row: int, cut: Cut) -> None:
        self._worker.deficits[row] = held.ledger.deficit
        pool = self._worker.pool
        first = ceil_page(cut.keep, pool.page)
        if first < cut.live:
            # A copy: SGLang may keep the indices until the end of its step.
            self._allocator.free(pool.table[row, first : cut.live].to(torch.int64))


def ceil_page(rows: int, page: int) -> int:
    """Round up to whole pages."""
    return -(-rows // page) * page


def shorten(holder: Any, removed: int) -> None:
    """Take removed rows off the lengths that a request or a session's slot keeps."""
    holder.kv_committed_len -= removed
    holder.kv_allocated_len -= removed
