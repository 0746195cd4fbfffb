"""Every symbol of vLLM that the engine builds on, with the parameters it relies on.

vLLM calls its scheduler and its model runner private. `problems` compares what is installed with
what the engine was written against; a test runs it inside the environment.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
_MANAGER = "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager"
_POOL = "vllm.v1.core.block_pool:BlockPool"
_REGISTRY = "vllm.v1.attention.backends.registry"
_TABLE = "vllm.v1.worker.block_table:MultiGroupBlockTable"

# `module:Name.attribute` -> parameters a function must take, or fields a dataclass must have.
SYMBOLS: Mapping[str, tuple[str, ...]] = {
    f"{_SCHEDULER}.schedule": ("throttle_prefills",),
    f"{_SCHEDULER}.add_request": ("request",),
    f"{_SCHEDULER}.update_from_output": ("scheduler_output", "model_runner_output"),
    f"{_SCHEDULER}.finish_requests": ("request_ids", "finished_status"),
    f"{_SCHEDULER}._free_request_blocks": ("request",),
    f"{_SCHEDULER}._update_request_with_output": ("request", "new_token_ids", "is_stale"),
    "vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots": ("request",),
    f"{_MANAGER}.get_num_blocks_to_allocate": (
        "request_id", "num_tokens", "new_computed_blocks", "total_computed_tokens",
        "num_local_computed_tokens", "num_tokens_main_model",
    ),
    f"{_MANAGER}.allocate_new_blocks": ("request_id", "num_tokens", "num_tokens_main_model"),
    f"{_MANAGER}.free": ("request_id",),
    f"{_POOL}.free_blocks": ("ordered_blocks",),
    f"{_POOL}.get_num_free_blocks": (),
    "vllm.v1.core.sched.output:SchedulerOutput": (
        "num_scheduled_tokens", "total_num_scheduled_tokens",
    ),
    "vllm.v1.outputs:ModelRunnerOutput": ("sampled_token_ids",),
    "vllm.v1.request:RequestStatus.FINISHED_ABORTED": (),
    "vllm.v1.request:RequestStatus.FINISHED_STOPPED": (),
    f"{_RUNNER}.execute_model": ("scheduler_output",),
    f"{_RUNNER}.sample_tokens": (),
    f"{_RUNNER}._prepare_inputs": ("scheduler_output", "num_scheduled_tokens"),
    f"{_RUNNER}.initialize_kv_cache": ("kv_cache_config",),
    "vllm.v1.worker.gpu_worker:Worker._make_model_runner": (),
    f"{_TABLE}.add_row": ("block_ids", "row_idx"),
    f"{_TABLE}.compute_slot_mapping": ("num_reqs", "query_start_loc", "positions"),
    f"{_REGISTRY}:register_backend": ("backend", "class_path"),
    f"{_REGISTRY}:AttentionBackendEnum.CPU_ATTN": (),
    f"{_REGISTRY}:AttentionBackendEnum.FLASH_ATTN": (),
    "vllm.v1.kv_cache_interface:FullAttentionSpec": (),
    "vllm.entrypoints.cli.main:main": (),
}  # fmt: skip


def problems() -> list[str]:
    """Return what is missing or different in the vLLM that is installed here."""
    found = []
    for path, expected in SYMBOLS.items():
        try:
            symbol = pkgutil.resolve_name(path)
        except (ImportError, AttributeError) as error:
            found.append(f"{path}: {error}")
            continue
        missing = [name for name in expected if name not in _parameters(symbol)]
        if missing:
            found.append(f"{path} has no {', '.join(missing)}")
    return found


def _parameters(symbol: Any) -> set[str]:
    if is_dataclass(symbol):
        return {field.name for field in fields(symbol)}
    return set(inspect.signature(symbol).parameters)
