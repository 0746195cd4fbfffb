"""Everything of ours in one scheduler process: put together, commanded, refused.

The harness's commands are queued, to run on the scheduler's own thread between two steps.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Any

import torch

from agentbench_kv.engines.core.commands import CommandQueue
from agentbench_kv.engines.core.control import COMMAND_S, ControlServer, Handler, SessionCommands
from agentbench_kv.engines.core.host import refuse_unsupported
from agentbench_kv.engines.core.policy import BackendPolicy, rope_frequencies
from agentbench_kv.engines.core.rings import RowShape
from agentbench_kv.engines.sglang.plugin.memory import Forks, MemoryPressure
from agentbench_kv.engines.sglang.plugin.prefixes import SharedPrefixes
from agentbench_kv.engines.sglang.plugin.sessions import SglangSession, SglangSessions
from agentbench_kv.engines.sglang.plugin.steps import Steps
from agentbench_kv.engines.sglang.plugin.versions import Sglang0512
from agentbench_kv.engines.sglang.plugin.worker import (
    Compactor,
    DeviceWorker,
    Pool,
    cut_history,
    shorten,
)
from agentbench_kv.kernels.layout import PagedRows
from agentbench_kv.methods.base import QueryKind

_REQUESTS = 4096  # the most that SGLang takes if nobody says how many
# Characters a session may grow to; SGLang asks for a limit, ours is the model's context.
CAPACITY = 1 << 40


def refuse_wrong_results(runner: Any, version: Sglang0512) -> None:
    """Refuse options and models that eviction would make wrong."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    args, config, pool = version.options(runner), runner.model_config, runner.token_to_kv_pool
    window = runner.sliding_window_size
    wrong = {
        "the radix cache (--disable-radix-cache is missing)": not args.disable_radix_cache,
        "running without --enable-streaming-session": not args.enable_streaming_session,
        "prefill without chunks": (args.chunked_prefill_size or 0) < 1,
        "parallelism over several GPUs": max(args.tp_size, args.pp_size, args.dp_size) > 1,
        "speculative decoding": args.speculative_algorithm is not None,
        "mixed prefill and decode": args.enable_mixed_chunk,
        "prefill/decode disaggregation": args.disaggregation_mode != "null",
        "hierarchical caches": args.enable_hierarchical_cache or args.enable_hisparse,
        "two-batch overlap": args.enable_two_batch_overlap,
        "CUDA graphs of prefills": version.captures_prefills(args),
        "a quantised KV cache": args.kv_cache_dtype not in ("auto", "bfloat16", "bf16"),
        f"this model's cache ({type(pool).__name__})": type(pool) is not MHATokenToKVPool,
        "a cache that is not laid out by slot": getattr(pool, "kv_cache_layout", "nhd") != "nhd",
        "sliding-window attention": runner.is_hybrid_swa or (window is not None and window > 0),
        "multimodal models": config.is_multimodal or version.has_mrope(runner),
        "encoder-decoder models": config.is_encoder_decoder,
        "attention in chunks": config.attention_chunk_size is not None,
    }
    refuse_unsupported("SGLang", wrong)


class Runtime:
    """Built in three steps: before there is a cache, then a cache, then a scheduler.

    CUDA graphs are captured between the last two.
    """

    def __init__(self, policy: BackendPolicy, runner: Any, version: Sglang0512) -> None:
        self.policy = policy
        self.version = version
        args = version.options(runner)
        self._captured = version.captures_decodes(args)
        shape = planned_shape(runner, version.layers(runner))
        frequencies = rope_frequencies(policy).to(shape.device)
        requests = args.max_running_requests or _REQUESTS
        self.worker = DeviceWorker(policy, shape, frequencies, requests)

    def connect(self, runner: Any) -> None:
        """Take over the cache, once SGLang has made it of the memory that was left."""
        refuse_wrong_results(runner, self.version)
        page = self.version.options(runner).page_size
        pool, shape, policy = _pool(runner, page), _shape(runner), self.policy
        if shape != self.worker.shape or len(pool.table) > len(self.worker.deficits):
            raise ValueError(
                f"kvbench: SGLang's cache is {shape}, {len(pool.table)} requests; expected "
                f"{self.worker.shape}, at most {len(self.worker.deficits)}"
            )
        self.worker.pool = pool
        size, matcher = shape.bytes_per_token, policy.stop_matcher
        self.table = SglangSessions(policy.method, size, page, matcher)

    def attach(self, scheduler: Any) -> None:
        """Take over a scheduler that is complete."""
        self.scheduler = scheduler
        # Logical lengths may pass the pool's size: only live rows need room in it.
        scheduler.max_req_len = scheduler.model_config.context_len - 1
        scheduler.max_req_input_len = scheduler.model_config.context_len
        forwards = scheduler.forward_stream if scheduler.enable_overlap else None
        self.worker.forwards = forwards
        if self._captured:
            self.worker.check_seen()
        self.compactor = Compactor(self.worker, scheduler.token_to_kv_pool_allocator)
        version = self.version
        self.prefixes = SharedPrefixes(self.table, self.worker, scheduler, version)
        self.steps = Steps(self.table, self.worker, self.compactor, self.prefixes, version)
        self.memory = MemoryPressure(self.table, scheduler, version)
        self.forks = Forks(self.table, self.worker, self.compactor, scheduler, version)
        # Readable when a command waits, for a scheduler that sleeps on file descriptors.
        self._bell, ring = os.pipe()
        os.set_blocking(self._bell, False)
        self._commands = CommandQueue(lambda: os.write(ring, b"!"))
        if scheduler.idle_sleeper is not None:
            scheduler.idle_sleeper.poller.register(self._bell)
        handlers = Commands(self).handlers()
        queued = {name: self._queued(handler) for name, handler in handlers.items()}
        self.control = ControlServer(self.policy.control, queued)

    def serve(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._bell, 1 << 16)
        self._commands.run()

    def _queued(self, handler: Handler) -> Handler:
        return lambda request: self._commands.call(lambda: handler(request), COMMAND_S)

    def configure(self, policy: BackendPolicy) -> None:
        """Go on with another method; ValueError, and nothing has changed, if it needs a start.

        CUDA graphs may have been captured without what it needs, and the cache has what is left of
        a GPU's memory.
        """
        needed = policy.method.query_plan().kind is not QueryKind.NONE
        if self._captured and needed and not self.worker.keeps_queries:
            raise ValueError("CUDA graphs were captured without queries; start the server anew")
        self.worker.check_memory(policy.method)
        self.policy = policy
        self.table.method = policy.method
        self.table.prefixes.clear()
        self.worker.configure(policy)


def planned_shape(runner: Any, layers: int) -> RowShape:
    """Return what SGLang's cache will be like, before it is there."""
    config, gpu = runner.model_config, runner.device == "cuda"
    return RowShape(
        layers,
        config.num_attention_heads,
        config.get_num_kv_heads(1),
        config.head_dim,
        runner.kv_cache_dtype,
        torch.device(f"cuda:{runner.gpu_id}" if gpu else runner.device),
    )


def _shape(runner: Any) -> RowShape:
    buffers, q_heads = runner.token_to_kv_pool.k_buffer, runner.model_config.num_attention_heads
    slots = buffers[0]
    _, kv_heads, head_dim = slots.shape
    return RowShape(len(buffers), q_heads, kv_heads, head_dim, slots.dtype, slots.device)


def _pool(runner: Any, page: int) -> Pool:
    kv_pool = runner.token_to_kv_pool
    keys, values = (
        PagedRows.of([slots.unflatten(0, (-1, page)) for slots in buffer], "brhd")
        for buffer in (kv_pool.k_buffer, kv_pool.v_buffer)
    )
    table: torch.Tensor = runner.req_to_token_pool.req_to_token
    return Pool(keys, values, table, page)


class Commands(SessionCommands[SglangSession]):
    """Answers to commands; all run on the scheduler's thread."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime.table.sessions)
        self._runtime = runtime

    def handlers(self) -> dict[str, Handler]:
        return {
            **super().handlers(),
            "open": self._open,
            "known": lambda request: self._find(request) is not None,
            "completed": self._completed,
            "reset": self._reset,
            "fork": self._fork,
            "rewind": self._rewind,
            "evict_spans": self._evict_spans,
        }

    def abort(self, session: SglangSession) -> None:
        from sglang.srt.managers.io_struct import AbortReq

        self._runtime.scheduler.abort_request(AbortReq(rid=session.request.rid))

    def forget(self, session: SglangSession) -> None:
        from sglang.srt.managers.io_struct import CloseSessionReqInput

        self._runtime.scheduler.close_session(CloseSessionReqInput(session_id=session.name))

    def figures(self) -> dict[str, int]:
        runtime, scheduler = self._runtime, self._runtime.scheduler
        page = scheduler.page_size
        return {
            "free_blocks": scheduler.token_to_kv_pool_allocator.available_size() // page,
            "total_blocks": scheduler.max_total_num_tokens // page,
            "block_size": page,
            "running": len(scheduler.running_batch.reqs),
            "waiting": len(scheduler.waiting_queue),
            "preempted": runtime.memory.retracted,
            "dropped": runtime.memory.drops,
            "fork_shared": runtime.forks.shared,
            "fork_copied": runtime.forks.copied,
            "prefix_blocks": runtime.table.prefixes.rows // page,
        }

    def use(self, method: dict[str, Any]) -> None:
        self._runtime.configure(self._runtime.policy.with_method(method))

    def drop_prefixes(self) -> None:
        self._runtime.table.prefixes.drop_unread()

    def _open(self, request: Mapping[str, Any]) -> None:
        from sglang.srt.managers.io_struct import OpenSessionReqInput

        name = request["session"]
        opening = OpenSessionReqInput(capacity_of_str_len=CAPACITY, session_id=name, streaming=True)
        if not self._runtime.scheduler.session_controller.open(opening).success:
            raise ValueError(f"session {name} is open already")
        self._runtime.table.open(name, lasting=True)

    def _completed(self, request: Mapping[str, Any]) -> int | None:
        """Return how many tokens a session's completed turns have; None while it generates."""
        session = self._find(request)
        if session is None:
            return 0
        return None if session.running else session.tokens

    def _reset(self, request: Mapping[str, Any]) -> None:
        """Forget a session's tokens and rows, but for its accounting."""
        session = self._at_rest(request)
        scheduler = self._runtime.scheduler
        scheduler.tree_cache.release_session(session.name)
        scheduler.session_controller.sessions[session.name].req_nodes.clear()
        session.tokens = 0

    def _fork(self, request: Mapping[str, Any]) -> dict[str, int]:
        return self._runtime.forks.make(self._at_rest(request), request["new"])

    def _evict_spans(self, request: Mapping[str, Any]) -> int:
        """Remove whole tokens of a session at rest; return how many."""
        runtime = self._runtime
        session = self._at_rest(request)
        runtime.forks.check_alone(session)
        if session.prefix is not None:
            first = session.prefix.rows
            if any(max(0, start) < min(end, first) for start, end in request["spans"]):
                raise ValueError(f"the first {first} tokens of session {session.name} are shared")
        held = runtime.forks.held(session.name)
        if held is None:
            return 0
        eviction = runtime.compactor.evict(session, held.req_pool_idx, request["spans"])
        if eviction is None:
            return 0
        shorten(held, eviction.live - eviction.keep)
        return eviction.live - eviction.keep

    def _rewind(self, request: Mapping[str, Any]) -> None:
        """Forget the tokens of a session at rest from logical position `length` on."""
        runtime, session, length = self._runtime, self._at_rest(request), request["length"]
        runtime.forks.check_alone(session)
        if session.prefix is not None and length < session.prefix.rows:
            # What comes next would be written into others' pages.
            runtime.scheduler.tree_cache.release_session(session.name)
        held = runtime.forks.held(session.name)
        if not length:
            self._reset(request)
        elif held is not None and length < session.ledger.fed:
            shorten(held, runtime.compactor.cut(session, held.req_pool_idx, length))
        session.ledger.rewind(length, session.ledger.live)
        session.tokens = min(session.tokens, length)
        known = runtime.scheduler.session_controller.sessions[session.name]
        cut_history(known, length)
        runtime.version.rewrite_history(known)

    def _find(self, request: Mapping[str, Any]) -> SglangSession | None:
        return self._runtime.table.sessions.get(request["session"])

    def _at_rest(self, request: Mapping[str, Any]) -> SglangSession:
        session = self._find(request)
        if session is None:
            raise ValueError(f"there is no session {request['session']}")
        if session.running:
            raise ValueError(f"session {session.name} is generating")
        return session
