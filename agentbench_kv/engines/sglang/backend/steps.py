"""What happens around SGLang's forwards: counting, labelling, events.

A decode forward is settled when the next one is prepared, or when its turn ends: by then the ids it
was fed are known even if the scheduler works one step ahead. Until then it may still turn out to be
one forward too many, whose row is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from agentbench_kv.engines.serving.backend.ledger import Cut
from agentbench_kv.engines.serving.backend.rows import Fed
from agentbench_kv.engines.sglang.backend.book import Session, SessionTable
from agentbench_kv.engines.sglang.backend.compaction import Compactor, shorten
from agentbench_kv.engines.sglang.backend.worker import DecodedRow, PrefilledRows, Worker


class Steps:
    """The life of a turn."""

    def __init__(self, table: SessionTable, worker: Worker, compactor: Compactor) -> None:
        self._table = table
        self._worker = worker
        self._compactor = compactor

    def prefill(self, requests: Sequence[Any]) -> None:
        """Count a prefill that is about to run, and plan which of its queries to keep."""
        fed, parts, recipes, start = [], [], {}, 0
        for request in requests:
            rows = request.extend_input_len
            session = self._table.of(request)
            if session is not None:
                if session.starting is not None:
                    # All of its tokens are prefilled if the session has no rows.
                    total = len(request.origin_input_ids) + len(request.output_ids)
                    session.ledger.begin_turn(session.starting if session.ledger.fed else total)
                    session.starting = None
                tokens = request.fill_ids[len(request.prefix_indices) :]
                fed.append(Fed(session.name, session.ledger.fed, tokens))
                session.ledger.forward(rows)
                self._check(session, request.kv_committed_len)
                row, live = request.req_pool_idx, session.ledger.live
                parts.append(PrefilledRows(session.name, row, start, rows, live))
                recipes[session.name] = session.recipe
                self._worker.deficits[row] = session.ledger.deficit
            start += rows
        self._worker.plan_prefill(fed, parts, recipes)

    def prepare(self, batch: Any) -> None:
        """Settle a decode batch's last forwards and carry out the events that fall due."""
        known = [
            (i, request, session)
            for i, request in enumerate(batch.reqs)
            if (session := self._table.of(request)) is not None
        ]
        self._label([(request, session) for _, request, session in known])
        removed = {}
        for i, request, session in known:
            cut = self._count(session)
            self._check(session, int(batch.seq_lens_cpu[i]), cut)
            if cut is not None:
                removed[i] = self._apply(session, request, cut)
        if removed:
            _shorten_batch(batch, removed)

    def decode(self, requests: Sequence[Any]) -> None:
        """Mark the sessions of a decode forward that is about to run."""
        for request in requests:
            session = self._table.of(request)
            if session is not None:
                session.decoding = True

    def finish(self, cache: Any, request: Any, session: Session, samples: int) -> None:
        """End a turn after `samples` sampled tokens; its session rests with the rows it has."""
        request.output_ids = request.output_ids[:samples]
        cut = self._settle_last(request, session, samples)
        live = session.ledger.live if cut is None else cut.live
        # The last forward may have been one too many.
        cache._free_kv_aligned(request.req_pool_idx, live, request.kv_allocated_len)
        request.kv_committed_len = request.kv_allocated_len = live
        if cut is not None:
            self._apply(session, request, cut)
        last = session.ledger.end_turn()
        if last is not None:
            self._apply(session, request, last)
        self._table.end_turn(session, len(request.origin_input_ids) + samples)

    def finish_alone(self, request: Any, session: Session) -> None:
        """Account for the only turn of a request without a session; its rows are about to go."""
        samples = request.finished_len or len(request.output_ids)
        self._settle_last(request, session, samples)
        session.ledger.end_turn()
        self._table.end_turn(session, len(request.origin_input_ids) + samples)

    def lose(self, session: Session) -> None:
        """Forget a session's rows; they are free or about to be."""
        if session.ledger.fed:
            session.ledger.lose()
        session.decoding = False
        session.parent, session.shared = None, 0
        self._worker.rows.drop(session.name)

    def start_over(self, request: Any, session: Session) -> None:
        """Prepare a running request whose rows were lost for another prefill."""
        done = len(request.output_ids)
        # Working ahead, a sample may be counted whose token is thrown away.
        session.resampling = max(0, session.samples - done)
        session.samples = done
        session.starting = 0

    def _settle_last(self, request: Any, session: Session, samples: int) -> Cut | None:
        """Account for the last forward of a turn unless it was one too many."""
        if session.samples >= samples:
            return None
        self._label([(request, session)])
        return self._count(session)

    def _label(self, pairs: Sequence[tuple[Any, Session]]) -> None:
        """Label what was fed to decode forwards and count them."""
        decoded, recipes = [], {}
        for request, session in pairs:
            if not session.decoding:
                continue
            fed = Fed(session.name, session.ledger.fed, [request.output_ids[session.samples - 1]])
            session.ledger.forward(1)
            session.decoding = False
            decoded.append(DecodedRow(fed, request.req_pool_idx, session.ledger.live))
            recipes[session.name] = session.recipe
        if decoded and self._worker.keeps_queries:
            self._compactor.wait_for_forward()
        self._worker.settle(decoded, recipes)

    def _count(self, session: Session) -> Cut | None:
        """Count the token sampled by a settled forward."""
        session.samples += 1
        if session.resampling:
            session.resampling -= 1
            return None
        return session.ledger.sampled()

    def _apply(self, session: Session, request: Any, cut: Cut) -> int:
        """Carry out an event of a request; return the rows removed."""
        removed = cut.live - cut.keep
        self._compactor.carry_out(session, request.req_pool_idx, cut)
        shorten(request, removed)
        return removed

    def _check(self, session: Session, rows: int, cut: Cut | None = None) -> None:
        """Stop the engine rather than go on with lengths that do not agree."""
        live = session.ledger.live if cut is None else cut.live
        if rows != live:
            raise RuntimeError(
                f"kvbench: session {session.name} has {live} rows, SGLang's batch says {rows}"
            )


def _shorten_batch(batch: Any, removed: dict[int, int]) -> None:
    """Take removed rows off a batch's lengths; a batch worked ahead of shares none in place."""
    taken = torch.zeros_like(batch.seq_lens_cpu)
    for i, rows in removed.items():
        taken[i] = rows
    batch.seq_lens_cpu = batch.seq_lens_cpu - taken
    batch.seq_lens = batch.seq_lens - taken.to(batch.seq_lens.device)
    batch.seq_lens_sum -= int(taken.sum())
