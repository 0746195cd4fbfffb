"""What the harness may ask of the running server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from agentbench_kv.engines.sglang.backend.book import Held
from agentbench_kv.engines.sglang.backend.compaction import shorten

if TYPE_CHECKING:
    from agentbench_kv.engines.sglang.backend.runtime import Runtime


CAPACITY = 1 << 40
"""Characters a session may grow to; SGLang asks for a limit, ours is the model's context."""


class Commands:
    """Answers to commands; all run on the scheduler's thread."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def table(self) -> dict[str, Callable[[Mapping[str, Any]], Any]]:
        """Return the commands by name."""
        runtime = self._runtime
        return {
            "ping": lambda _: True,
            "open": self._open,
            "known": lambda request: request["session"] in runtime.book.sessions,
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
        self._runtime.book.open(name, lasting=True, recipe=request["recipe"])

    def _completed(self, request: Mapping[str, Any]) -> int | None:
        """Return how many tokens a session's completed turns have; None while it generates."""
        held = self._runtime.book.sessions.get(request["session"])
        if held is None:
            return 0
        return held.tokens if held.request is None else None

    def _reset(self, request: Mapping[str, Any]) -> None:
        """Forget a session's tokens and rows, but for its accounting."""
        held = self._at_rest(request["session"])
        scheduler = self._runtime.scheduler
        scheduler.tree_cache.release_session(held.name)
        scheduler.session_controller.sessions[held.name].req_nodes.clear()
        held.tokens = 0

    def _stats(self, request: Mapping[str, Any]) -> dict[str, Any] | None:
        held = self._runtime.book.sessions.get(request["session"])
        return None if held is None else asdict(held.ledger.snapshot())

    def _close(self, request: Mapping[str, Any]) -> dict[str, Any] | None:
        from sglang.srt.managers.io_struct import AbortReq, CloseSessionReqInput

        held = self._runtime.book.sessions.get(request["session"])
        if held is None:
            return None
        scheduler = self._runtime.scheduler
        stats = asdict(held.ledger.snapshot())
        if held.request is not None:
            scheduler.abort_request(AbortReq(rid=held.request.rid))
        scheduler.close_session(CloseSessionReqInput(session_id=held.name))
        return stats

    def _pool(self, request: Mapping[str, Any]) -> dict[str, int]:  # noqa: ARG002
        runtime = self._runtime
        scheduler, memory = runtime.scheduler, runtime.memory
        page = scheduler.page_size
        sessions = runtime.book.sessions.values()
        return {
            "free_blocks": scheduler.token_to_kv_pool_allocator.available_size() // page,
            "total_blocks": scheduler.max_total_num_tokens // page,
            "block_size": page,
            "sessions": len(sessions),
            "resting": sum(held.request is None for held in sessions),
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
        if runtime.book.sessions:
            raise ValueError(f"{len(runtime.book.sessions)} sessions are open; close them first")
        runtime.configure(runtime.policy.with_method(request["method"]))

    def _fork(self, request: Mapping[str, Any]) -> dict[str, int]:
        return self._runtime.forks.make(self._at_rest(request["session"]), request["new"])

    def _evict_spans(self, request: Mapping[str, Any]) -> int:
        """Remove whole tokens of a session at rest; return how many."""
        runtime = self._runtime
        held = self._at_rest(request["session"])
        runtime.forks.check_alone(held)
        slot = runtime.scheduler.tree_cache.slots.get(held.name)
        if slot is None:
            return 0
        cut = runtime.compactor.evict(held, slot.req_pool_idx, request["spans"])
        if cut is None:
            return 0
        shorten(slot, cut.live - cut.keep)
        return cut.live - cut.keep

    def _at_rest(self, name: str) -> Held:
        held = self._runtime.book.sessions.get(name)
        if held is None:
            raise ValueError(f"there is no session {name}")
        if held.request is not None:
            raise ValueError(f"session {name} is generating")
        return held
