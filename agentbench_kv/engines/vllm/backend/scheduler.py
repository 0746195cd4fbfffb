"""vLLM's scheduler with sessions that shrink: it decides when and to which length."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.scheduler import Scheduler as BaseScheduler
from vllm.v1.request import RequestStatus

from agentbench_kv.engines.serving.backend.control import ControlServer
from agentbench_kv.engines.serving.backend.orders import Orders
from agentbench_kv.engines.serving.backend.policy import Policy
from agentbench_kv.engines.vllm.backend.blocks import SessionBlocks
from agentbench_kv.engines.vllm.backend.limits import (
    bytes_per_token,
    refuse_unknown,
    refuse_unsupported,
)
from agentbench_kv.engines.vllm.backend.sessions import Held, SessionBook
from agentbench_kv.phases.codec import TokenCodec, load_tokenizer
from agentbench_kv.phases.decoding import StopMatcher

logger = init_logger("vllm.kvbench")


class Scheduler(BaseScheduler):
    """Named on the command line as `--scheduler-cls`.

    Every head of every layer keeps the same number of rows, so lengths are known here before a
    worker has moved anything, and freed blocks are handed out from the next step on. Whatever
    changes state holds the lock, because commands come from another thread.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        refuse_unknown()
        super().__init__(*args, **kwargs)
        self._lock = threading.RLock()
        self._policy = Policy.load()
        refuse_unsupported(self.vllm_config, self.kv_cache_config, self._policy.method)
        self._method_order: dict[str, Any] | None = None
        self._codec: TokenCodec | None = None
        self._preempted = 0
        workers = self.vllm_config.parallel_config.tensor_parallel_size
        size = bytes_per_token(self.kv_cache_config) * workers
        self._book = SessionBook(self._policy.method, size)
        self._book.attach(SessionBlocks(self.kv_cache_manager, self._book.deficits))
        self._allocate = self.kv_cache_manager.allocate_slots
        self.kv_cache_manager.allocate_slots = self._allocate_slots
        self._control = ControlServer(self._policy.control, self._commands())
        logger.info("kvbench: %s, budget %s", self._policy.method.label, self._policy.method.budget)

    def add_request(self, request: Any) -> None:
        """Take a request in; one that goes on with a session starts where that is."""
        with self._lock:
            self._book_in(request)
            super().add_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Plan a step as vLLM does, then the events that fall due with it."""
        with self._lock:
            output = super().schedule(*args, **kwargs)
            output.kvbench = self._orders(output)
            return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Take in what the workers made, and how many rows they moved."""
        with self._lock:
            for outcome in getattr(model_runner_output, "kvbench", ()):
                held = self._book.sessions.get(outcome.session)
                if held is not None:
                    held.ledger.moved(outcome.number, outcome.moved)
            return super().update_from_output(scheduler_output, model_runner_output)

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        """End requests from outside, as when a client hangs up."""
        with self._lock:
            return super().finish_requests(*args, **kwargs)

    def _book_in(self, request: Any) -> None:
        extra = getattr(request.sampling_params, "extra_args", None) or {}
        name = extra.get("kvbench_session") or request.session_id
        held = self._book.sessions.get(name) if name else None
        if held is not None and held.running:
            # Its client hung up, and the abort has not come through yet.
            self.finish_requests(held.request, RequestStatus.FINISHED_ABORTED)
        self._book.begin(request)
        stop = extra.get("kvbench_stop")
        self._book.by_request[request.request_id].stop = self._matcher(stop) if stop else None

    def _orders(self, output: Any) -> Orders:
        """Count the step's tokens and write the workers' orders."""
        book = self._book
        orders = Orders(
            method=self._method_order, dropped=book.dropped.copy(), before=book.before.copy()
        )
        self._method_order = None
        book.dropped.clear()
        book.before.clear()
        for request_id, rows in output.num_scheduled_tokens.items():
            held = book.by_request[request_id]
            orders.sessions[request_id] = (held.name, held.recipe)
            if held.ledger.deficit:
                orders.deficits[request_id] = held.ledger.deficit
            held.ledger.forward(rows)
            if self.requests[request_id].is_prefill_chunk:
                continue
            cut = held.ledger.sampled()
            if cut is not None:
                orders.after[request_id] = book.removal(held, cut)
        return orders

    def _update_request_with_output(
        self, request: Any, new_token_ids: list[int], is_stale: bool = False
    ) -> tuple[list[int], bool]:
        tokens, stopped = super()._update_request_with_output(request, new_token_ids, is_stale)
        held = self._book.by_request.get(request.request_id)
        if stopped or held is None or held.stop is None:
            return tokens, stopped
        if any(held.stop(token) for token in tokens):
            request.status = RequestStatus.FINISHED_STOPPED
            return tokens, True
        return tokens, False

    def _free_request_blocks(self, request: Any) -> None:
        held = self._book.by_request.get(request.request_id)
        if held is None:
            super()._free_request_blocks(request)
        elif request.is_finished() and held.lasting:
            if not held.ledger.fed:
                super()._free_request_blocks(request)
            self._book.rest(held, list(request.all_token_ids))
        else:
            super()._free_request_blocks(request)
            self._release(held, request)

    def _release(self, held: Held, request: Any) -> None:
        """Forget the rows of a request that ended for good, or is put back and starts over."""
        self._book.lose(held)
        if request.is_finished():
            self._book.end(held)
        else:
            self._preempted += 1
            held.ledger.begin_turn(request.num_tokens)

    def _allocate_slots(self, *args: Any, **kwargs: Any) -> Any:
        """Allocate as vLLM does; sessions at rest give way, the longest at rest first."""
        blocks = self._allocate(*args, **kwargs)
        while blocks is None and self._book.lose_oldest():
            blocks = self._allocate(*args, **kwargs)
        return blocks

    def _matcher(self, document: str) -> StopMatcher:
        if self._codec is None:
            self._codec = TokenCodec(load_tokenizer(self._policy.model_path))
        return StopMatcher.from_document(json.loads(document), self._codec)

    def _commands(self) -> dict[str, Any]:
        return {
            "ping": lambda _: True,
            "stats": self._stats,
            "close": self._close,
            "pool": self._pool,
            "configure": self._configure,
        }

    def _stats(self, request: Mapping[str, Any]) -> dict[str, Any] | None:
        with self._lock:
            held = self._book.sessions.get(request["session"])
            return None if held is None else asdict(held.ledger.snapshot())

    def _close(self, request: Mapping[str, Any]) -> dict[str, Any] | None:
        with self._lock:
            held = self._book.sessions.get(request["session"])
            if held is None:
                return None
            if held.running:
                self.finish_requests(held.request, RequestStatus.FINISHED_ABORTED)
            stats = asdict(held.ledger.snapshot())
            self._book.end(held)
            return stats

    def _pool(self, request: Mapping[str, Any]) -> dict[str, int]:  # noqa: ARG002
        with self._lock:
            book = self._book
            return {
                "free_blocks": book.blocks.free,
                "total_blocks": book.blocks.total,
                "block_size": book.blocks.size,
                "blocks_freed": book.blocks.freed,
                "sessions": len(book.sessions),
                "resting": sum(not held.running for held in book.sessions.values()),
                "running": len(self.running),
                "waiting": len(self.waiting),
                "preempted": self._preempted,
                "dropped": book.drops,
                "adopted": book.adoptions,
                "mismatched": book.mismatches,
            }

    def _configure(self, request: Mapping[str, Any]) -> None:
        """Go on with another method; only while no session is open."""
        with self._lock:
            if self._book.sessions:
                raise ValueError(f"{len(self._book.sessions)} sessions are open; close them first")
            self._policy = self._policy.with_method(request["method"])
            self._book.method = self._policy.method
            self._method_order = request["method"]
