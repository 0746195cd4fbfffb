"""Everything of ours in one scheduler process, put together once SGLang has its memory."""

from __future__ import annotations

from typing import Any

import torch

from agentbench_kv.engines.serving.backend.control import ControlServer
from agentbench_kv.engines.serving.backend.frequencies import rope_frequencies
from agentbench_kv.engines.serving.backend.policy import Policy
from agentbench_kv.engines.serving.backend.rows import RowShape
from agentbench_kv.engines.sglang.backend.admission import Admission
from agentbench_kv.engines.sglang.backend.book import Book
from agentbench_kv.engines.sglang.backend.commands import Commands
from agentbench_kv.engines.sglang.backend.compaction import Compactor
from agentbench_kv.engines.sglang.backend.desk import Desk
from agentbench_kv.engines.sglang.backend.forks import Forks
from agentbench_kv.engines.sglang.backend.limits import refuse_unsupported
from agentbench_kv.engines.sglang.backend.memory import Memory
from agentbench_kv.engines.sglang.backend.steps import Steps
from agentbench_kv.engines.sglang.backend.worker import Pool, Worker
from agentbench_kv.kernels.layout import PagedRows
from agentbench_kv.methods.base import QueryKind
from agentbench_kv.phases.codec import TokenCodec, load_tokenizer
from agentbench_kv.phases.decoding import StopMatcher


class Runtime:
    """Built in two steps, because CUDA graphs are captured before there is a scheduler."""

    def __init__(self, policy: Policy, runner: Any) -> None:
        refuse_unsupported(runner)
        self.policy = policy
        self._codec: TokenCodec | None = None
        args = runner.server_args
        self._captured = args.device == "cuda" and not args.disable_cuda_graph
        shape = _shape(runner)
        frequencies = rope_frequencies(policy.model_path).to(shape.device)
        self.worker = Worker(policy, shape, frequencies, _pool(runner))
        row_bytes = 2 * shape.head_dim * shape.dtype.itemsize
        size = shape.layers * shape.kv_heads * row_bytes
        self.book = Book(policy.method, size, self._matcher)

    def attach(self, scheduler: Any) -> None:
        """Take over a scheduler that is complete."""
        self.scheduler = scheduler
        _unbind_lengths(scheduler)
        forwards = scheduler.forward_stream if scheduler.enable_overlap else None
        allocator = scheduler.token_to_kv_pool_allocator
        self.compactor = Compactor(self.worker, allocator, forwards)
        self.steps = Steps(self.book, self.worker, self.compactor)
        self.memory = Memory(self.book, scheduler)
        self.admission = Admission(self.book)
        self.forks = Forks(self.book, self.worker, self.compactor, scheduler)
        self.desk = Desk(Commands(self).table())
        if scheduler.idle_sleeper is not None:
            scheduler.idle_sleeper.poller.register(self.desk.bell)
        self.control = ControlServer(self.policy.control, self.desk.commands)

    def configure(self, policy: Policy) -> None:
        """Go on with another method."""
        needed = policy.method.query_plan().kind is not QueryKind.NONE
        if self._captured and needed and not self.worker.keeps_queries:
            raise ValueError("CUDA graphs were captured without queries; start the server anew")
        self.policy = policy
        self.book.method = policy.method
        self.worker.configure(policy)

    def _matcher(self, document: dict[str, Any]) -> StopMatcher:
        if self._codec is None:
            self._codec = TokenCodec(load_tokenizer(self.policy.model_path))
        return StopMatcher.from_document(document, self._codec)


def _shape(runner: Any) -> RowShape:
    pool = runner.token_to_kv_pool
    slots = pool.k_buffer[0]
    return RowShape(
        layers=len(pool.k_buffer),
        q_heads=runner.model_config.num_attention_heads,
        kv_heads=slots.shape[1],
        head_dim=slots.shape[2],
        dtype=slots.dtype,
        device=slots.device,
    )


def _pool(runner: Any) -> Pool:
    pool, page = runner.token_to_kv_pool, runner.server_args.page_size
    keys, values = (
        PagedRows.of([slots.unflatten(0, (-1, page)) for slots in buffer], "brhd")
        for buffer in (pool.k_buffer, pool.v_buffer)
    )
    table: torch.Tensor = runner.req_to_token_pool.req_to_token
    return Pool(keys, values, table, page)


def _unbind_lengths(scheduler: Any) -> None:
    """Let logical lengths pass the pool's size: only live rows need room in it."""
    longest = scheduler.model_config.context_len
    scheduler.max_req_len = longest - 1
    scheduler.max_req_input_len = longest
