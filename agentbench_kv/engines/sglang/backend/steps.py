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
from agentbench_kv.engines.sglang.backend.book import Book, Held
from agentbench_kv.engines.sglang.backend.compaction import Compactor, shorten
from agentbench_kv.engines.sglang.backend.worker import DecodedRow, PrefilledRows, Worker


class Steps:
    """The life of a turn."""

    def __init__(self, book: Book, worker: Worker, compactor: Compactor) -> None:
        self._book = book
        self._worker = worker
        self._compactor = compactor

    def prefill(self, requests: Sequence[Any]) -> None:
        """Count a prefill that is about to run, and plan which of its queries to keep."""
        fed, parts, recipes, start = [], [], {}, 0
        for request in requests:
            rows = request.extend_input_len
            held = self._book.of(request)
            if held is not None:
                _begin(held, request)
                tokens = request.fill_ids[len(request.prefix_indices) :]
                fed.append(Fed(held.name, held.ledger.fed, tokens))
                held.ledger.forward(rows)
                self._check(held, request.kv_committed_len)
                row, live = request.req_pool_idx, held.ledger.live
                parts.append(PrefilledRows(held.name, row, start, rows, live))
                recipes[held.name] = held.recipe
                self._worker.deficits[row] = held.ledger.deficit
            start += rows
        self._worker.plan_prefill(fed, parts, recipes)

    def prepare(self, batch: Any) -> None:
        """Settle a decode batch's last forwards and carry out the events that fall due."""
        pairs = [(i, request, self._book.of(request)) for i, request in enumerate(batch.reqs)]
        known = [(i, request, held) for i, request, held in pairs if held is not None]
        self._label([(request, held) for _, request, held in known])
        removed = {}
        for i, request, held in known:
            cut = self._count(held)
            self._check(held, int(batch.seq_lens_cpu[i]), cut)
            if cut is not None:
                removed[i] = self._apply(held, request, cut)
        if removed:
            _shorten_batch(batch, removed)

    def decode(self, requests: Sequence[Any]) -> None:
        """Take note of a decode forward that is about to run."""
        for request in requests:
            held = self._book.of(request)
            if held is not None:
                held.decoding = True

    def finish(self, cache: Any, request: Any, held: Held, samples: int) -> None:
        """End a turn after so many sampled tokens; its session rests with the rows it has."""
        request.output_ids = request.output_ids[:samples]
        cut = self._settle_last(request, held, samples)
        live = held.ledger.live if cut is None else cut.live
        # The last forward may have been one too many.
        cache._free_kv_aligned(request.req_pool_idx, live, request.kv_allocated_len)
        request.kv_committed_len = request.kv_allocated_len = live
        if cut is not None:
            self._apply(held, request, cut)
        last = held.ledger.end_turn()
        if last is not None:
            self._apply(held, request, last)
        self._book.end_turn(held, len(request.origin_input_ids) + samples)

    def finish_alone(self, request: Any, held: Held) -> None:
        """Account for the only turn of a request without a session; its rows are about to go."""
        samples = request.finished_len or len(request.output_ids)
        self._settle_last(request, held, samples)
        held.ledger.end_turn()
        self._book.end_turn(held, len(request.origin_input_ids) + samples)

    def lose(self, held: Held) -> None:
        """Forget a session's rows; they are free or about to be."""
        if held.ledger.fed:
            held.ledger.lose()
        held.decoding = False
        held.parent, held.shared = None, 0
        self._worker.rows.drop(held.name)

    def start_over(self, request: Any, held: Held) -> None:
        """Take note of a running request whose rows were lost."""
        done = len(request.output_ids)
        # Working ahead, a sample may be counted whose token is thrown away.
        held.resampling = max(0, held.samples - done)
        held.samples = done
        held.starting = 0

    def _settle_last(self, request: Any, held: Held, samples: int) -> Cut | None:
        """Account for the last forward of a turn unless it was one too many."""
        if held.samples >= samples:
            return None
        self._label([(request, held)])
        return self._count(held)

    def _label(self, pairs: Sequence[tuple[Any, Held]]) -> None:
        """Label what was fed to decode forwards and count them."""
        decoded, recipes = [], {}
        for request, held in pairs:
            if not held.decoding:
                continue
            fed = Fed(held.name, held.ledger.fed, [request.output_ids[held.samples - 1]])
            held.ledger.forward(1)
            held.decoding = False
            decoded.append(DecodedRow(fed, request.req_pool_idx, held.ledger.live))
            recipes[held.name] = held.recipe
        if decoded and self._worker.keeps_queries:
            self._compactor.wait_for_forward()
        self._worker.settle(decoded, recipes)

    def _count(self, held: Held) -> Cut | None:
        """Count the token sampled by a settled forward."""
        held.samples += 1
        if held.resampling:
            held.resampling -= 1
            return None
        return held.ledger.sampled()

    def _apply(self, held: Held, request: Any, cut: Cut) -> int:
        """Carry out an event of a request; return the rows removed."""
        removed = cut.live - cut.keep
        self._compactor.carry_out(held, request.req_pool_idx, cut)
        shorten(request, removed)
        return removed

    def _check(self, held: Held, rows: int, cut: Cut | None = None) -> None:
        """Stop the engine rather than go on with lengths that do not agree."""
        live = held.ledger.live if cut is None else cut.live
        if rows != live:
            raise RuntimeError(
                f"kvbench: session {held.name} has {live} rows, SGLang's batch says {rows}"
            )


def _begin(held: Held, request: Any) -> None:
    """Count the tokens a turn prefills: all, if the session has no rows."""
    if held.starting is not None:
        total = len(request.origin_input_ids) + len(request.output_ids)
        held.ledger.begin_turn(held.starting if held.ledger.fed else total)
        held.starting = None


def _shorten_batch(batch: Any, removed: dict[int, int]) -> None:
    """Take removed rows off a batch's lengths; a batch worked ahead of shares none in place."""
    taken = torch.zeros_like(batch.seq_lens_cpu)
    for i, rows in removed.items():
        taken[i] = rows
    batch.seq_lens_cpu = batch.seq_lens_cpu - taken
    batch.seq_lens = batch.seq_lens - taken.to(batch.seq_lens.device)
    batch.seq_lens_sum -= int(taken.sum())
