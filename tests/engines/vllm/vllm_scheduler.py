"""vLLM's scheduler without vLLM, as far as ours is made of it: who runs, waits, is put back.

What it does, and in which order, is that of 0.32.0 and 0.33.0 without connectors, speculation or
asynchronous steps: requests that hold blocks wait in a queue of their own, which comes first; one
that waits is let in if its whole sequence fits; only requests that run are preempted.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from types import ModuleType, SimpleNamespace
from typing import Any

from paged_blocks import BLOCK, Manager, Pool

SAMPLED = 7000  # the first token that a session samples at position 0


class RequestStatus(Enum):
    WAITING = auto()
    PREEMPTED = auto()
    RUNNING = auto()
    FINISHED_STOPPED = auto()
    FINISHED_ABORTED = auto()


@dataclass(eq=False)
class Request:
    """A request as the front end hands it over."""

    request_id: str
    session_id: str | None
    prompt_token_ids: list[int]
    max_tokens: int
    system: int = 0  # tokens of the system message
    skip_reading_prefix_cache: bool = False
    num_computed_tokens: int = 0
    is_prefill_chunk: bool = False
    status: RequestStatus = RequestStatus.WAITING
    outputs: list[int] = field(default_factory=list)

    @property
    def sampling_params(self) -> Any:
        runs = [[3, self.system], [3, len(self.prompt_token_ids)]]
        phases = json.dumps({"runs": runs, "prompt": 0, "system": self.system})
        return SimpleNamespace(extra_args={"kvbench_phases": phases})

    @property
    def all_token_ids(self) -> list[int]:
        return self.prompt_token_ids + self.outputs

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.outputs)

    @property
    def num_output_tokens(self) -> int:
        return len(self.outputs)

    def is_finished(self) -> bool:
        return self.status.value > RequestStatus.RUNNING.value


class Queue(deque[Request]):
    """vLLM's queue, first come, first served."""

    add_request, pop_request = deque.append, deque.popleft
    prepend_request, prepend_requests, remove_request = (
        deque.appendleft, deque.extendleft, deque.remove,
    )  # fmt: skip


class CacheManager:
    """vLLM's manager of one group of layers that look back on everything."""

    def __init__(self, blocks: int) -> None:
        self.block_pool = Pool(blocks)
        self.manager = Manager(self.block_pool)
        self.coordinator = SimpleNamespace(single_type_managers=[self.manager])
        self.watermark_blocks = 0

    def get_computed_blocks(self, _: Request) -> tuple[Any, int, int]:
        return self.create_kv_cache_blocks(((),)), 0, 0

    def create_kv_cache_blocks(self, blocks: Any) -> Any:
        return SimpleNamespace(blocks=blocks)

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: Any = None,
        full_sequence_must_fit: bool = False,
    ) -> Any:
        found = new_computed_blocks.blocks[0] if new_computed_blocks else ()
        computed = request.num_computed_tokens + num_new_computed_tokens
        needed = computed + num_new_tokens
        tokens = request.num_tokens if full_sequence_must_fit else needed
        if self.missing(request, tokens, found, computed) > self.block_pool.get_num_free_blocks():
            return None
        if found:
            self.manager.req_to_blocks.setdefault(request.request_id, [])
            self.manager.add_local_computed_blocks(request.request_id, found, computed, 0)
        self.manager.allocate_new_blocks(request.request_id, needed, needed)
        return self.create_kv_cache_blocks((self.manager.req_to_blocks[request.request_id],))

    def missing(self, request: Request, tokens: int, found: Sequence[Any], computed: int) -> int:
        return self.manager.get_num_blocks_to_allocate(
            request.request_id, tokens, found, computed, computed, tokens
        )

    def free(self, request: Request) -> None:
        self.manager.free(request.request_id)


class Scheduler:
    """vLLM's scheduler."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:
        self.vllm_config, self.kv_cache_config = vllm_config, kv_cache_config
        self.kv_cache_manager = CacheManager(kv_cache_config.num_blocks)
        self.max_num_running_reqs = vllm_config.scheduler_config.max_num_seqs
        self.max_num_scheduled_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self.requests: dict[str, Request] = {}
        self.waiting, self.kv_holding_waiting = Queue(), Queue()
        self.running: list[Request] = []
        self.scheduler_reserve_full_isl = True

    def add_request(self, request: Request) -> None:
        holds = request.num_computed_tokens > 0
        (self.kv_holding_waiting if holds else self.waiting).add_request(request)
        self.requests[request.request_id] = request

    def schedule(self) -> Any:
        self._rows: dict[str, int] = {}
        self._budget = self.max_num_scheduled_tokens
        if not self._schedule_running():
            self._schedule_waiting()
        for name, rows in self._rows.items():
            request = self.requests[name]
            request.num_computed_tokens += rows
            request.is_prefill_chunk = request.num_computed_tokens < request.num_tokens
        return SimpleNamespace(num_scheduled_tokens=self._rows)

    def _schedule_running(self) -> bool:
        """Return whether a request was preempted."""
        preempted, index = False, 0
        while index < len(self.running) and self._budget:
            request = self.running[index]
            rows = min(request.num_tokens - request.num_computed_tokens, self._budget)
            while self.kv_cache_manager.allocate_slots(request, rows) is None:
                preempted = True
                last = self.running.pop()
                self._free_request_blocks(last)
                last.status, last.num_computed_tokens = RequestStatus.PREEMPTED, 0
                self.waiting.prepend_request(last)
                if last is request:
                    return preempted
            self._plan(request, rows)
            index += 1
        return preempted

    def _schedule_waiting(self) -> None:
        skipped: deque[Request] = deque()
        while self._budget and len(self.running) < self.max_num_running_reqs:
            queue = self.kv_holding_waiting or self.waiting
            if not queue:
                break
            request = queue[0]
            if not self._handle_blocked_waiting_request(request):
                skipped.appendleft(queue.pop_request())
                continue
            blocks, found = None, 0
            if not request.num_computed_tokens:
                blocks, found, _ = self.kv_cache_manager.get_computed_blocks(request)
            computed = request.num_computed_tokens + found
            rows = min(request.num_tokens - computed, self._budget)
            made = self.kv_cache_manager.allocate_slots(
                request, rows, num_new_computed_tokens=found, new_computed_blocks=blocks,
                full_sequence_must_fit=True,
            )  # fmt: skip
            if made is None:
                break
            assert queue.pop_request() is request
            self.running.append(request)
            request.status, request.num_computed_tokens = RequestStatus.RUNNING, computed
            self._plan(request, rows)
        self.waiting.prepend_requests(skipped)

    def _plan(self, request: Request, rows: int) -> None:
        assert rows > 0
        self._rows[request.request_id] = rows
        self._budget -= rows

    def update_from_output(self, scheduler_output: Any, _: Any) -> None:
        for name in scheduler_output.num_scheduled_tokens:
            request = self.requests[name]
            if not request.is_prefill_chunk:
                _, stopped = self._update_request_with_output(
                    request, [SAMPLED + request.num_tokens]
                )
                if stopped:
                    self.running.remove(request)
                    self._free_request(request)

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], is_stale: bool = False
    ) -> tuple[list[int], bool]:
        assert not is_stale
        request.outputs += new_token_ids
        if request.num_output_tokens < request.max_tokens:
            return new_token_ids, False
        request.status = RequestStatus.FINISHED_STOPPED
        return new_token_ids, True

    def finish_requests(self, names: str | Iterable[str], status: RequestStatus) -> None:
        for name in [names] if isinstance(names, str) else names:
            request = self.requests[name]
            for queue in (self.running, self.waiting, self.kv_holding_waiting):
                with suppress(ValueError):
                    queue.remove(request)
            request.status = status
            self._free_request(request)

    def _free_request(self, request: Request) -> None:
        self._free_request_blocks(request)
        del self.requests[request.request_id]

    def _free_request_blocks(self, request: Request) -> None:
        self.kv_cache_manager.free(request)

    def _handle_blocked_waiting_request(self, _: Request) -> bool:
        return True

    def _request_remaining_blocks(self, request: Request) -> int:
        done = request.num_computed_tokens
        return self.kv_cache_manager.missing(request, request.num_tokens, (), done)


def scheduler_modules() -> dict[str, ModuleType]:
    """Modules with the names that our scheduler imports from vLLM."""
    found: dict[str, dict[str, Any]] = {
        "vllm.logger": {"init_logger": lambda _: SimpleNamespace(info=lambda *_: None)},
        "vllm.v1.core.sched.scheduler": {"Scheduler": Scheduler},
        "vllm.v1.request": {"RequestStatus": RequestStatus},
    }
    modules = {}
    for name, content in found.items():
        modules[name] = ModuleType(name)
        vars(modules[name]).update(content)
    return modules


__all__ = ["BLOCK", "Request", "RequestStatus", "Scheduler", "scheduler_modules"]
