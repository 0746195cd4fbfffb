"""Every symbol of vLLM that the engine builds on, with the parameters it relies on.

vLLM calls its scheduler and its model runner private. `problems` compares what is installed with
what the engine was written against; a test runs it inside the environment.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, fields, is_dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class Symbol:
    """Something that must exist."""

    path: str  # `module:Name.attribute`
    # Parameters a function must take, or fields a dataclass must have.
    parameters: tuple[str, ...] = ()


_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
_MANAGER = "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager"
_POOL = "vllm.v1.core.block_pool:BlockPool"
_REGISTRY = "vllm.v1.attention.backends.registry"

SYMBOLS = (
    Symbol(f"{_SCHEDULER}.schedule", ("throttle_prefills",)),
    Symbol(f"{_SCHEDULER}.add_request", ("request",)),
    Symbol(f"{_SCHEDULER}.update_from_output", ("scheduler_output", "model_runner_output")),
    Symbol(f"{_SCHEDULER}.finish_requests", ("request_ids", "finished_status")),
    Symbol(f"{_SCHEDULER}._free_request_blocks", ("request",)),
    Symbol(f"{_SCHEDULER}._update_request_with_output", ("request", "new_token_ids", "is_stale")),
    Symbol("vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots", ("request",)),
    Symbol(
        f"{_MANAGER}.get_num_blocks_to_allocate",
        (
            "request_id",
            "num_tokens",
            "new_computed_blocks",
            "total_computed_tokens",
            "num_local_computed_tokens",
            "num_tokens_main_model",
        ),
    ),
    Symbol(
        f"{_MANAGER}.allocate_new_blocks", ("request_id", "num_tokens", "num_tokens_main_model")
    ),
    Symbol(f"{_MANAGER}.free", ("request_id",)),
    Symbol(f"{_POOL}.free_blocks", ("ordered_blocks",)),
    Symbol(f"{_POOL}.get_num_free_blocks"),
    Symbol(
        "vllm.v1.core.sched.output:SchedulerOutput",
        ("num_scheduled_tokens", "total_num_scheduled_tokens"),
    ),
    Symbol("vllm.v1.outputs:ModelRunnerOutput", ("sampled_token_ids",)),
    Symbol("vllm.v1.request:RequestStatus.FINISHED_ABORTED"),
    Symbol("vllm.v1.request:RequestStatus.FINISHED_STOPPED"),
    Symbol(f"{_RUNNER}.execute_model", ("scheduler_output",)),
    Symbol(f"{_RUNNER}.sample_tokens"),
    Symbol(f"{_RUNNER}._prepare_inputs", ("scheduler_output", "num_scheduled_tokens")),
    Symbol(f"{_RUNNER}.initialize_kv_cache", ("kv_cache_config",)),
    Symbol("vllm.v1.worker.gpu_worker:Worker._make_model_runner"),
    Symbol("vllm.v1.worker.block_table:MultiGroupBlockTable.add_row", ("block_ids", "row_idx")),
    Symbol(
        "vllm.v1.worker.block_table:MultiGroupBlockTable.compute_slot_mapping",
        ("num_reqs", "query_start_loc", "positions"),
    ),
    Symbol(f"{_REGISTRY}:register_backend", ("backend", "class_path")),
    Symbol(f"{_REGISTRY}:AttentionBackendEnum.CPU_ATTN"),
    Symbol(f"{_REGISTRY}:AttentionBackendEnum.FLASH_ATTN"),
    Symbol("vllm.v1.kv_cache_interface:FullAttentionSpec"),
    Symbol("vllm.entrypoints.cli.main:main"),
)


def problems() -> list[str]:
    """Return what is missing or different in the vLLM that is installed here."""
    return [text for symbol in SYMBOLS if (text := _problem(symbol))]


def _problem(symbol: Symbol) -> str:
    try:
        found = _find(symbol.path)
    except (ImportError, AttributeError) as error:
        return f"{symbol.path}: {error}"
    missing = [name for name in symbol.parameters if name not in _parameters(found)]
    return f"{symbol.path} has no {', '.join(missing)}" if missing else ""


def _find(path: str) -> Any:
    module, _, names = path.partition(":")
    found: Any = import_module(module)
    for name in names.split("."):
        found = getattr(found, name)
    return found


def _parameters(found: Any) -> set[str]:
    if is_dataclass(found):
        return {field.name for field in fields(found)}
    return set(inspect.signature(found).parameters)
