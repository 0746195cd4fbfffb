"""Everything of ours in one scheduler process, put together once SGLang has its memory."""

from __future__ import annotations

from typing import Any

import torch

from agentbench_kv.engines.serving.backend.control import ControlServer
from agentbench_kv.engines.serving.backend.frequencies import rope_frequencies
from agentbench_kv.engines.serving.backend.policy import Policy
from agentbench_kv.engines.serving.backend.rows import RowShape
from agentbench_kv.engines.sglang.backend.book import SessionTable
from agentbench_kv.engines.sglang.backend.commands import Commands
from agentbench_kv.engines.sglang.backend.compaction import Compactor
from agentbench_kv.engines.sglang.backend.desk import CommandQueue
from agentbench_kv.engines.sglang.backend.forks import Forks
from agentbench_kv.engines.sglang.backend.limits import refuse_unsupported
from agentbench_kv.engines.sglang.backend.memory import Memory
from agentbench_kv.engines.sglang.backend.steps import Steps
from agentbench_kv.engines.sglang.backend.worker import Pool, Worker
from agentbench_kv.kernels.layout import PagedRows
from agentbench_kv.methods.base import QueryKind


class Runtime:
    """Built in two steps, because CUDA graphs are captured before there is a scheduler."""

    def __init__(self, policy: Policy, runner: Any) -> None:
        refuse_unsupported(runner)
        self.policy = policy
        args = runner.server_args
        self._captured = args.device == "cuda" and not args.disable_cuda_graph
        shape = _shape(runner)
        frequencies = rope_frequencies(policy.model_path).to(shape.device)
        self.worker = Worker(policy, shape, frequencies, _pool(runner))
        size = 2 * shape.layers * shape.kv_heads * shape.head_dim * shape.dtype.itemsize
        self.table = SessionTable(policy.method, size, policy.stop_matcher)

    def attach(self, scheduler: Any) -> None:
        """Take over a scheduler that is complete."""
        self.scheduler = scheduler
        # Logical lengths may pass the pool's size: only live rows need room in it.
        scheduler.max_req_len = scheduler.model_config.context_len - 1
        scheduler.max_req_input_len = scheduler.model_config.context_len
        forwards = scheduler.forward_stream if scheduler.enable_overlap else None
        allocator = scheduler.token_to_kv_pool_allocator
        self.compactor = Compactor(self.worker, allocator, forwards)
        self.steps = Steps(self.table, self.worker, self.compactor)
        self.memory = Memory(self.table, scheduler)
        self.forks = Forks(self.table, self.worker, self.compactor, scheduler)
        self.commands = CommandQueue(Commands(self).table())
        if scheduler.idle_sleeper is not None:
            scheduler.idle_sleeper.poller.register(self.commands.bell)
        self.control = ControlServer(self.policy.control, self.commands.commands)

    def configure(self, policy: Policy) -> None:
        """Go on with another method; CUDA graphs may have been captured without what it needs."""
        needed = policy.method.query_plan().kind is not QueryKind.NONE
        if self._captured and needed and not self.worker.keeps_queries:
            raise ValueError("CUDA graphs were captured without queries; start the server anew")
        self.policy = policy
        self.table.method = policy.method
        self.worker.configure(policy)


def _shape(runner: Any) -> RowShape:
    buffers, q_heads = runner.token_to_kv_pool.k_buffer, runner.model_config.num_attention_heads
    slots = buffers[0]
    _, kv_heads, head_dim = slots.shape
    return RowShape(len(buffers), q_heads, kv_heads, head_dim, slots.dtype, slots.device)


def _pool(runner: Any) -> Pool:
    pool, page = runner.token_to_kv_pool, runner.server_args.page_size
    keys, values = (
        PagedRows.of([slots.unflatten(0, (-1, page)) for slots in buffer], "brhd")
        for buffer in (pool.k_buffer, pool.v_buffer)
    )
    table: torch.Tensor = runner.req_to_token_pool.req_to_token
    return Pool(keys, values, table, page)
