"""vLLM's scheduler with sessions that shrink: it decides when and to which length."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from agentbench_kv.engines.core.control import (
    ControlServer,
    GivenAnswer,
    Handler,
    SessionCommands,
)
from agentbench_kv.engines.core.ledger import OwnBest, StepPlan
from agentbench_kv.engines.core.policy import BackendPolicy
from agentbench_kv.engines.core.rings import queries_reserved, refuse_more_queries
from agentbench_kv.engines.vllm.plugin.blocks import SessionBlocks
from agentbench_kv.engines.vllm.plugin.launch import (
    bytes_per_token,
    evicting_group,
    refuse_unknown,
    refuse_wrong_results,
    window_bytes,
)
from agentbench_kv.engines.vllm.plugin.sessions import (
    Forward,
    VllmSession,
    VllmSessions,
    extra_arguments,
)
from agentbench_kv.methods.base import Method

logger = init_logger("vllm.kvbench")


class EvictingScheduler(Scheduler):
    """Named on the command line as `--scheduler-cls`.

    Every head of every layer keeps the same number of rows, so lengths are known here before a
    worker has moved anything, and freed blocks are handed out from the next step on. Whatever
    changes state holds the lock, because commands come from another thread.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        refuse_unknown()
        super().__init__(*args, **kwargs)
        self.lock = threading.RLock()
        self._policy = BackendPolicy.load()
        refuse_wrong_results(self.vllm_config, self.kv_cache_config, self._policy.method)
        self._reserved = self._queries(self._policy.method)
        self._new_method: dict[str, Any] | None = None
        self.preempted = 0
        workers = self.vllm_config.parallel_config.tensor_parallel_size
        evicting = evicting_group(self.kv_cache_config)
        size = bytes_per_token(self.kv_cache_config.kv_cache_groups[evicting]) * workers
        windows = window_bytes(self.kv_cache_config, workers)
        blocks = SessionBlocks(self.kv_cache_manager, evicting)
        self.sessions = VllmSessions(self._policy.method, size, blocks, windows)
        self._allocate = self.kv_cache_manager.allocate_slots
        self.kv_cache_manager.allocate_slots = self._allocate_slots
        self._computed_blocks = self.kv_cache_manager.get_computed_blocks
        self.kv_cache_manager.get_computed_blocks = self._found_blocks
        self._control = ControlServer(self._policy.control, _Commands(self).handlers())
        logger.info("kvbench: %s, budget %s", self._policy.method.label, self._policy.method.budget)

    def add_request(self, request: Any) -> None:
        """Take a request in; one that goes on with a session starts where that is."""
        with self.lock:
            session = self.sessions.find(request)
            if session is not None and session.running:
                # Its client hung up, and the abort has not come through yet.
                self.finish_requests(session.request, RequestStatus.FINISHED_ABORTED)
            session = self.sessions.begin(request)
            stop = extra_arguments(request).get("kvbench_stop")
            session.stop = self._policy.stop_matcher(json.loads(stop)) if stop else None
            given = extra_arguments(request).get("kvbench_given")
            session.given = GivenAnswer(json.loads(given)) if given else None
            super().add_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Plan a step as vLLM does, then the events that fall due with it."""
        with self.lock:
            scheduler_output = super().schedule(*args, **kwargs)
            scheduler_output.kvbench = self._step_plan(scheduler_output)
            return scheduler_output

    def get_grammar_bitmask(self, *args: Any, **kwargs: Any) -> Any:
        """Read the requests as vLLM does: none may be ended meanwhile by a command."""
        with self.lock:
            return super().get_grammar_bitmask(*args, **kwargs)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Take in what the workers made, and what they say of rows and of given tokens."""
        with self.lock:
            for said in getattr(model_runner_output, "kvbench", ()):
                if isinstance(said, OwnBest):
                    self._take_best(said)
                elif session := self.sessions.sessions.get(said.session):
                    session.ledger.moved(said.number, said.moved)
            return super().update_from_output(scheduler_output, model_runner_output)

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        with self.lock:
            return super().finish_requests(*args, **kwargs)

    def use(self, method: dict[str, Any]) -> None:
        """Go on with another method; ValueError, and nothing has changed, if a start refuses it."""
        policy = self._policy.with_method(method)
        refuse_wrong_results(self.vllm_config, self.kv_cache_config, policy.method)
        if not current_platform.is_cpu():
            refuse_more_queries(policy.method, self._queries(policy.method), self._reserved)
        self._policy = policy
        self.sessions.method = policy.method
        self.sessions.prefixes.clear()
        self._new_method = method

    def _queries(self, method: Method) -> int:
        """Return how many queries of a layer every worker reserves memory for."""
        return queries_reserved(method, self.vllm_config.scheduler_config.max_num_seqs)

    def _take_best(self, best: OwnBest) -> None:
        session = self.sessions.by_request.get(best.request)
        if session is not None and session.given is not None:
            session.given.best[self.requests[best.request].num_output_tokens] = best.token

    def _step_plan(self, scheduler_output: Any) -> StepPlan:
        """Count the step's tokens and say what the workers are to do."""
        table = self.sessions
        plan = StepPlan(self._new_method, table.dropped.copy(), before=table.before.copy())
        self._new_method = None
        table.dropped.clear()
        table.before.clear()
        table.plan_prefixes([*self._forwards(scheduler_output)], plan)
        for request_id, rows in scheduler_output.num_scheduled_tokens.items():
            session = table.by_request[request_id]
            plan.sessions[request_id] = session.name
            if not session.workers_know:
                plan.prompts[session.name] = session.prompt
                session.workers_know = True
            if session.ledger.deficit:
                plan.deficits[request_id] = session.ledger.deficit
            session.ledger.forward(rows)
            if self.requests[request_id].is_prefill_chunk:
                continue
            if session.given is not None:
                drawn = self.requests[request_id].num_output_tokens
                plan.given[request_id] = session.given.tokens[drawn]
            eviction = session.ledger.sampled()
            if eviction is not None:
                plan.after[request_id] = table.order(session, eviction)
        plan.given_up = table.given_up.copy()
        table.given_up.clear()
        return plan

    def _forwards(self, scheduler_output: Any) -> Iterator[Forward]:
        for request, rows in scheduler_output.num_scheduled_tokens.items():
            computed = self.requests[request].num_computed_tokens - rows
            yield Forward(self.sessions.by_request[request], computed, rows)

    def _update_request_with_output(
        self, request: Any, new_token_ids: list[int], is_stale: bool = False
    ) -> tuple[list[int], bool]:
        tokens, stopped = super()._update_request_with_output(request, new_token_ids, is_stale)
        session = self.sessions.by_request.get(request.request_id)
        if not stopped and session is not None and session.stop is not None:
            stopped = any(session.stop(token) for token in tokens)
            if stopped:
                request.status = RequestStatus.FINISHED_STOPPED
        return tokens, stopped

    def _free_request_blocks(self, request: Any) -> None:
        session = self.sessions.by_request.get(request.request_id)
        if session is None:
            super()._free_request_blocks(request)
        elif request.is_finished() and session.lasting:
            if not session.ledger.fed:
                super()._free_request_blocks(request)
            self.sessions.rest(session, list(request.all_token_ids))
        else:
            super()._free_request_blocks(request)
            self._release(session, request)

    def _release(self, session: VllmSession, request: Any) -> None:
        """Forget the rows of a request that ended for good, or is put back and starts over."""
        self.sessions.lose(session)
        if request.is_finished():
            self.sessions.end(session)
        else:
            self.preempted += 1
            self.sessions.begin_again(session, list(request.all_token_ids))

    def _handle_blocked_waiting_request(self, request: Any) -> bool:
        ready = super()._handle_blocked_waiting_request(request)
        return ready and self.sessions.may_begin(self.sessions.by_request[request.request_id])

    def _found_blocks(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """Name the blocks of a shared prefix where vLLM looks into its own prefix cache."""
        prefix = self.sessions.found(self.sessions.by_request[request.request_id])
        if prefix is None:
            return self._computed_blocks(request, *args, **kwargs)
        return self.kv_cache_manager.create_kv_cache_blocks((prefix.blocks,)), prefix.rows, 0

    def _allocate_slots(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """Allocate as vLLM does, and make room as long as that fails."""
        blocks = self._allocate(request, *args, **kwargs)
        while blocks is None and self._make_room(request):
            blocks = self._allocate(request, *args, **kwargs)
        return blocks

    def _make_room(self, request: Any) -> bool:
        """Free unread prefixes, then sessions at rest, oldest first, then one that waits.

        Requests that run will make room for one that waits: for that nothing is freed in vain, and
        nobody else who waits gives way. Where nothing runs, nobody but those who wait could.
        """
        held_up = bool(self.running) and request.status != RequestStatus.RUNNING
        # Without a reserve for the whole prompt, its first part may fit where all of it does not.
        whole = held_up and self.scheduler_reserve_full_isl
        if whole and self._missing(request) > self.sessions.could_free(request.request_id):
            return False
        if self.sessions.make_room(request.request_id):
            return True
        return not held_up and self._put_back_last(request)

    def _missing(self, request: Any) -> int:
        """Return how many more blocks must be free before vLLM lets a request in beside others."""
        prefix = self.sessions.found(self.sessions.by_request[request.request_id])
        found = len(prefix.blocks) if prefix else 0
        needed: int = self._request_remaining_blocks(request) - found
        return needed + int(self.kv_cache_manager.watermark_blocks) - self.sessions.blocks.free

    def _put_back_last(self, request: Any) -> bool:
        """Free the rows of the last other request that waits with some; False if none does.

        vLLM lets requests that hold blocks wait, and preempts only those that run.
        """
        others = [each for each in self.kv_holding_waiting if each is not request]
        if not others:
            return False
        last = others[-1]
        session = self.sessions.by_request[last.request_id]
        self.sessions.put_back(session, list(last.all_token_ids))
        last.num_computed_tokens = 0
        self.kv_holding_waiting.remove_request(last)
        self.waiting.prepend_request(last)
        return True


class _Commands(SessionCommands[VllmSession]):
    """Commands come from another thread, so each holds the scheduler's lock."""

    def __init__(self, scheduler: EvictingScheduler) -> None:
        super().__init__(scheduler.sessions.sessions)
        self._scheduler = scheduler

    def handlers(self) -> dict[str, Handler]:
        handlers = super().handlers()
        handlers |= {"rewind": self._rewind, "evict_spans": self._evict_spans}
        return {name: self._locked(handler) for name, handler in handlers.items()}

    def _locked(self, handler: Handler) -> Handler:
        def answer(request: Mapping[str, Any]) -> Any:
            with self._scheduler.lock:
                return handler(request)

        return answer

    def abort(self, session: VllmSession) -> None:
        self._scheduler.finish_requests(session.request, RequestStatus.FINISHED_ABORTED)

    def forget(self, session: VllmSession) -> None:
        self._scheduler.sessions.end(session)

    def figures(self) -> dict[str, int]:
        scheduler, table = self._scheduler, self._scheduler.sessions
        return {
            "free_blocks": table.blocks.free,
            "total_blocks": table.blocks.total,
            "block_size": table.blocks.size,
            "blocks_freed": table.blocks.freed,
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "preempted": scheduler.preempted,
            "dropped": table.drops,
            "adopted": table.adoptions,
            "mismatched": table.mismatches,
            "prefix_blocks": table.prefixes.rows // table.blocks.size,
        }

    def use(self, method: dict[str, Any]) -> None:
        self._scheduler.use(method)

    def drop_prefixes(self) -> None:
        self._scheduler.sessions.prefixes.drop_unread()

    def _rewind(self, request: Mapping[str, Any]) -> None:
        session = self._at_rest(request)
        if session is not None:
            self._scheduler.sessions.rewind(session, request["length"])

    def _evict_spans(self, request: Mapping[str, Any]) -> int:
        session = self._at_rest(request)
        if session is None:
            return 0
        spans = [(start, end) for start, end in request["spans"]]
        return self._scheduler.sessions.evict_spans(session, spans)

    def _at_rest(self, request: Mapping[str, Any]) -> VllmSession | None:
        """Return a session that does not generate; None if nothing of it is here yet."""
        session = self._scheduler.sessions.sessions.get(request["session"])
        if session is not None and session.running:
            # Its client hung up, and the abort has not come through yet.
            self.abort(session)
        return session
