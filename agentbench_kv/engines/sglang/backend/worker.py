"""Rows and queries on the device: staging while a graph may run, rings once a token is known.

Phases follow from ids that are only known when a decode forward is over. So every decode forward
copies its queries to one fixed place per request, which a CUDA graph can capture; once the id is
known, they go from there to the ring of their phase.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from agentbench_kv.engines.queries import RingWrite
from agentbench_kv.engines.serving.backend.policy import Policy
from agentbench_kv.engines.serving.backend.rows import Fed, RowShape, WorkerRows
from agentbench_kv.engines.serving.backend.stores import PagedStore
from agentbench_kv.kernels.layout import PagedRows


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


class Worker:
    """What the scheduler's process keeps on the device besides the cache."""

    def __init__(self, policy: Policy, shape: RowShape, frequencies: Tensor, pool: Pool) -> None:
        self.pool = pool
        self.shape = shape
        self.deficits = torch.zeros(len(pool.table), dtype=torch.int64, device=shape.device)
        self._frequencies = frequencies
        self._staged: Tensor | None = None
        self._write: RingWrite | None = None
        self._parts: Sequence[PrefilledRows] = ()
        self.configure(policy)

    def configure(self, policy: Policy) -> None:
        """Go on with a policy; no session may be open."""
        self.rows = WorkerRows(policy, self.shape, self._frequencies)
        self.labels = policy.method.compresses
        self.keeps_queries = self.rows.rings.rings > 0 or self.rows.wants_sums
        if self.keeps_queries and self._staged is None:
            shape = self.shape
            size = (shape.layers, len(self.pool.table), shape.q_heads, shape.head_dim)
            self._staged = torch.zeros(size, dtype=shape.dtype, device=shape.device)

    def plan_prefill(
        self, fed: Sequence[Fed], parts: Sequence[PrefilledRows], recipes: dict[str, str]
    ) -> None:
        """Label the tokens of a prefill about to run."""
        self._parts = parts if self.rows.wants_sums else ()
        write = self.rows.feed(fed, recipes) if self.labels else None
        if write is not None and parts[-1].first != sum(part.rows for part in parts[:-1]):
            # Requests that are nobody's turn run along; their rows are not counted in `fed`.
            packed = torch.cat([torch.arange(p.first, p.first + p.rows) for p in parts])
            write = RingWrite(packed.to(write.rows.device)[write.rows], write.slots)
        self._write = write

    def observe(self, layer: int, queries: Tensor, forward: Any) -> None:
        """Keep one layer's queries [packed rows, q_heads, head_dim] of a running forward."""
        if forward.forward_mode.is_decode():
            if self._staged is not None:
                # Rows of a padded batch all go to row 0, which no request has.
                self._staged[layer].index_copy_(0, forward.req_pool_indices, queries)
        elif self._write is not None:
            self.rows.rings.write(layer, queries.transpose(0, 1), self._write)

    def add_sums(self, layer: int, queries: Tensor) -> None:
        """Add the attention of a prefill's queries, whose keys are in the cache now."""
        for part in self._parts:
            mine = queries[part.first : part.first + part.rows].transpose(0, 1)
            keys = self.pool.keys_of(layer, part.row, part.live)
            self.rows.sums.add(part.session, layer, mine, keys)

    def settle(self, decoded: Sequence[DecodedRow], recipes: dict[str, str]) -> None:
        """Label decoded tokens and put their staged queries where they belong."""
        if not decoded or not self.labels:
            return
        write = self.rows.feed([each.fed for each in decoded], recipes)
        if self._staged is None:
            return
        if write is not None:
            rows = torch.tensor([each.row for each in decoded], device=self.shape.device)
            self.rows.rings.write_all(self._staged[:, rows[write.rows]], write.slots)
        if self.rows.wants_sums:
            for each, layer in itertools.product(decoded, range(self.shape.layers)):
                keys = self.pool.keys_of(layer, each.row, each.live)
                queries = self._staged[layer, each.row, :, None]
                self.rows.sums.add(each.fed.session, layer, queries, keys)
