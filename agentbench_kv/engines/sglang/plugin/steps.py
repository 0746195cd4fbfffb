"""The life of a turn: what its prefill reads, its decodes, its events, its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from agentbench_kv.engines.core.ledger import Eviction, PrefixEnd
from agentbench_kv.engines.core.rows import Fed
from agentbench_kv.engines.core.transfers import to_device
from agentbench_kv.engines.sglang.plugin.prefixes import SharedPrefixes
from agentbench_kv.engines.sglang.plugin.sessions import SglangSession, SglangSessions
from agentbench_kv.engines.sglang.plugin.versions import Sglang0512
from agentbench_kv.engines.sglang.plugin.worker import (
    Compactor,
    DecodedRow,
    DeviceWorker,
    GivenRow,
    PrefilledRows,
    shorten,
)


class Steps:
    """Follows SGLang's forwards, which it is told of before they run."""

    def __init__(
        self,
        table: SglangSessions,
        worker: DeviceWorker,
        compactor: Compactor,
        prefixes: SharedPrefixes,
        version: Sglang0512,
    ) -> None:
        self._table = table
        self._worker = worker
        self._compactor = compactor
        self._prefixes = prefixes
        self._version = version

    def prefill(self, requests: Sequence[Any]) -> None:
        """Count a prefill that is about to run, and plan which of its queries to keep."""
        fed, parts, prompts, start = [], [], {}, 0
        left: dict[str, PrefixEnd] = {}
        for request in requests:
            tokens = self._version.prefilled(request)
            rows = len(tokens)
            session = self._table.of(request)
            if session is not None:
                if session.starting is not None:
                    # All of its tokens are prefilled if the session has no rows.
                    total = len(request.origin_input_ids) + len(request.output_ids)
                    session.ledger.opens_with(session.prompt.prompt, session.prompt.system)
                    session.ledger.begin_turn(session.starting if session.ledger.fed else total)
                    session.starting = None
                self._prefixes.begin(session)
                held = self._version.rows(request)
                fed.append(Fed(session.name, session.ledger.fed, tokens))
                session.ledger.forward(rows)
                session.drawn = True
                self._check(session, held.kv_committed_len)
                row, live = held.req_pool_idx, session.ledger.live
                parts.append(PrefilledRows(session.name, row, start, rows, live))
                prompts[session.name] = session.prompt
                self._worker.deficits[row] = session.ledger.deficit
                if end := self._prefixes.end(session):
                    left[session.name] = end
            start += rows
        self._worker.plan_prefill(fed, parts, prompts, left)

    def prepare(self, batch: Any) -> None:
        """Settle a decode batch's last forwards and carry out the events that fall due.

        SGLang may prepare a batch and not run it, so there may be nothing new to settle.
        """
        known = [
            (i, request, session)
            for i, request in enumerate(batch.reqs)
            if (session := self._table.of(request)) is not None
        ]
        self._label([(request, session) for _, request, session in known])
        removed = {}
        for i, request, session in known:
            eviction = self._count(session)
            self._check(session, int(batch.seq_lens_cpu[i]), eviction)
            if eviction is not None:
                removed[i] = self._apply(session, request, eviction)
        if removed:
            _shorten_batch(batch, removed)

    def decode(self, requests: Sequence[Any]) -> None:
        """Mark the sessions of a decode forward that is about to run."""
        for request in requests:
            session = self._table.of(request)
            if session is not None:
                session.drawn = session.decoding = True

    def given(self, requests: Sequence[Any]) -> list[GivenRow]:
        """Return which requests of the forward that is about to run are given what they draw."""
        found = []
        for row, request in enumerate(requests):
            session = self._table.of(request)
            # One too many may run behind the last token.
            if session and session.given and session.samples < len(session.given.tokens):
                found.append(GivenRow(row, session.given, session.samples))
        return found

    def finish(self, streaming: Any, request: Any, session: SglangSession, samples: int) -> None:
        """End a turn after `samples` sampled tokens; its session rests with the rows it has."""
        request.output_ids = request.output_ids[:samples]
        eviction = self._settle_last(request, session, samples)
        live = session.ledger.live if eviction is None else eviction.live
        # The last forward may have been one too many.
        self._version.free_behind(streaming, request, live)
        if eviction is not None:
            self._apply(session, request, eviction)
        last = session.ledger.end_turn()
        if last is not None:
            self._apply(session, request, last)
        self._table.end_turn(session, len(request.origin_input_ids) + samples)

    def finish_alone(self, request: Any, session: SglangSession) -> None:
        """Account for the only turn of a request without a session; its rows are about to go."""
        samples = request.finished_len or len(request.output_ids)
        self._settle_last(request, session, samples)
        session.ledger.end_turn()
        self._table.end_turn(session, len(request.origin_input_ids) + samples)

    def lose(self, session: SglangSession) -> None:
        """Forget a session's rows; they are free or about to be."""
        if session.ledger.fed:
            session.ledger.lose()
        session.decoding = False
        self._table.prefixes.give_up(session)
        if session.prefix is not None:
            session.prefix.leave(session.name)
        session.parent, session.prefix, session.shared = None, None, 0
        self._worker.rows.drop(session.name)

    def start_over(self, request: Any, session: SglangSession) -> None:
        """Prepare a running request whose rows were lost for another prefill."""
        done = len(request.output_ids)
        # Working ahead, a sample may be counted whose token is thrown away.
        session.resampling = max(0, session.samples - done)
        session.samples, session.drawn = done, False
        session.starting = 0
        self._table.plan_prefix(session)

    def _settle_last(self, request: Any, session: SglangSession, samples: int) -> Eviction | None:
        if session.samples >= samples:
            return None
        self._label([(request, session)])
        return self._count(session)

    def _label(self, pairs: Sequence[tuple[Any, SglangSession]]) -> None:
        """Label what was fed to decode forwards and count them."""
        decoded = []
        for request, session in pairs:
            if not session.decoding:
                continue
            fed = Fed(session.name, session.ledger.fed, [request.output_ids[session.samples - 1]])
            session.ledger.forward(1)
            session.decoding = False
            row = self._version.rows(request).req_pool_idx
            decoded.append(DecodedRow(fed, row, session.ledger.live))
        if decoded and self._worker.keeps_queries:
            self._worker.wait_for_forward()
        self._worker.settle(decoded)

    def _count(self, session: SglangSession) -> Eviction | None:
        """Count what the last forward draws; return the event that falls due with it."""
        if not session.drawn:
            return None
        session.drawn = False
        session.samples += 1
        if session.resampling:
            session.resampling -= 1
            return None
        return session.ledger.sampled()

    def _apply(self, session: SglangSession, request: Any, eviction: Eviction) -> int:
        """Carry out an event of a request; return the rows removed."""
        removed = eviction.live - eviction.keep
        held = self._version.rows(request)
        self._compactor.carry_out(session, held.req_pool_idx, eviction)
        shorten(held, removed)
        return removed

    def _check(self, session: SglangSession, rows: int, eviction: Eviction | None = None) -> None:
        """Stop the engine rather than go on with lengths that do not agree."""
        live = session.ledger.live if eviction is None else eviction.live
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
    on_device = to_device([removed.get(i, 0) for i in range(len(taken))], batch.seq_lens.device)
    batch.seq_lens = batch.seq_lens - on_device.to(batch.seq_lens.dtype)
    if batch.seq_lens_sum is not None:  # or it is summed up when it is needed
        batch.seq_lens_sum -= int(taken.sum())
