"""Who may start and who gives way in SGLang's memory, and sessions that share rows.

SGLang reserves room for what a request may still generate. With that, freed memory would never
become concurrency, so its estimates of growth are replaced: a session that evicts grows to its
budget and an interval, not to its end. When memory is full, sessions at rest give way, the longest
at rest first. A fork shares whole pages of its source and copies a partial one. Shared rows belong
to one session at a time, so that SGLang's own accounting stays right; an owner that goes first
hands them over.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from agentbench_kv.engines.sglang.plugin.sessions import SglangSession, SglangSessions
from agentbench_kv.engines.sglang.plugin.versions import Sglang0512
from agentbench_kv.engines.sglang.plugin.worker import Compactor, DeviceWorker

Original = Callable[..., Any]


class MemoryPressure:
    """Frees prefixes that nobody reads, then the rows of sessions that do not generate.

    Going on, these are computed again.
    """

    def __init__(self, table: SglangSessions, scheduler: Any, version: Sglang0512) -> None:
        self._table = table
        self._scheduler = scheduler
        self._version = version
        self._stuck: str | None = None  # the request that was first in vain
        self.drops = 0
        self.retracted = 0

    def make_room(self, batch: Any) -> None:
        while not batch.check_decode_mem() and self._drop_one():
            pass

    def has_row(self, promised: int = 0) -> bool:
        """Whether a row of the request table is free beside the promised ones, or can be freed.

        Sessions at rest keep theirs, and so do prefixes. Without a free one SGLang lets nobody
        begin (0.5.23), or ends (0.5.12).
        """
        free = self._scheduler.req_to_token_pool.free_slots
        while len(free) <= promised:
            if not self._drop_resting():
                return False
            free = self._scheduler.req_to_token_pool.free_slots
        return True

    def unblock(self, running_batch: Any) -> None:
        """Let the first waiting request start if nothing else that runs would ever make room."""
        scheduler = self._scheduler
        busy = scheduler.chunked_req is not None or not running_batch.is_empty()
        if busy or not scheduler.waiting_queue or _unfinished(scheduler.last_batch):
            self._stuck = None
            return
        running_batch.batch_is_full = False
        first = scheduler.waiting_queue[0]
        # A batch may still be marked as full from before; the second look is meant.
        seen, self._stuck = self._stuck == first.rid, first.rid
        if seen and not self._drop_one():
            self._refuse(first)

    def _drop_one(self) -> bool:
        """Free an unread prefix, or the rows of a session that does not run; False if none is."""
        if self._drop_resting():
            return True
        victim = self._last_waiting()
        if victim is None:
            return False
        self._release(victim)
        # It may have been given the row in an earlier attempt to start.
        self._version.forget_rows(victim.request)
        self._table.plan_prefix(victim)
        return True

    def _drop_resting(self) -> bool:
        """Free an unread prefix, or the rows of the session longest at rest; False if none is."""
        first = next(iter(self._scheduler.waiting_queue), None)
        beginning = None if first is None else self._table.of(first)
        if self._table.prefixes.make_room(None if beginning is None else beginning.prefix_key):
            return True
        victim = next(iter(self._table.resting()), None)
        if victim is None:
            return False
        self._release(victim)
        return True

    def _release(self, session: SglangSession) -> None:
        self._scheduler.tree_cache.release_session(session.name)
        self.drops += 1

    def _last_waiting(self) -> SglangSession | None:
        """Return the last session in the queue that holds rows, but for the first in it."""
        for request in reversed(self._scheduler.waiting_queue[1:]):
            session = self._table.of(request)
            if session is not None and session.lasting and session.ledger.fed:
                return session
        return None

    def _refuse(self, request: Any) -> None:
        """Fail a request that does not fit into an empty cache."""
        from sglang.srt.managers.io_struct import AbortReq
        from sglang.srt.managers.schedule_batch import FINISH_ABORT

        scheduler = self._scheduler
        session = self._table.of(request)
        rows = session.ledger.live if session is not None else 0
        reason = FINISH_ABORT(
            f"the KV cache holds {scheduler.max_total_num_tokens} tokens; a session with {rows} "
            f"rows needs room for {self._version.uncached(request)} more and what it generates; "
            "lower --concurrency, the budget or max tokens",
            err_type="CapacityError",
        )
        scheduler.waiting_queue.remove(request)
        abort = AbortReq(finished_reason=reason.to_json(), rid=request.rid)
        self._version.send_abort(scheduler, abort, request)
        if session is not None:
            self.release_turn(session)

    def release_turn(self, session: SglangSession) -> None:
        """End a turn that never started; the session is as it was before it."""
        request, session.request = session.request, None
        if request.session is not None:
            request.session.abort_req()
        if not session.lasting:
            self._table.forget(session)


def _unfinished(batch: Any) -> bool:
    return batch is not None and any(not request.finished() for request in batch.reqs)


def add_one_req(
    table: SglangSessions,
    original: Original,
    adder: Any,
    request: Any,
    uncached: int,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Admit as SGLang does for requests that may end early, with our bound on their growth.

    Its other path, for `ignore_eos`, counts logical lengths and cuts the chunks of a session's
    later turns in the wrong place.
    """
    sampling = request.sampling_params
    asked = sampling.ignore_eos, sampling.max_new_tokens
    session = table.of(request)
    sampling.ignore_eos = False
    if session is not None:
        growth = _growth(session, request, uncached)
        sampling.max_new_tokens = len(request.output_ids) + growth
    try:
        return original(adder, request, *args, **kwargs)
    finally:
        sampling.ignore_eos, sampling.max_new_tokens = asked


def running_growth(table: SglangSessions, original: Original, adder: Any, request: Any) -> float:
    """Return the tokens a running request may still add."""
    session, sampling = table.of(request), request.sampling_params
    asked, sampling.ignore_eos = sampling.ignore_eos, False  # it may end early, as above
    try:
        estimate: float = original(adder, request)
    finally:
        sampling.ignore_eos = asked
    return estimate if session is None else min(estimate, _growth(session, request, 0))


def _growth(session: SglangSession, request: Any, pending: int) -> int:
    """Return how many rows may be added to those there are and `pending` ones."""
    ledger = session.ledger
    left: int = max(0, request.sampling_params.max_new_tokens - len(request.output_ids))
    if not ledger.live:
        pending += session.shared  # of a prefix, which it will find
    return ledger.rows_needed(pending, left) - ledger.live - pending


class Forks:
    """Makes forks and keeps their rows apart."""

    def __init__(
        self,
        table: SglangSessions,
        worker: DeviceWorker,
        compactor: Compactor,
        scheduler: Any,
        version: Sglang0512,
    ) -> None:
        # Rows that forks found in place, and rows that were copied for them, so far.
        self.shared = self.copied = 0
        self._table = table
        self._worker = worker
        self._compactor = compactor
        self._scheduler = scheduler
        self._version = version

    def make(self, source: SglangSession, name: str) -> dict[str, int]:
        """Open a session that has seen what `source`, at rest, has; count shared and copied rows.

        ValueError if the source's rows may move, or there is no room.
        """
        if self._table.method.compresses:
            raise ValueError("a method that evicts by itself would move the shared rows")
        if name in self._table.sessions:
            raise ValueError(f"session {name} is open already")
        held, page = self.held(source.name), self._worker.pool.page
        rows = 0 if held is None else held.kv_committed_len
        partial = rows % page and self._scheduler.token_to_kv_pool_allocator.available_size() < page
        if partial or not self._scheduler.req_to_token_pool.free_slots:
            raise ValueError("there is no room for another session; close one first")
        self._open_session(source.name, name)
        fork = self._table.open(name, lasting=True)
        fork.ledger = source.ledger.fork()
        fork.tokens = source.tokens
        if held is None or not rows:
            return {"shared": 0, "copied": 0}
        shared = rows // page * page
        self._share(held.req_pool_idx, name, rows, shared)
        if source.prefix is not None:
            source.prefix.join(fork.name)
        fork.parent, fork.prefix, fork.shared = source.name, source.prefix, shared
        self.shared += shared
        self._worker.rows.fork(source.name, name)
        return {"shared": shared, "copied": rows - shared}

    def hand_over(self, owner: SglangSession) -> None:
        """Give an owner's shared rows to a fork before the owner's are freed."""
        forks = sorted(self._table.forks_of(owner), key=lambda fork: fork.shared)
        held = self.held(owner.name)
        if not forks or held is None:
            return
        heir = forks.pop()
        held.cache_protected_len = heir.shared
        self._protect(heir, owner.shared)
        heir.parent, heir.shared = owner.parent, owner.shared
        for fork in forks:
            fork.parent = heir.name

    def check_alone(self, session: SglangSession) -> None:
        """Refuse to move rows that another session reads."""
        forks = [fork.name for fork in self._table.forks_of(session)]
        other = session.parent or next(iter(forks), None)
        if other is not None:
            raise ValueError(f"session {session.name} shares rows with {other}; close it first")

    def held(self, name: str) -> Any:
        """Return the row and the lengths of a session's slot; None without a slot."""
        slot = self._version.sessions(self._scheduler.tree_cache).slots.get(name)
        return None if slot is None else self._version.rows(slot)

    def _open_session(self, source: str, name: str) -> None:
        from sglang.srt.managers.io_struct import OpenSessionReqInput
        from sglang.srt.session.session_controller import SessionReqNode

        controller = self._scheduler.session_controller
        history = controller.sessions[source]
        opening = OpenSessionReqInput(
            capacity_of_str_len=history.capacity_of_str_len, session_id=name, streaming=True
        )
        if not controller.open(opening).success:
            raise ValueError(f"SGLang cannot open session {name}")
        for node in history.req_nodes.values():
            request = copy.copy(node.req)
            request.session = None
            # SGLang may append a session's next turn to the arrays of its last one.
            request.origin_input_ids = request.origin_input_ids[:]
            request.origin_input_ids_unpadded = request.origin_input_ids_unpadded[:]
            controller.sessions[name].req_nodes = {request.rid: SessionReqNode(request)}

    def _share(self, source_row: int, name: str, rows: int, shared: int) -> None:
        """Make a slot whose first rows are another one's."""
        requests, table = self._scheduler.req_to_token_pool, self._worker.pool.table
        row = self._version.take_row(requests)
        table[row, :shared] = table[source_row, :shared]
        if rows > shared:
            self._copy_tail(source_row, row, rows, shared)
        slots = self._version.sessions(self._scheduler.tree_cache).slots
        slots[name] = self._version.slot(row, rows, shared)

    def _copy_tail(self, source_row: int, row: int, rows: int, shared: int) -> None:
        table, page = self._worker.pool.table, self._worker.pool.page
        slots = self._scheduler.token_to_kv_pool_allocator.alloc(page)
        self._worker.wait_for_forward()
        new, old = slots[: rows - shared], table[source_row, shared:rows].long()
        table[row, shared:rows] = new.to(table.dtype)
        for each in (self._worker.pool.keys, self._worker.pool.values):
            for layer in each.layers:
                layer[:, new // page, new % page] = layer[:, old // page, old % page]
        self.copied += len(new)

    def _protect(self, fork: SglangSession, rows: int) -> None:
        """Say how many of a fork's first rows are not its own."""
        held = self.held(fork.name)
        if held is not None:
            held.cache_protected_len = rows
        if fork.request is not None:
            self._version.rows(fork.request).cache_protected_len = rows
