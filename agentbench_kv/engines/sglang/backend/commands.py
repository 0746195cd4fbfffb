"""What the harness may ask of the running server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from agentbench_kv.engines.sglang.backend.book import Session
from agentbench_kv.engines.sglang.backend.compaction import shorten

if TYPE_CHECKING:
    from agentbench_kv.engines.sglang.backend.runtime import Runtime

# Characters a session may grow to; SGLang asks for a limit, ours is the model's context.
CAPACITY = 1 << 40


class Commands:
    """Answers to commands; all run on the scheduler's thread."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def table(self) -> dict[str, Callable[[Mapping[str, Any]], Any]]:
        """Return the commands by name."""
        return {
            "ping": lambda _: True,
            "open": self._open,
            "known": lambda request: self._find(request) is not None,
            "completed": self._completed,
            "reset": self._reset,
            "stats": self._stats,
            "close": self._close,
            "pool": self._pool,
            "configure": self._configure,
            "fork": self._fork,
            "evict_spans": self._evict_spans,
        }

    def _open(self, request: Mapping[str, Any]) -> None:
        from sglang.srt.managers.io_struct import OpenSessionReqInput

        name = request["session"]
        opening = OpenSessionReqInput(capacity_of_str_len=CAPACITY, session_id=name, streaming=True)
        if not self._runtime.scheduler.session_controller.open(opening).success:
            raise ValueError(f"session {name} is open already")
        self._runtime.table.open(name, lasting=True, recipe=request["recipe"])

    def _completed(self, request: Mapping[str, Any]) -> int | None:
        """Return how many tokens a session's completed turns have; None while it generates."""
        session = self._find(request)
        if session is None:
            return 0
        return session.tokens if session.request is None else None

    def _reset(self, request: Mapping[str, Any]) -> None:
        """Forget a session's tokens and rows, but for its accounting."""
        session = self._at_rest(request)
        scheduler = self._runtime.scheduler
        scheduler.tree_cache.release_session(session.name)
        scheduler.session_controller.sessions[session.name].req_nodes.clear()
        session.tokens = 0

    def _stats(self, request: Mapping[str, Any]) -> dict[str, Any] | None:
        session = self._find(request)
        return None if session is None else asdict(session.ledger.snapshot())

    def _close(self, request: Mapping[str, Any]) -> dict[str, Any] | None:
        from sglang.srt.managers.io_struct import AbortReq, CloseSessionReqInput

        session = self._find(request)
        if session is None:
            return None
        scheduler = self._runtime.scheduler
        stats = asdict(session.ledger.snapshot())
        if session.request is not None:
            scheduler.abort_request(AbortReq(rid=session.request.rid))
        scheduler.close_session(CloseSessionReqInput(session_id=session.name))
        return stats

    def _pool(self, request: Mapping[str, Any]) -> dict[str, int]:  # noqa: ARG002
        runtime = self._runtime
        scheduler, memory = runtime.scheduler, runtime.memory
        page = scheduler.page_size
        sessions = runtime.table.sessions.values()
        return {
            "free_blocks": scheduler.token_to_kv_pool_allocator.available_size() // page,
            "total_blocks": scheduler.max_total_num_tokens // page,
            "block_size": page,
            "sessions": len(sessions),
            "resting": sum(session.request is None for session in sessions),
            "running": len(scheduler.running_batch.reqs),
            "waiting": len(scheduler.waiting_queue),
            "preempted": memory.retracted,
            "dropped": memory.drops,
            "fork_shared": runtime.forks.shared,
            "fork_copied": runtime.forks.copied,
        }

    def _configure(self, request: Mapping[str, Any]) -> None:
        """Go on with another method; only while no session is open."""
        runtime = self._runtime
        if runtime.table.sessions:
            raise ValueError(f"{len(runtime.table.sessions)} sessions are open; close them first")
        runtime.configure(runtime.policy.with_method(request["method"]))

    def _fork(self, request: Mapping[str, Any]) -> dict[str, int]:
        return self._runtime.forks.make(self._at_rest(request), request["new"])

    def _evict_spans(self, request: Mapping[str, Any]) -> int:
        """Remove whole tokens of a session at rest; return how many."""
        runtime = self._runtime
        session = self._at_rest(request)
        runtime.forks.check_alone(session)
        slot = runtime.scheduler.tree_cache.slots.get(session.name)
        if slot is None:
            return 0
        cut = runtime.compactor.evict(session, slot.req_pool_idx, request["spans"])
        if cut is None:
            return 0
        shorten(slot, cut.live - cut.keep)
        return cut.live - cut.keep

    def _find(self, request: Mapping[str, Any]) -> Session | None:
        return self._runtime.table.sessions.get(request["session"])

    def _at_rest(self, request: Mapping[str, Any]) -> Session:
        session = self._find(request)
        if session is None:
            raise ValueError(f"there is no session {request['session']}")
        if session.request is not None:
            raise ValueError(f"session {session.name} is generating")
        return session
