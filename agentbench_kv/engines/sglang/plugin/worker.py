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

from agentbench_kv.engines.core.control import GivenAnswer
from agentbench_kv.engines.core.ledger import Eviction, EvictionOrder, PrefixEnd
from agentbench_kv.engines.core.policy import BackendPolicy
from agentbench_kv.engines.core.rings import (
    RingWrite,
    RowShape,
    queries_reserved,
    refuse_more_queries,
)
from agentbench_kv.engines.core.rows import Fed, PagedStore, WorkerRows
from agentbench_kv.engines.core.transfers import to_device, used_here
from agentbench_kv.engines.sglang.plugin.sessions import SglangSession
from agentbench_kv.kernels.layout import PagedRows
from agentbench_kv.methods.base import Method, QueryKind
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


@dataclass(frozen=True)
class GivenRow:
    """A request of a batch that is given what it draws."""

    row: int  # of the batch
    answer: GivenAnswer
    place: int  # of the token within the answer


def put_given(drawn: Tensor, given: Sequence[GivenRow]) -> Tensor:
    """Return the ids [requests] of a batch with given ones in place of what was drawn.

    What was drawn goes to the answers, still on the device.
    """
    for each in given:
        each.answer.best[each.place] = drawn[each.row]
    tokens = [each.answer.tokens[each.place] for each in given]
    rows = to_device([each.row for each in given], drawn.device)
    return drawn.index_copy(0, rows, to_device(tokens, drawn.device, drawn.dtype))


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
        # Half of the requests run at once (`engine.flags`); the others are sessions at rest.
        self._running = -(-requests // 2)
        self._reserved = self._queries(policy.method)
        self.configure(policy)

    def _queries(self, method: Method) -> int:
        """Return how many queries of a layer there is memory for: in rings, and staged ones."""
        staged = 0 if method.query_plan().kind is QueryKind.NONE else len(self.deficits)
        return queries_reserved(method, self._running) + staged

    def check_memory(self, method: Method) -> None:
        """Refuse, on a GPU, a method that keeps more queries than the first one."""
        if self.shape.device.type != "cpu":
            refuse_more_queries(method, self._queries(method), self._reserved)

    def configure(self, policy: BackendPolicy) -> None:
        self.rows = WorkerRows(policy, self.shape, self._frequencies)
        self.labels = policy.method.compresses
        self.keeps_queries = self.rows.rings.rings > 0 or self.rows.wants_sums
        self.rows.rings.before_moving = self.wait_for_forward
        if self.keeps_queries and self._staged is None:
            shape = self.shape
            size = (shape.layers, len(self.deficits), shape.q_heads, shape.head_dim)
            self._staged = torch.zeros(size, dtype=shape.dtype, device=shape.device)
        if self.shape.device.type != "cpu":
            self.rows.reserve(self._running)

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
        left: Mapping[str, PrefixEnd],
    ) -> None:
        """Label the tokens of a prefill about to run, in which some sessions leave a prefix."""
        if self._write is not None:
            self.check_seen()
        self._parts = _with_ends(fed, parts, left) if self.rows.wants_sums else ()
        write = self.rows.feed(fed, prompts, left) if self.labels else None
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


def _with_ends(
    fed: Sequence[Fed], parts: Sequence[PrefilledRows], left: Mapping[str, PrefixEnd]
) -> list[PrefilledRows]:
    """Return the parts of a prefill, and of the ones that leave a prefix those up to its end."""
    ends = [
        PrefilledRows(end.name, part.row, part.first, end.tokens - own.first_position, end.tokens)
        for own, part in zip(fed, parts, strict=True)
        if (end := left.get(own.session))
    ]
    return [*parts, *ends]


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


def cut_history(history: Any, length: int) -> None:
    """Let an SGLang session's next request follow its first `length` tokens."""
    from sglang.srt.session.session_controller import SessionReqNode

    for node in [*history.req_nodes.values()]:
        request = copy.copy(node.req)
        prompt, asked = len(request.origin_input_ids), request.sampling_params.max_new_tokens
        request.output_ids = request.output_ids[: min(asked, max(0, length - prompt))]
        request.origin_input_ids = request.origin_input_ids[:length]
        request.origin_input_ids_unpadded = request.origin_input_ids_unpadded[:length]
        history.req_nodes = {request.rid: SessionReqNode(request)}
