"""Sessions that start from another one's rows: whole pages are shared, a partial one is copied.

Shared rows belong to one session at a time, so that SGLang's own accounting stays right. If the
owner goes first, it hands them over.
"""

from __future__ import annotations

import copy
from typing import Any

from agentbench_kv.engines.sglang.backend.book import Session, SessionTable
from agentbench_kv.engines.sglang.backend.compaction import Compactor
from agentbench_kv.engines.sglang.backend.worker import Worker


class Forks:
    """Makes forks and keeps their rows apart."""

    def __init__(
        self, table: SessionTable, worker: Worker, compactor: Compactor, scheduler: Any
    ) -> None:
        # Rows that forks found in place, and rows that were copied for them, so far.
        self.shared = self.copied = 0
        self._table = table
        self._worker = worker
        self._compactor = compactor
        self._scheduler = scheduler

    def make(self, source: Session, name: str) -> dict[str, int]:
        """Open a session that has seen what `source`, at rest, has; count shared and copied rows.

        ValueError if the source's rows may move, or there is no room.
        """
        if self._table.method.compresses:
            raise ValueError("a method that evicts by itself would move the shared rows")
        if name in self._table.sessions:
            raise ValueError(f"session {name} is open already")
        cache, page = self._scheduler.tree_cache, self._worker.pool.page
        slot = cache.slots.get(source.name)
        rows = 0 if slot is None else slot.kv_committed_len
        partial = rows % page and self._scheduler.token_to_kv_pool_allocator.available_size() < page
        if partial or not self._scheduler.req_to_token_pool.free_slots:
            raise ValueError("there is no room for another session; close one first")
        self._open_session(source.name, name)
        fork = self._table.open(name, lasting=True, recipe=source.recipe)
        fork.ledger = source.ledger.fork()
        fork.tokens = source.tokens
        if not rows:
            return {"shared": 0, "copied": 0}
        shared = rows // page * page
        self._share(slot.req_pool_idx, name, rows, shared)
        fork.parent, fork.shared = source.name, shared
        self.shared += shared
        self._worker.rows.fork(source.name, name)
        return {"shared": shared, "copied": rows - shared}

    def hand_over(self, owner: Session) -> None:
        """Give an owner's shared rows to a fork before the owner's are freed."""
        forks = sorted(self._table.forks_of(owner), key=lambda fork: fork.shared)
        slot = self._scheduler.tree_cache.slots.get(owner.name)
        if not forks or slot is None:
            return
        heir = forks.pop()
        slot.cache_protected_len = heir.shared
        self._protect(heir, owner.shared)
        heir.parent, heir.shared = owner.parent, owner.shared
        for fork in forks:
            fork.parent = heir.name

    def check_alone(self, session: Session) -> None:
        """Refuse to move rows that another session reads."""
        forks = [fork.name for fork in self._table.forks_of(session)]
        other = session.parent or next(iter(forks), None)
        if other is not None:
            raise ValueError(f"session {session.name} shares rows with {other}; close it first")

    def _open_session(self, source: str, name: str) -> None:
        """Open SGLang's session with the history of another one."""
        from sglang.srt.managers.io_struct import OpenSessionReqInput
        from sglang.srt.session.session_controller import SessionReqNode

        controller = self._scheduler.session_controller
        parent = controller.sessions[source]
        opening = OpenSessionReqInput(
            capacity_of_str_len=parent.capacity_of_str_len, session_id=name, streaming=True
        )
        if not controller.open(opening).success:
            raise ValueError(f"SGLang cannot open session {name}")
        for node in parent.req_nodes.values():
            request = copy.copy(node.req)
            request.session = None
            controller.sessions[name].req_nodes = {request.rid: SessionReqNode(request)}

    def _share(self, source_row: int, name: str, rows: int, shared: int) -> None:
        """Make a slot whose first rows are another one's."""
        from sglang.srt.session.streaming_session import SessionSlot

        requests, table = self._scheduler.req_to_token_pool, self._worker.pool.table
        row = requests.free_slots.pop(0)
        table[row, :shared] = table[source_row, :shared]
        if rows > shared:
            self._copy_tail(source_row, row, rows, shared)
        self._scheduler.tree_cache.slots[name] = SessionSlot(
            req_pool_idx=row,
            kv_committed_len=rows,
            kv_allocated_len=rows,
            cache_protected_len=shared,
        )

    def _copy_tail(self, source_row: int, row: int, rows: int, shared: int) -> None:
        """Copy the rows of a partial page to a page of the fork's own."""
        table, page = self._worker.pool.table, self._worker.pool.page
        slots = self._scheduler.token_to_kv_pool_allocator.alloc(page)
        self._compactor.wait_for_forward()
        new, old = slots[: rows - shared], table[source_row, shared:rows].long()
        table[row, shared:rows] = new.to(table.dtype)
        for each in (self._worker.pool.keys, self._worker.pool.values):
            for layer in each.layers:
                layer[:, new // page, new % page] = layer[:, old // page, old % page]
        self.copied += len(new)

    def _protect(self, fork: Session, rows: int) -> None:
        """Say how many of a fork's first rows are not its own."""
        slot = self._scheduler.tree_cache.slots.get(fork.name)
        if slot is not None:
            slot.cache_protected_len = rows
        if fork.request is not None:
            fork.request.cache_protected_len = rows
