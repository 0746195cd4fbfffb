"""The model runner's part: physical lengths in, queries out, rows moved between forwards.

From a forward's queries to the rings: at once, or through buffers that a CUDA graph can fill.

vLLM's worker with a model runner that evicts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.platforms import current_platform

from agentbench_kv.engines.core.rings import QueryBuffer, RingWrite
from agentbench_kv.engines.core.rows import Fed, RowShape, RowStore, WorkerRows
from agentbench_kv.engines.core.session import EvictionOrder, RowsMoved, StepPlan
from agentbench_kv.engines.serving.plugin import Policy, rope_frequencies
from agentbench_kv.engines.vllm.plugin import launch as plugin
from agentbench_kv.engines.vllm.plugin.blocks import PackedStore, paged_store


class Capture:
    """The queries of the forward that is running in this worker.

    A replayed CUDA graph runs no Python, so batches of up to `buffered` rows, which may be
    captured, are copied into buffers that live as long as the graph; `finish` writes the rings from
    them. Larger ones go to the rings as each layer runs.
    """

    def __init__(self) -> None:
        self.keep_all = False
        self._layers: Mapping[str, int] = {}
        self._rings: QueryBuffer | None = None
        self._buffers: list[Tensor] = []
        self._all: dict[int, Tensor] = {}
        self._write: RingWrite | None = None
        self._rows = 0

    @property
    def buffered(self) -> int:
        """Rows of the static buffers; 0 without any."""
        return len(self._buffers[0]) if self._buffers else 0

    def connect(self, layers: Mapping[str, int], rings: QueryBuffer, *, keep_all: bool) -> None:
        """Name the layers (vLLM's name -> index) and where their queries go.

        With `keep_all`, `queries` has every query of the last forward, too.
        """
        self._layers = layers
        self._rings = rings
        self.keep_all = keep_all

    def allocate(self, rows: int, layers: int, shape: tuple[int, int], like: Tensor) -> None:
        """Make static buffers [rows, q_heads, head_dim] before graphs are captured."""
        self._buffers = [like.new_zeros(rows, *shape) for _ in range(layers)]

    def begin(self, write: RingWrite | None, rows: int) -> None:
        """Expect a forward of `rows` rows, some of which go to rings."""
        self._write = write
        self._rows = rows
        self._all.clear()

    def see(self, layer_name: str, query: Tensor) -> None:
        """Take one layer's queries [rows, q_heads, head_dim]; rows past the batch's are padding."""
        layer = self._layers.get(layer_name)
        if layer is None:
            return
        if len(query) <= self.buffered:
            self._buffers[layer][: len(query)].copy_(query)
        else:
            self._store(layer, query)

    def finish(self) -> None:
        """Write the rings from the buffers, if this forward went through them."""
        if self._rows <= self.buffered:
            for layer, buffer in enumerate(self._buffers):
                self._store(layer, buffer)
        self._write = None

    def queries(self, layer: int, first: int, rows: int) -> Tensor:
        """Return one session's queries [q_heads, rows, head_dim] of the last forward."""
        return self._all[layer][first : first + rows].transpose(0, 1)

    def _store(self, layer: int, query: Tensor) -> None:
        if self._write is not None and self._rings is not None:
            self._rings.write(layer, query[: self._rows].transpose(0, 1), self._write)
        if self.keep_all:
            self._all[layer] = query[: self._rows].clone()


# The worker's own; vLLM creates attention objects itself, so they find it here.
CAPTURE = Capture()


class EvictingRunner:
    """Mixed into vLLM's V1 model runner.

    RoPE goes by logical positions, memory and attention by physical lengths; the difference comes
    with each step's `StepPlan`.
    """

    _kvbench_moved: list[RowsMoved]

    def initialize_kv_cache(self: Any, *args: Any, **kwargs: Any) -> None:
        """Allocate the cache, then find its layers; graphs are captured after this."""
        super().initialize_kv_cache(*args, **kwargs)  # type: ignore[misc]
        self._kvbench_connect(Policy.load())
        if self.device.type != "cpu":
            # CUDA graphs copy queries to buffers as large as the largest captured batch.
            rows = max(self.compilation_config.cudagraph_capture_sizes or [0])
            shape = self._kvbench_rows.shape
            like = torch.empty(0, dtype=shape.dtype, device=shape.device)
            CAPTURE.allocate(rows, shape.layers, (shape.q_heads, shape.head_dim), like)

    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Run one step between what is due before it and what is due after it."""
        plan: StepPlan | None = getattr(scheduler_output, "kvbench", None)
        if plan is None:
            return super().execute_model(scheduler_output, *args, **kwargs)  # type: ignore[misc]
        self._kvbench_plan = plan
        if plan.method is not None:
            self._kvbench_connect(self._kvbench_rows.policy.with_method(plan.method))
        for session in plan.dropped:
            self._kvbench_rows.drop(session)
        self._kvbench_remove(plan.before)
        output = super().execute_model(scheduler_output, *args, **kwargs)  # type: ignore[misc]
        if scheduler_output.total_num_scheduled_tokens:
            CAPTURE.finish()
            self._kvbench_sum()
            self._kvbench_remove(plan.after.values())
            for request, order in plan.after.items():
                self._kvbench_shorten(request, order)
        return output

    def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Sample, and report what was moved."""
        output = super().sample_tokens(*args, **kwargs)  # type: ignore[misc]
        moved, self._kvbench_moved = self._kvbench_moved, []
        if moved and hasattr(output, "sampled_token_ids"):
            # A copy: vLLM shares one empty output between steps.
            output = replace(output)
            output.kvbench = moved
        return output

    def _prepare_inputs(self: Any, scheduler_output: Any, num_scheduled: Any) -> Any:
        prepared = super()._prepare_inputs(scheduler_output, num_scheduled)  # type: ignore[misc]
        plan: StepPlan | None = getattr(scheduler_output, "kvbench", None)
        if plan is not None:
            self._kvbench_feed(plan, num_scheduled)
            if plan.deficits:
                self._kvbench_shift(plan, num_scheduled)
        return prepared

    def _kvbench_shift(self: Any, plan: StepPlan, num_scheduled: Any) -> None:
        """Make lengths and slots physical, and positions too where they are the cache's."""
        count = self.input_batch.num_reqs
        requests = self.input_batch.req_ids[:count]
        missing = np.array([plan.deficits.get(request, 0) for request in requests])
        lengths = torch.from_numpy(missing).to(self.seq_lens.dtype)
        self.seq_lens[:count] -= lengths.to(self.seq_lens.device)
        if self.optimistic_seq_lens_cpu.data_ptr() != self.seq_lens.data_ptr():
            self.optimistic_seq_lens_cpu[:count] -= lengths.to(self.optimistic_seq_lens_cpu.dtype)
        rows = torch.from_numpy(np.repeat(missing, num_scheduled)).to(self.positions.device)
        physical = self.positions[: len(rows)] - rows
        self.input_batch.block_table.compute_slot_mapping(
            count, self.query_start_loc.gpu[: count + 1], physical
        )
        if self._kvbench_rows.cache_positions:
            self.positions[: len(rows)] = physical

    def _kvbench_feed(self: Any, plan: StepPlan, num_scheduled: Any) -> None:
        """Label the step's tokens and tell the attention layers which queries to keep."""
        batch = self.input_batch
        fed: list[Fed] = []
        recipes: dict[str, str] = {}
        for row, request in enumerate(batch.req_ids[: batch.num_reqs]):
            session, recipe = plan.sessions[request]
            first = int(batch.num_computed_tokens_cpu[row])
            tokens = batch.token_ids_cpu[row, first : first + int(num_scheduled[row])].tolist()
            fed.append(Fed(session, first, tokens))
            recipes[session] = recipe
        self._kvbench_fed = fed
        CAPTURE.begin(self._kvbench_rows.feed(fed, recipes), int(num_scheduled.sum()))

    def _kvbench_remove(self: Any, orders: Iterable[EvictionOrder]) -> None:
        for order in orders:
            store = self._kvbench_store(order.blocks, order.eviction.live)
            moved = self._kvbench_rows.remove(order, store)
            if isinstance(store, PackedStore):
                store.write_back()
            self._kvbench_moved.append(RowsMoved(order.session, order.number, moved))

    def _kvbench_shorten(self: Any, request: str, order: EvictionOrder) -> None:
        """Forget the blocks a running request gave back."""
        size = self._kvbench_caches[0].shape[2]
        kept = order.blocks[: -(-order.eviction.keep // size)]
        self.requests[request].block_ids[0][:] = kept
        row = self.input_batch.req_id_to_index.get(request)
        if row is not None:
            self.input_batch.block_table.add_row((kept,), row)

    def _kvbench_sum(self: Any) -> None:
        """Add up the attention this step's queries gave, for methods that rank by it."""
        rows = self._kvbench_rows
        if not rows.wants_sums:
            return
        start = 0
        for part, request in zip(self._kvbench_fed, self.input_batch.req_ids, strict=False):
            live = part.first_position + len(part.tokens)
            live -= self._kvbench_plan.deficits.get(request, 0)
            keys, _ = self._kvbench_store(self.requests[request].block_ids[0], live).read()
            for layer in range(rows.shape.layers):
                queries = CAPTURE.queries(layer, start, len(part.tokens))
                rows.sums.add(part.session, layer, queries, keys[layer])
            start += len(part.tokens)

    def _kvbench_store(self: Any, blocks: list[int], live: int) -> RowStore:
        if self.device.type == "cpu":
            isa = str(self._kvbench_layers[0].isa)
            return PackedStore(self._kvbench_caches, blocks, live, isa)
        return paged_store(self._kvbench_caches, blocks, live)

    @cached_property
    def _kvbench_layers(self: Any) -> list[Any]:
        """VLLM's attention layers, in order."""
        (group,) = self.kv_cache_config.kv_cache_groups
        found = self.compilation_config.static_forward_context
        return [found[name] for name in group.layer_names]

    @cached_property
    def _kvbench_caches(self: Any) -> list[Tensor]:
        """One cache [blocks, kv_heads, block_size, 2 · head_dim] per layer."""
        caches = (layer.kv_cache for layer in self._kvbench_layers)
        return [cache if isinstance(cache, Tensor) else cache[0] for cache in caches]

    def _kvbench_connect(self: Any, policy: Policy) -> None:
        layers = self._kvbench_layers
        heads, kv_heads = layers[0].num_heads, layers[0].num_kv_heads
        head_dim = layers[0].head_size
        shape = RowShape(len(layers), heads, kv_heads, head_dim, self.dtype, self.device)
        frequencies = rope_frequencies(policy.model_path).to(self.device)
        rows = WorkerRows(policy, shape, frequencies)
        names = {layer.layer_name: index for index, layer in enumerate(layers)}
        CAPTURE.connect(names, rows.rings, keep_all=rows.wants_sums)
        self._kvbench_rows = rows
        self._kvbench_moved = []


if current_platform.is_cpu():
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner as BaseRunner
    from vllm.v1.worker.cpu_worker import CPUWorker as BaseWorker
else:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as BaseRunner
    from vllm.v1.worker.gpu_worker import Worker as BaseWorker


class Runner(EvictingRunner, BaseRunner):
    """The platform's runner, evicting."""


class Worker(BaseWorker):
    """The platform's worker; named on the command line as `--worker-cls`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        plugin.register()
        super().__init__(*args, **kwargs)

    def _make_model_runner(self) -> Runner:
        return Runner(self.vllm_config, self.device)

    def init_device(self) -> None:
        super().init_device()
        # The CPU worker makes its runner here and does not call `_make_model_runner`.
        self.model_runner.__class__ = Runner
