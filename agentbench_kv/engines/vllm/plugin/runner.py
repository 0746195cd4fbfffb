"""vLLM's worker and its model runner, evicting.

Physical lengths go into a forward, its queries come out, rows move between forwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.platforms import current_platform

from agentbench_kv.engines.core.ledger import EvictionOrder, OwnBest, Rewind, RowsMoved, StepPlan
from agentbench_kv.engines.core.policy import BackendPolicy, rope_frequencies
from agentbench_kv.engines.core.rings import RowShape
from agentbench_kv.engines.core.rows import Fed, RowStore, WorkerRows
from agentbench_kv.engines.core.transfers import Arriving, to_device
from agentbench_kv.engines.vllm.plugin.attention import CAPTURE, LOGICAL, CapturingImpl
from agentbench_kv.engines.vllm.plugin.blocks import PackedStore, paged_rows, paged_store
from agentbench_kv.engines.vllm.plugin.launch import (
    attention_of,
    evicting_group,
    refuse_wrong_results,
    register,
)
from agentbench_kv.kernels.layout import PagedRows

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner as BaseRunner
    from vllm.v1.worker.cpu_worker import CPUWorker as BaseWorker
else:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as BaseRunner
    from vllm.v1.worker.gpu_worker import Worker as BaseWorker


@dataclass(frozen=True)
class SummedPart:
    """A session's part of a step whose attention is added up."""

    first: int  # row of the packed step
    # Whose sums: the session's, and those of a prefix that it leaves. Rows fed, and rows then live.
    ends: Sequence[tuple[str, int, int]]
    store: RowStore


class EvictingRunner(BaseRunner):
    """The platform's V1 model runner, evicting.

    RoPE goes by logical positions, memory and attention by physical lengths; the difference comes
    with each step's `StepPlan`. Layers with a window evict nothing and go by logical lengths.
    """

    _kvbench_layers: list[Any]  # vLLM's attention layers that evict, in order
    _kvbench_rows: WorkerRows
    _kvbench_moved: list[tuple[EvictionOrder, Arriving]]
    _kvbench_best: tuple[list[str], Arriving] | None = None  # requests, and what they would draw

    def profile_run(self, *args: Any, **kwargs: Any) -> None:
        """Take the memory of queries first, so that vLLM's cache takes what is left."""
        if self.device.type != "cpu":
            self._kvbench_connect(BackendPolicy.load(), self._kvbench_planned())
        super().profile_run(*args, **kwargs)

    def initialize_kv_cache(
        self, kv_cache_config: Any, *args: Any, is_profiling: bool = False, **kwargs: Any
    ) -> None:
        """Allocate the cache, then find its layers; graphs are captured after this."""
        LOGICAL.allocate(self.seq_lens)
        if is_profiling:  # a cache of a few blocks, which is gone before there is the real one
            super().initialize_kv_cache(kv_cache_config, *args, is_profiling=True, **kwargs)
            return
        known: WorkerRows | None = getattr(self, "_kvbench_rows", None)
        policy = BackendPolicy.load() if known is None else known.policy
        # The scheduler would refuse the same, but comes later.
        refuse_wrong_results(self.vllm_config, kv_cache_config, policy.method)
        super().initialize_kv_cache(kv_cache_config, *args, **kwargs)
        found = self.compilation_config.static_forward_context
        groups = self.kv_cache_config.kv_cache_groups
        if len(groups) > 1:  # a window's lengths are logical, also where spans are evicted on order
            refuse_foreign([found[name] for group in groups for name in group.layer_names])
        names = groups[self._kvbench_group].layer_names
        self._kvbench_connect(policy, [found[name] for name in names])
        if self.device.type != "cpu":
            _ = self._kvbench_pages  # not in a step, as describing a cache may wait for the GPU

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Run one step between what is due before it and what is due after it."""
        plan: StepPlan | None = getattr(scheduler_output, "kvbench", None)
        self._kvbench_plan = plan or StepPlan()
        if plan is None:
            return super().execute_model(scheduler_output, *args, **kwargs)
        if plan.method is not None:
            policy = self._kvbench_rows.policy.with_method(plan.method)
            self._kvbench_connect(policy, self._kvbench_layers)
        for session in plan.dropped:
            self._kvbench_rows.drop(session)
        for session, prefix in plan.begun.items():
            self._kvbench_rows.fork(prefix, session)
        for each in plan.before:
            if isinstance(each, Rewind):
                self._kvbench_rows.rewind(each.session, each.length)
            else:
                self._kvbench_remove(each)
        output = super().execute_model(scheduler_output, *args, **kwargs)
        LOGICAL.end()
        if scheduler_output.total_num_scheduled_tokens:
            CAPTURE.finish()
            for request, order in plan.after.items():
                self._kvbench_remove(order)
                self._kvbench_shorten(request, order)
        for prefix in plan.given_up:
            self._kvbench_rows.drop(prefix)
        return output

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        output = super().sample_tokens(*args, **kwargs)
        # vLLM has waited for the tokens: numbers that were sent before them are here, too.
        said = self._kvbench_said()
        if said and hasattr(output, "sampled_token_ids"):
            # A copy: vLLM shares one empty output between steps.
            output = replace(output)
            output.kvbench = said
        return output

    def _kvbench_said(self) -> list[RowsMoved | OwnBest]:
        """Return what the scheduler is to know of the step."""
        moved, self._kvbench_moved = self._kvbench_moved, []
        said: list[RowsMoved | OwnBest] = [
            RowsMoved(order.session, order.number, int(rows)) for order, rows in moved
        ]
        if self._kvbench_best is not None:
            requests, tokens = self._kvbench_best
            said += map(OwnBest, requests, tokens.tolist())
            self._kvbench_best = None
        return said

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        """Draw as vLLM does, and put given tokens in the place of what was drawn."""
        output = super()._sample(*args, **kwargs)
        given, batch = self._kvbench_plan.given, self.input_batch
        if given:
            requests = batch.req_ids[: batch.num_reqs]
            rows = [row for row, request in enumerate(requests) if request in given]
            mine = [requests[row] for row in rows]
            drawn = output.sampled_token_ids  # [requests, 1]
            at = to_device(rows, drawn.device)
            self._kvbench_best = mine, Arriving(drawn[at, 0])
            tokens = [given[request] for request in mine]
            drawn[at, 0] = to_device(tokens, drawn.device, drawn.dtype)
        return output

    def _prepare_inputs(self, scheduler_output: Any, num_scheduled: Any) -> Any:
        prepared = super()._prepare_inputs(scheduler_output, num_scheduled)
        plan: StepPlan | None = getattr(scheduler_output, "kvbench", None)
        if plan is not None:
            self._kvbench_feed(plan, num_scheduled)
            if plan.deficits:
                self._kvbench_shift(plan, num_scheduled)
        return prepared

    def _kvbench_shift(self, plan: StepPlan, num_scheduled: Any) -> None:
        """Make lengths and slots physical, and positions too where they are the cache's."""
        count = self.input_batch.num_reqs
        requests = self.input_batch.req_ids[:count]
        missing = np.array([plan.deficits.get(request, 0) for request in requests])
        LOGICAL.begin(self.seq_lens, self.optimistic_seq_lens_cpu)
        self.seq_lens[:count] -= to_device(missing, self.seq_lens.device, self.seq_lens.dtype)
        on_cpu = self.optimistic_seq_lens_cpu
        if on_cpu.data_ptr() != self.seq_lens.data_ptr():
            on_cpu[:count] -= torch.from_numpy(missing).to(on_cpu.dtype)
        rows = to_device(np.repeat(missing, num_scheduled), self.positions.device)
        physical = self.positions[: len(rows)] - rows
        self._kvbench_table.compute_slot_mapping(
            count, self.query_start_loc.gpu[: count + 1], physical
        )
        if self._kvbench_rows.cache_positions:
            self.positions[: len(rows)] = physical

    def _kvbench_feed(self, plan: StepPlan, num_scheduled: Any) -> None:
        """Label the step's tokens and tell the attention layers which queries to keep."""
        batch = self.input_batch
        fed: list[Fed] = []
        for row, request in enumerate(batch.req_ids[: batch.num_reqs]):
            first = int(batch.num_computed_tokens_cpu[row])
            tokens = batch.token_ids_cpu[row, first : first + int(num_scheduled[row])].tolist()
            fed.append(Fed(plan.sessions[request], first, tokens))
        if self._kvbench_rows.wants_sums:
            self._kvbench_parts = [*self._kvbench_summed(plan, fed)]
        write = self._kvbench_rows.feed(fed, plan.prompts, plan.left)
        CAPTURE.begin(write, int(num_scheduled.sum()))

    def _kvbench_remove(self, order: EvictionOrder) -> None:
        store = self._kvbench_store(order.blocks, order.eviction.live)
        moved = self._kvbench_rows.remove(order, store)
        self._kvbench_moved.append((order, Arriving(moved)))

    def _kvbench_shorten(self, request: str, order: EvictionOrder) -> None:
        """Forget the blocks a running request gave back."""
        size = self._kvbench_caches[0].shape[2]
        kept = order.blocks[: -(-order.eviction.keep // size)]
        state = self.requests[request]
        state.block_ids[self._kvbench_group][:] = kept
        row = self.input_batch.req_id_to_index.get(request)
        if row is not None:
            self._kvbench_table.add_row(kept, row)

    def _kvbench_summed(self, plan: StepPlan, fed: Sequence[Fed]) -> Iterator[SummedPart]:
        """Describe a step's parts, in the order of its rows, for `_kvbench_sum`."""
        first = 0
        for part, request in zip(fed, self.input_batch.req_ids, strict=False):
            live = part.first_position + len(part.tokens) - plan.deficits.get(request, 0)
            ends = [(part.session, len(part.tokens), live)]
            if end := plan.left.get(part.session):
                ends.append((end.name, end.tokens - part.first_position, end.tokens))
            state = self.requests[request]
            blocks = state.block_ids[self._kvbench_group]
            yield SummedPart(first, ends, self._kvbench_store(blocks, live))
            first += len(part.tokens)

    def _kvbench_sum(self, layer: int, queries: Tensor) -> None:
        """Add up what one layer's queries [rows, q_heads, head_dim] of this step attend to.

        As the layer runs, or from the buffers: so one layer's queries and keys are held at a time.
        """
        sinks = getattr(self._kvbench_layers[layer].impl, "sinks", None)
        for part in self._kvbench_parts:
            keys = part.store.keys(layer)
            for name, tokens, live in part.ends:
                mine = queries[part.first : part.first + tokens].transpose(0, 1)
                self._kvbench_rows.sums.add(name, layer, mine, keys[:, :live], sinks)

    def _kvbench_store(self, blocks: list[int], live: int) -> RowStore:
        if self.device.type == "cpu":
            first = self._kvbench_layers[0]
            return PackedStore(self._kvbench_caches, blocks, live, str(first.isa))
        return paged_store(*self._kvbench_pages, blocks, live)

    @cached_property
    def _kvbench_group(self) -> int:
        """Index of the KV cache group whose layers evict."""
        return evicting_group(self.kv_cache_config)

    @property
    def _kvbench_table(self) -> Any:
        """Its table of blocks."""
        return self.input_batch.block_table[self._kvbench_group]

    def _kvbench_planned(self) -> list[Any]:
        """Return vLLM's attention layers that will evict, in order, before there is a cache."""
        found = self.compilation_config.static_forward_context
        specs = self.get_kv_cache_spec()
        return [found[name] for name, spec in specs.items() if attention_of(spec) == "full"]

    @cached_property
    def _kvbench_caches(self) -> list[Tensor]:
        """One cache [blocks, kv_heads, block_size, 2 · head_dim] per layer."""
        caches = (layer.kv_cache for layer in self._kvbench_layers)
        return [cache if isinstance(cache, Tensor) else cache[0] for cache in caches]

    @cached_property
    def _kvbench_pages(self) -> tuple[PagedRows, PagedRows]:
        """Keys and values of all layers as the kernels take them."""
        return paged_rows(self._kvbench_caches)

    def _kvbench_connect(self, policy: BackendPolicy, layers: list[Any]) -> None:
        """Begin with a method; on a GPU, make all that it keeps of queries."""
        if policy.method.compresses:
            refuse_foreign(layers)
        layer = layers[0]
        heads, kv_heads, head_dim = layer.num_heads, layer.num_kv_heads, layer.head_size
        shape = RowShape(len(layers), heads, kv_heads, head_dim, self.dtype, self.device)
        rows: WorkerRows | None = getattr(self, "_kvbench_rows", None)
        if rows is None or rows.policy is not policy or rows.shape != shape:
            rows = WorkerRows(policy, shape, rope_frequencies(policy).to(self.device))
        names = {layer.layer_name: index for index, layer in enumerate(layers)}
        CAPTURE.connect(names, rows.rings, self._kvbench_sum if rows.wants_sums else None)
        self._kvbench_layers = layers
        self._kvbench_rows = rows
        self._kvbench_moved = []
        if self.device.type != "cpu":
            # CUDA graphs copy queries to buffers as large as the largest captured batch.
            captured = max(self.compilation_config.cudagraph_capture_sizes or [0])
            like = torch.empty(0, dtype=shape.dtype, device=shape.device)
            CAPTURE.allocate(captured, shape.layers, (heads, head_dim), like)
            rows.reserve(self.max_num_reqs)


def refuse_foreign(layers: Iterable[Any]) -> None:
    """Refuse layers whose attention backend is not one of ours."""
    for layer in layers:
        if not isinstance(layer.impl, CapturingImpl):
            raise ValueError(
                f"kvbench: {type(layer.impl).__name__} shows no queries, and which lengths it "
                "goes by is not known; use another attention backend (--engine-arg "
                "attention-backend=FLASH_ATTN, or TRITON_ATTN in float32)"
            )


class EvictingWorker(BaseWorker):
    """The platform's worker; named on the command line as `--worker-cls`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        register()
        super().__init__(*args, **kwargs)

    def _make_model_runner(self) -> EvictingRunner:
        return EvictingRunner(self.vllm_config, self.device)

    def init_device(self) -> None:
        super().init_device()
        # The CPU worker makes its runner here and does not call `_make_model_runner`.
        self.model_runner.__class__ = EvictingRunner
