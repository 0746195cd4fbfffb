"""vLLM's scheduler with sessions that shrink: it decides when and to which length.

Sessions in vLLM's scheduler: which request holds a session's blocks, and what it has seen.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.scheduler import Scheduler as BaseScheduler
from vllm.v1.request import RequestStatus

from agentbench_kv.engines.core.session import Cut, Removal, SessionLedger, StepPlan
from agentbench_kv.engines.serving.plugin import ControlServer, Policy
from agentbench_kv.engines.vllm.plugin.blocks import SessionBlocks
from agentbench_kv.engines.vllm.plugin.launch import (
    bytes_per_token,
    refuse_unknown,
    refuse_unsupported,
)
from agentbench_kv.methods.base import Method
from agentbench_kv.phases.machine import MARKERS
from agentbench_kv.phases.tokens import StopMatcher


@dataclass
class Session:
    """One session, or one request without a session."""

    name: str
    recipe: str
    ledger: SessionLedger
    request: str  # the request that runs, or the one it rested with
    lasting: bool  # it outlives its request; a request without a session id does not
    running: bool = True
    tokens: list[int] = field(default_factory=list)  # at rest: all of them, the last not fed yet
    stop: StopMatcher | None = None


class SessionTable:
    """All sessions of the scheduler, the ones at rest in the order in which they came to it."""

    def __init__(self, method: Method, bytes_per_token: int, blocks: SessionBlocks) -> None:
        self.method = method
        self.blocks = blocks
        self.sessions: OrderedDict[str, Session] = OrderedDict()
        self.by_request: dict[str, Session] = {}
        self.dropped: list[str] = []  # sessions whose rows are gone since the last step
        self.before: list[Removal] = []  # events of sessions at rest, for the next step
        self.drops = 0
        self.adoptions = 0
        self.mismatches = 0
        self._bytes = bytes_per_token

    def find(self, request: Any) -> Session | None:
        """Return the lasting session that a new request belongs to, if it is there."""
        name = _session_name(request)
        return self.sessions.get(name) if name else None

    def begin(self, request: Any) -> Session:
        """Connect a new request with its session; set what is computed of it already."""
        name = _session_name(request)
        session = self.sessions.get(name or request.request_id)
        if session is None:
            session = self._open(name, request)
        prompt, ledger = request.prompt_token_ids, session.ledger
        if ledger.fed and not _goes_on(session, prompt):
            self.mismatches += 1
            self.lose(session)
        elif ledger.fed:
            self._adopt(session, request)
        session.running = True
        session.request = request.request_id
        self.by_request[session.request] = session
        same = prompt[: len(session.tokens)] == session.tokens and ledger.fed > 0
        ledger.begin_turn(len(prompt) - (len(session.tokens) if same else ledger.fed))
        return session

    def rest(self, session: Session, tokens: list[int]) -> None:
        """Keep a session whose request has ended."""
        session.running = False
        session.tokens = tokens
        del self.by_request[session.request]
        self.sessions.move_to_end(session.name)
        cut = session.ledger.end_turn()
        if cut is not None:
            self.before.append(self.removal(session, cut))

    def removal(self, session: Session, cut: Cut) -> Removal:
        """Free the blocks an event leaves empty and describe it for the worker."""
        before = self.blocks.shorten(session.request, cut)
        self.blocks.deficits[session.request] = session.ledger.deficit
        return Removal(session.name, len(session.ledger.stats.events) - 1, cut, before)

    def lose(self, session: Session) -> None:
        """Forget a session's rows; it will be computed again."""
        if not session.running:
            self.blocks.drop(session.request)
        self.blocks.deficits.pop(session.request, None)
        session.ledger.lose()
        session.tokens = []
        self.dropped.append(session.name)
        self.before = [removal for removal in self.before if removal.session != session.name]

    def lose_oldest(self) -> bool:
        """Free the rows of the session longest at rest; False if none holds any."""
        for session in self.sessions.values():
            if not session.running and session.ledger.fed:
                self.lose(session)
                self.drops += 1
                return True
        return False

    def end(self, session: Session) -> None:
        """Forget a session altogether."""
        if session.ledger.fed:
            self.lose(session)
        self.by_request.pop(session.request, None)
        self.blocks.deficits.pop(session.request, None)
        self.sessions.pop(session.name, None)

    def _open(self, name: str | None, request: Any) -> Session:
        recipe = str(extra_arguments(request).get("kvbench_labels") or MARKERS)
        ledger = SessionLedger(self.method, self._bytes)
        number = request.request_id
        session = Session(name or number, recipe, ledger, number, lasting=name is not None)
        self.sessions[session.name] = session
        return session

    def _adopt(self, session: Session, request: Any) -> None:
        """Let a request start where its session is."""
        self.blocks.rename(session.request, request.request_id)
        self.blocks.deficits.pop(session.request, None)
        session.request = request.request_id
        self.blocks.deficits[session.request] = session.ledger.deficit
        request.num_computed_tokens = session.ledger.fed
        self.adoptions += 1


def extra_arguments(request: Any) -> Mapping[str, Any]:
    """Return what the harness sent with a request."""
    return getattr(request.sampling_params, "extra_args", None) or {}


def _session_name(request: Any) -> str | None:
    name: str | None = extra_arguments(request).get("kvbench_session") or request.session_id
    return name


def _goes_on(session: Session, prompt: list[int]) -> bool:
    """Return whether a prompt goes on from a session's rows.

    The last token it sampled was never fed: a client that stopped a step too late for the engine
    leaves it out, and vLLM forgets it when a request is aborted while it runs. Then it does not
    count.
    """
    fed, tokens = session.ledger.fed, session.tokens
    if prompt[:fed] != tokens[:fed] or len(prompt) <= fed:
        return False
    unwanted = len(tokens) <= fed or prompt[fed] != tokens[fed]
    return not unwanted or session.ledger.take_back()


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
        self._new_method: dict[str, Any] | None = None
        self._preempted = 0
        workers = self.vllm_config.parallel_config.tensor_parallel_size
        size = bytes_per_token(self.kv_cache_config) * workers
        blocks = SessionBlocks(self.kv_cache_manager)
        self._session_table = SessionTable(self._policy.method, size, blocks)
        self._allocate = self.kv_cache_manager.allocate_slots
        self.kv_cache_manager.allocate_slots = self._allocate_slots
        commands = {
            "ping": lambda _: True,
            "stats": self._stats,
            "close": self._close,
            "pool": self._pool,
            "configure": self._configure,
        }
        self._control = ControlServer(self._policy.control, commands)
        logger.info("kvbench: %s, budget %s", self._policy.method.label, self._policy.method.budget)

    def add_request(self, request: Any) -> None:
        """Take a request in; one that goes on with a session starts where that is."""
        with self._lock:
            session = self._session_table.find(request)
            if session is not None and session.running:
                # Its client hung up, and the abort has not come through yet.
                self.finish_requests(session.request, RequestStatus.FINISHED_ABORTED)
            session = self._session_table.begin(request)
            stop = extra_arguments(request).get("kvbench_stop")
            session.stop = self._policy.stop_matcher(json.loads(stop)) if stop else None
            super().add_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Plan a step as vLLM does, then the events that fall due with it."""
        with self._lock:
            output = super().schedule(*args, **kwargs)
            output.kvbench = self._step_plan(output)
            return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Take in what the workers made, and how many rows they moved."""
        with self._lock:
            for moved in getattr(model_runner_output, "kvbench", ()):
                session = self._session_table.sessions.get(moved.session)
                if session is not None:
                    session.ledger.moved(moved.number, moved.moved)
            return super().update_from_output(scheduler_output, model_runner_output)

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        """End requests from outside, as when a client hangs up."""
        with self._lock:
            return super().finish_requests(*args, **kwargs)

    def _step_plan(self, output: Any) -> StepPlan:
        """Count the step's tokens and say what the workers are to do."""
        table = self._session_table
        plan = StepPlan(self._new_method, table.dropped.copy(), table.before.copy())
        self._new_method = None
        table.dropped.clear()
        table.before.clear()
        for request_id, rows in output.num_scheduled_tokens.items():
            session = table.by_request[request_id]
            plan.sessions[request_id] = (session.name, session.recipe)
            if session.ledger.deficit:
                plan.deficits[request_id] = session.ledger.deficit
            session.ledger.forward(rows)
            if self.requests[request_id].is_prefill_chunk:
                continue
            cut = session.ledger.sampled()
            if cut is not None:
                plan.after[request_id] = table.removal(session, cut)
        return plan

    def _update_request_with_output(
        self, request: Any, new_token_ids: list[int], is_stale: bool = False
    ) -> tuple[list[int], bool]:
        tokens, stopped = super()._update_request_with_output(request, new_token_ids, is_stale)
        session = self._session_table.by_request.get(request.request_id)
        if stopped or session is None or session.stop is None:
            return tokens, stopped
        if any(session.stop(token) for token in tokens):
            request.status = RequestStatus.FINISHED_STOPPED
            return tokens, True
        return tokens, False

    def _free_request_blocks(self, request: Any) -> None:
        session = self._session_table.by_request.get(request.request_id)
        if session is None:
            super()._free_request_blocks(request)
        elif request.is_finished() and session.lasting:
            if not session.ledger.fed:
                super()._free_request_blocks(request)
            self._session_table.rest(session, list(request.all_token_ids))
        else:
            super()._free_request_blocks(request)
            self._release(session, request)

    def _release(self, session: Session, request: Any) -> None:
        """Forget the rows of a request that ended for good, or is put back and starts over."""
        self._session_table.lose(session)
        if request.is_finished():
            self._session_table.end(session)
        else:
            self._preempted += 1
            session.ledger.begin_turn(request.num_tokens)

    def _allocate_slots(self, *args: Any, **kwargs: Any) -> Any:
        """Allocate as vLLM does; sessions at rest give way, the longest at rest first."""
        blocks = self._allocate(*args, **kwargs)
        while blocks is None and self._session_table.lose_oldest():
            blocks = self._allocate(*args, **kwargs)
        return blocks

    def _stats(self, request: Mapping[str, Any]) -> dict[str, Any] | None:
        with self._lock:
            session = self._session_table.sessions.get(request["session"])
            return None if session is None else asdict(session.ledger.snapshot())

    def _close(self, request: Mapping[str, Any]) -> dict[str, Any] | None:
        with self._lock:
            session = self._session_table.sessions.get(request["session"])
            if session is None:
                return None
            if session.running:
                self.finish_requests(session.request, RequestStatus.FINISHED_ABORTED)
            stats = asdict(session.ledger.snapshot())
            self._session_table.end(session)
            return stats

    def _pool(self, request: Mapping[str, Any]) -> dict[str, int]:  # noqa: ARG002
        with self._lock:
            table = self._session_table
            return {
                "free_blocks": table.blocks.free,
                "total_blocks": table.blocks.total,
                "block_size": table.blocks.size,
                "blocks_freed": table.blocks.freed,
                "sessions": len(table.sessions),
                "resting": sum(not session.running for session in table.sessions.values()),
                "running": len(self.running),
                "waiting": len(self.waiting),
                "preempted": self._preempted,
                "dropped": table.drops,
                "adopted": table.adoptions,
                "mismatched": table.mismatches,
            }

    def _configure(self, request: Mapping[str, Any]) -> None:
        """Go on with another method; only while no session is open."""
        with self._lock:
            if self._session_table.sessions:
                raise ValueError(
                    f"{len(self._session_table.sessions)} sessions are open; close them first"
                )
            self._policy = self._policy.with_method(request["method"])
            self._session_table.method = self._policy.method
            self._new_method = request["method"]
