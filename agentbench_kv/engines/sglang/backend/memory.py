"""Who gives way when SGLang's memory is full: sessions at rest, the longest at rest first."""

from __future__ import annotations

from typing import Any

from agentbench_kv.engines.sglang.backend.book import Session, SessionTable


class Memory:
    """Frees the rows of sessions that do not generate; going on, they are computed again."""

    def __init__(self, table: SessionTable, scheduler: Any) -> None:
        self._table = table
        self._scheduler = scheduler
        self._stuck: str | None = None  # the request that was first in vain
        self.drops = 0
        self.retracted = 0

    def make_room(self, batch: Any) -> None:
        """Free rows until a decode batch fits, as far as there are any."""
        while not batch.check_decode_mem() and self._drop_one():
            pass

    def unblock(self) -> None:
        """Let the first waiting request start if nothing else that runs would ever make room."""
        scheduler = self._scheduler
        busy = scheduler.chunked_req is not None or not scheduler.running_batch.is_empty()
        if busy or not scheduler.waiting_queue or _unfinished(scheduler.last_batch):
            self._stuck = None
            return
        scheduler.running_batch.batch_is_full = False
        first = scheduler.waiting_queue[0]
        # A batch may still be marked as full from before; the second look is meant.
        seen, self._stuck = self._stuck == first.rid, first.rid
        if seen and not self._drop_one():
            self._refuse(first)

    def _drop_one(self) -> bool:
        """Free the rows of one session that does not run; False if there is none."""
        victim = next(iter(self._table.resting()), None) or self._last_waiting()
        if victim is None:
            return False
        self._scheduler.tree_cache.release_session(victim.name)
        if victim.request is not None:
            # It may have been given the row in an earlier attempt to start.
            victim.request.req_pool_idx = None
            victim.request.kv_committed_len = victim.request.kv_allocated_len = 0
        self.drops += 1
        return True

    def _last_waiting(self) -> Session | None:
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
            f"rows needs room for {request.extend_input_len} more and what it generates; lower "
            "--concurrency, the budget or max tokens",
            err_type="CapacityError",
        )
        scheduler.waiting_queue.remove(request)
        abort = AbortReq(finished_reason=reason.to_json(), rid=request.rid)
        scheduler.send_to_tokenizer.send_output(abort, request)
        if session is not None:
            self.release_turn(session)

    def release_turn(self, session: Session) -> None:
        """End a turn that never started; the session is as it was before it."""
        request, session.request = session.request, None
        if request.session is not None:
            request.session.abort_req()
        if not session.lasting:
            self._table.forget(session)


def _unfinished(batch: Any) -> bool:
    """Return whether a batch has requests that go on."""
    return batch is not None and any(not request.finished() for request in batch.reqs)
