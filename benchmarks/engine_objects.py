"""What the plug-ins call an engine's own objects, and the class that these are of.

`engine_symbols.py` looks up what is read of them: of a variable or an attribute by that name, of an
item of it (`name[]`) or of what a method returns (`name()`), wherever it stands in the plug-in. So
nothing of ours there may be called the same and have attributes, and whoever uses another object of
an engine's gives it a name here.
"""

from __future__ import annotations

from collections.abc import Mapping

_S = "sglang.srt."
_BATCH, _POOL = f"{_S}managers.schedule_batch:", f"{_S}mem_cache.memory_pool:"
_STREAM = f"{_S}session.streaming_session:"

_SGLANG = {
    "request": f"{_BATCH}Req",
    **dict.fromkeys(("batch", "running_batch"), f"{_BATCH}ScheduleBatch"),
    **dict.fromkeys(("scheduler", "_scheduler"), f"{_S}managers.scheduler:Scheduler"),
    "adder": f"{_S}managers.schedule_policy:PrefillAdder",
    "runner": f"{_S}model_executor.model_runner:ModelRunner",
    **dict.fromkeys(
        ("forward", "forward_batch"), f"{_S}model_executor.forward_batch_info:ForwardBatch"
    ),
    **dict.fromkeys(("mode", "forward_mode"), f"{_S}model_executor.forward_batch_info:ForwardMode"),
    "layer": f"{_S}layers.radix_attention:RadixAttention",
    **dict.fromkeys(("config", "model_config"), f"{_S}configs.model_config:ModelConfig"),
    **dict.fromkeys(
        ("sampling", "sampling_params"), f"{_S}sampling.sampling_params:SamplingParams"
    ),
    "arrived": f"{_S}managers.io_struct:TokenizedGenerateReqInput",
    **dict.fromkeys(
        ("controller", "session_controller"), f"{_S}session.session_controller:SessionController"
    ),
    **dict.fromkeys(("history", "request.session"), f"{_S}session.session_controller:Session"),
    "node": f"{_S}session.session_controller:SessionReqNode",
    "kv_pool": f"{_POOL}MHATokenToKVPool",
    "token_to_kv_pool": f"{_POOL}MHATokenToKVPool",
    "req_to_token_pool": f"{_POOL}ReqToTokenPool",
    **dict.fromkeys(("streaming", "sessions()"), f"{_STREAM}StreamingSession"),
    "reason": f"{_BATCH}FINISH_ABORT",
    "open()": f"{_S}managers.io_struct:OpenSessionReqOutput",
}
_ALLOCATORS = ("allocator", "_allocator", "token_to_kv_pool_allocator")
_CACHES = ("cache", "tree_cache")
_ROWS = ("held", "rows()")  # where a version keeps a request's row and lengths

_SGLANG_0512 = {
    "idle_sleeper": f"{_S}managers.scheduler:IdleSleeper",
    **dict.fromkeys(("args", "options", "options()"), f"{_S}server_args:ServerArgs"),
    "slot": f"{_STREAM}SessionSlot",
    "send_to_tokenizer": f"{_S}managers.scheduler:SenderWrapper",
    **dict.fromkeys(_ALLOCATORS, f"{_S}mem_cache.allocator:PagedTokenToKVPoolAllocator"),
    **dict.fromkeys(_CACHES, f"{_STREAM}StreamingSession"),
    **dict.fromkeys(_ROWS, f"{_BATCH}Req"),
}
# The options of 0.5.23 are put together from many classes as it runs, and are left out: the plug-in
# reads all of them as a server starts.
_SGLANG_0523 = {
    "idle_sleeper": f"{_S}managers.scheduler_components.idle_sleeper:IdleSleeper",
    **dict.fromkeys(_ALLOCATORS, f"{_S}mem_cache.allocator.paged:PagedTokenToKVPoolAllocator"),
    **dict.fromkeys(_CACHES, f"{_S}mem_cache.unified_radix_cache:UnifiedRadixCache"),
    **dict.fromkeys(_ROWS, f"{_BATCH}ReqKvInfo"),
    "planned": f"{_BATCH}NextBatchPlan",
    "layer_info": f"{_S}model_executor.model_runner_components.layer_setup:ModelLayerInfo",
}

_V = "vllm.v1."
_VLLM = {
    "request": f"{_V}request:Request",
    "scheduler_output": f"{_V}core.sched.output:SchedulerOutput",
    **dict.fromkeys(("config", "vllm_config"), "vllm.config.vllm:VllmConfig"),
    **dict.fromkeys(("parallel", "parallel_config"), "vllm.config.parallel:ParallelConfig"),
    "cache_config": "vllm.config.cache:CacheConfig",
    "model_config": "vllm.config.model:ModelConfig",
    "scheduler_config": "vllm.config.scheduler:SchedulerConfig",
    "compilation_config": "vllm.config.compilation:CompilationConfig",
    "kv_cache_config": f"{_V}kv_cache_interface:KVCacheConfig",
    "group": f"{_V}kv_cache_interface:KVCacheGroupSpec",
    **dict.fromkeys(("spec", "kv_cache_spec"), f"{_V}kv_cache_interface:FullAttentionSpec"),
    "kv_cache_manager": f"{_V}core.kv_cache_manager:KVCacheManager",
    "coordinator": f"{_V}core.kv_cache_coordinator:KVCacheCoordinator",
    **dict.fromkeys(
        ("manager", "_single"), f"{_V}core.single_type_kv_cache_manager:SingleTypeKVCacheManager"
    ),
    **dict.fromkeys(("pool", "_pool"), f"{_V}core.block_pool:BlockPool"),
    "block": f"{_V}core.kv_cache_utils:KVCacheBlock",
    **dict.fromkeys(
        ("layer", "_kvbench_layers[]"),
        "vllm.model_executor.layers.attention.attention:Attention",
    ),
    "requests[]": f"{_V}request:Request",
    "state": f"{_V}worker.gpu_input_batch:CachedRequestState",
    "query_start_loc": f"{_V}utils:CpuGpuBuffer",
    "common": f"{_V}attention.backend:CommonAttentionMetadata",
    **dict.fromkeys(("input_batch", "batch"), f"{_V}worker.gpu_input_batch:InputBatch"),
    "sampling_params": "vllm.sampling_params:SamplingParams",
}

_OBJECTS: Mapping[str, Mapping[str, str]] = {
    "sglang 0.5.12": _SGLANG | _SGLANG_0512,
    "sglang 0.5.23": _SGLANG | _SGLANG_0523,
    "vllm 0.32.0": _VLLM,
    "vllm 0.33.0": _VLLM,
}


def objects_of(engine: str, version: str) -> Mapping[str, str]:
    """Return the class that an engine's object is of, `module:Class`, by what we call it."""
    return _OBJECTS[f"{engine} {version}"]
