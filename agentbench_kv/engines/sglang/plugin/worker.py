"""What happens around SGLang's forwards: counting, keeping queries and their phases, evicting.

A decode forward's token is only known when it is over. So every decode forward copies its queries
to one fixed place per request, which a CUDA graph can capture; once the id is known, they go from
there to the ring of their phase. It is settled when the next one is prepared, or when its turn
ends. Until then it may still turn out to be one forward too many, whose row is dropped.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, SupportsInt

import torch
from torch import Tensor

from agentbench_kv.engines.core.ledger import Eviction, EvictionOrder
from agentbench_kv.engines.core.policy import BackendPolicy
from agentbench_kv.engines.core.rings import RingWrite, RowShape
from agentbench_kv.engines.core.rows import Fed, PagedStore, WorkerRows
from agentbench_kv.engines.core.transfers import to_device, used_here
from agentbench_kv.engines.sglang.plugin.sessions import SglangSession, SglangSessions
from agentbench_kv.engines.sglang.plugin.versions import Sglang0512
from agentbench_kv.kernels.layout import PagedRows
from agentbench_kv.methods.spans import SpanRange
from agentbench_kv.phases.machine import PromptPhases


@dataclass(frozen=True)
class Pool:
    """SGLang's cache as the kernels take it."""

    keys: PagedRows
    values: PagedRows
    table: Tensor  # [rows, slots], int32: slots of every request, by its row
    page: int  # slots of a page

    def store(self, row: int, live: int) -> PagedStore:
        """Return the first `live` rows of a request."""
        blocks = (self.table[row, : live : self.page] // self.page).to(torch.int32)
        return PagedStore(self.keys, self.values, blocks, live)

    def keys_of(self, layer: int, row: int, live: int) -> Tensor:
        """Return a copy of one layer's keys [kv_heads, live, head_dim]."""
        slots = self.table[row, :live].long()
        return self.keys.layers[layer][:, slots // self.page, slots % self.page]


@dataclass(frozen=True)
class DecodedRow:
    """A decoded token once it is known: its row in the table, and the rows live with it."""

    fed: Fed
    row: int
    live: int


@dataclass(frozen=True)
class PrefilledRows:
    """A request's part of a prefill: from where in the packed forward, and the rows live after."""

    session: str
    row: int
    first: int
    rows: int
    live: int


class DeviceWorker:
    """What the scheduler's process keeps on the device besides the cache.

    All of it that is large is made before SGLang looks how much memory its cache may take.
    """

    pool: Pool  # once there is one

    def __init__(
        self, policy: BackendPolicy, shape: RowShape, frequencies: Tensor, requests: int
    ) -> None:
        self.shape = shape
        self.forwards: Any = None  # the stream of forwards, if it is not the scheduler's own
        # By a request's row in SGLang's table, of which row 0 is nobody's.
        self.deficits = torch.zeros(requests + 1, dtype=torch.int64, device=shape.device)
        self._frequencies = frequencies
        self._staged: Tensor | None = None
        self._write: RingWrite | None = None
        self._parts: Sequence[PrefilledRows] = ()
        self._seen: set[int] = set()
        self.configure(policy)

    def configure(self, policy: BackendPolicy) -> None:
        self.rows = WorkerRows(policy, self.shape, self._frequencies)
        self.labels = policy.method.compresses
        self.keeps_queries = self.rows.rings.rings > 0 or self.rows.wants_sums
        self.rows.rings.before_growth = self.wait_for_forward
        requests = len(self.deficits) - 1
        if self.keeps_queries and self._staged is None:
            shape = self.shape
            size = (shape.layers, requests + 1, shape.q_heads, shape.head_dim)
            self._staged = torch.zeros(size, dtype=shape.dtype, device=shape.device)
        if self.shape.device.type != "cpu":
            # Half of the requests run at once (`engine.flags`); the others are sessions at rest.
            self.rows.rings.reserve(-(-requests // 2))

    def wait_for_forward(self) -> None:
        """Let what follows on the device wait for the forward that may still run."""
        if self.forwards is not None and torch.cuda.is_available():
            torch.cuda.current_stream().wait_stream(self.forwards)

    def check_seen(self) -> None:
        """Stop the engine if a forward is over of which some layers showed no queries."""
        missing = self.shape.layers - len(self._seen)
        if self.keeps_queries and missing:
            raise RuntimeError(
                f"kvbench: {missing} of {self.shape.layers} attention layers show no queries, so "
                f"{self.rows.policy.method.label} cannot score; use another attention backend "
                "(--engine-arg attention-backend=triton)"
            )

    def plan_prefill(
        self,
        fed: Sequence[Fed],
        parts: Sequence[PrefilledRows],
        prompts: Mapping[str, PromptPhases],
    ) -> None:
        """Label the tokens of a prefill about to run."""
        if self._write is not None:
            self.check_seen()
        self._parts = parts if self.rows.wants_sums else ()
        write = self.rows.feed(fed, prompts) if self.labels else None
        if write is not None and parts[-1].first != sum(part.rows for part in parts[:-1]):
            # Requests that are nobody's turn run along; their rows are not counted in `fed`.
            packed = [row for part in parts for row in range(part.first, part.first + part.rows)]
            write = RingWrite(to_device(packed, self.shape.device)[write.rows], write.slots)
        self._write = write

    def observe(self, layer: int, queries: Tensor, forward: Any) -> None:
        """Keep one layer's queries [packed rows, q_heads, head_dim] of a running forward."""
        self._seen.add(layer)
        if forward.forward_mode.is_decode():
            if self._staged is not None:
                # Rows of a padded batch all go to row 0, which no request has.
                self._staged[layer].index_copy_(0, forward.req_pool_indices, queries)
        elif self._write is not None:
            # Planned on the scheduler's stream, which plans the next ones while this one runs.
            used_here(self._write.rows, self._write.slots)
            self.rows.rings.write(layer, queries.transpose(0, 1), self._write)

    def add_sums(self, layer: int, queries: Tensor) -> None:
        """Add the attention of a prefill's queries, whose keys are in the cache now."""
        for part in self._parts:
            mine = queries[part.first : part.first + part.rows].transpose(0, 1)
            keys = self.pool.keys_of(layer, part.row, part.live)
            self.rows.sums.add(part.session, layer, mine, keys)

    def settle(self, decoded: Sequence[DecodedRow]) -> None:
        """Label decoded tokens and put their staged queries where they belong."""
        if not decoded or not self.labels:
            return
        self.check_seen()
        write = self.rows.feed([each.fed for each in decoded], {})
        if self._staged is None:
            return
        if write is not None:
            rows = to_device([each.row for each in decoded], self.shape.device)
            self.rows.rings.write_all(self._staged[:, rows[write.rows]], write.slots)
        if self.rows.wants_sums:
            for each, layer in itertools.product(decoded, range(self.shape.layers)):
                keys = self.pool.keys_of(layer, each.row, each.live)
                queries = self._staged[layer, each.row, :, None]
                self.rows.sums.add(each.fed.session, layer, queries, keys)


class Compactor:
    """Carries out events."""

    def __init__(self, worker: DeviceWorker, allocator: Any) -> None:
        self._worker = worker
        self._allocator = allocator

    def carry_out(self, session: SglangSession, row: int, eviction: Eviction) -> None:
        self._worker.wait_for_forward()
        self._move(session, row, eviction, self._worker.rows.remove)

    def evict(
        self, session: SglangSession, row: int, spans: Sequence[SpanRange]
    ) -> Eviction | None:
        """Remove whole tokens of a session at rest; None if none of them was there."""
        self._worker.wait_for_forward()
        ledger, rows = session.ledger, self._worker.rows
        kept = rows.outside(session.name, ledger.live, ledger.fed, spans)
        if len(kept) == ledger.live:
            return None
        eviction = ledger.evict(len(kept))
        self._move(session, row, eviction, partial(rows.keep_tokens, kept=kept))
        return eviction

    def cut(self, session: SglangSession, row: int, length: int) -> int:
        """Let go of the rows of logical positions from `length` on; return how many they were."""
        self._worker.wait_for_forward()
        ledger, rows = session.ledger, self._worker.rows
        live = ledger.live
        kept = len(rows.outside(session.name, live, ledger.fed, [(length, ledger.fed)]))
        if not kept:
            raise ValueError(f"no row of session {session.name} lies before {length}; rewind to 0")
        rows.rewind(session.name, length)
        ledger.rewind(length, kept)
        self._worker.deficits[row] = ledger.deficit
        self._free_pages(row, kept, live)
        return live - kept

    def _free_pages(self, row: int, keep: int, live: int) -> None:
        """Free the whole pages behind the first rows."""
        pool = self._worker.pool
        first = -(-keep // pool.page) * pool.page
        if first < live:
            # A copy: SGLang may keep the indices until the end of its step.
            self._allocator.free(pool.table[row, first:live].to(torch.int64))

    def _move(
        self,
        session: SglangSession,
        row: int,
        eviction: Eviction,
        move: Callable[[EvictionOrder, PagedStore], SupportsInt],
    ) -> None:
        """Move the kept rows to the front; free the whole pages behind them."""
        ledger, pool = session.ledger, self._worker.pool
        number = len(ledger.stats.events) - 1
        order = EvictionOrder(session.name, number, eviction, [])
        ledger.moved(number, move(order, pool.store(row, eviction.live)))
        self._worker.deficits[row] = ledger.deficit
        self._free_pages(row, eviction.keep, eviction.live)


def shorten(held: Any, removed: int) -> None:
    """Take removed rows off the lengths that are kept of a request or a session."""
    held.kv_committed_len -= removed
    held.kv_allocated_len -= removed


def cut_history(session: Any, length: int) -> None:
    """Let an SGLang session's next request follow its first `length` tokens."""
    from sglang.srt.session.session_controller import SessionReqNode

    for node in [*session.req_nodes.values()]:
        request = copy.copy(node.req)
        prompt, asked = len(request.origin_input_ids), request.sampling_params.max_new_tokens
        request.output_ids = request.output_ids[: min(asked, max(0, length - prompt))]
        request.origin_input_ids = request.origin_input_ids[:length]
        request.origin_input_ids_unpadded = request.origin_input_ids_unpadded[:length]
        session.req_nodes = {request.rid: SessionReqNode(request)}


class Steps:
    """The life of a turn."""

    def __init__(
        self,
        table: SglangSessions,
        worker: DeviceWorker,
        compactor: Compactor,
        version: Sglang0512,
    ) -> None:
        self._table = table
        self._worker = worker
        self._compactor = compactor
        self._version = version

    def prefill(self, requests: Sequence[Any]) -> None:
        """Count a prefill that is about to run, and plan which of its queries to keep."""
        fed, parts, prompts, start = [], [], {}, 0
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
                held = self._version.rows(request)
                fed.append(Fed(session.name, session.ledger.fed, tokens))
                session.ledger.forward(rows)
                self._check(session, held.kv_committed_len)
                row, live = held.req_pool_idx, session.ledger.live
                parts.append(PrefilledRows(session.name, row, start, rows, live))
                prompts[session.name] = session.prompt
                self._worker.deficits[row] = session.ledger.deficit
            start += rows
        self._worker.plan_prefill(fed, parts, prompts)

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
                session.decoding = True

    def finish(self, cache: Any, request: Any, session: SglangSession, samples: int) -> None:
        """End a turn after `samples` sampled tokens; its session rests with the rows it has."""
        request.output_ids = request.output_ids[:samples]
        eviction = self._settle_last(request, session, samples)
        live = session.ledger.live if eviction is None else eviction.live
        # The last forward may have been one too many.
        self._version.free_behind(cache, request, live)
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
        session.parent, session.shared = None, 0
        self._worker.rows.drop(session.name)

    def start_over(self, request: Any, session: SglangSession) -> None:
        """Prepare a running request whose rows were lost for another prefill."""
        done = len(request.output_ids)
        # Working ahead, a sample may be counted whose token is thrown away.
        session.resampling = max(0, session.samples - done)
        session.samples = done
        session.starting = 0

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
