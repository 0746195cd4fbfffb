"""Everything of SGLang that is hooked, with the parameters it is expected to have.

The targets are private, so a version is only supported if all of them are there as listed. The
plug-in checks that before it installs anything, and a contract test checks it again.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Mapping
from typing import Any

_BATCH = "sglang.srt.managers.schedule_batch.ScheduleBatch."
_REQ = "sglang.srt.managers.schedule_batch.Req."
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler."
_ADDER = "sglang.srt.managers.schedule_policy.PrefillAdder."
_STREAMING = "sglang.srt.session.streaming_session.StreamingSession."

TARGETS: Mapping[str, tuple[str, ...]] = {
    "sglang.srt.model_executor.model_runner_kv_cache_mixin.ModelRunnerKVCacheMixin"
    ".init_memory_pool": ("self", "pre_model_load_memory"),
    _SCHEDULER + "init_request_dispatcher": ("self",),
    _SCHEDULER + "process_input_requests": ("self", "recv_reqs"),
    _SCHEDULER + "init_req_max_new_tokens": ("self", "req"),
    _SCHEDULER + "_add_request_to_queue": ("self", "req", "is_retracted"),
    _SCHEDULER + "abort_request": ("self", "recv_req"),
    _SCHEDULER + "get_new_batch_prefill": ("self",),
    _SCHEDULER + "update_running_batch": ("self", "batch"),
    _BATCH + "prepare_for_extend": ("self",),
    _BATCH + "prepare_for_decode": ("self",),
    _BATCH + "release_req": ("self", "idx", "remaing_req_count", "server_args"),
    _REQ + "init_next_round_input": ("self", "tree_cache", "cow_mamba"),
    _REQ + "_check_token_based_finish": ("self", "new_accepted_tokens"),
    _ADDER + "add_one_req": ("self", "req", "has_chunked_req", "truncation_align_size"),
    _ADDER + "_get_running_request_total_token_offset": ("self", "req"),
    "sglang.srt.session.session_controller.Session.create_req": (
        "self", "req", "tokenizer", "vocab_size", "eos_token_ids",
    ),
    "sglang.srt.session.session_controller.SessionController._close": ("self", "session_id"),
    _STREAMING + "_trim_overshoot": ("self", "req", "finished_len"),
    _STREAMING + "release_session": ("self", "session_id"),
    "sglang.srt.mem_cache.chunk_cache.ChunkCache.cache_finished_req": ("self", "req", "is_insert"),
    "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new": (
        "cls", "batch", "model_runner",
    ),
    "sglang.srt.layers.attention.base_attn_backend.AttentionBackend.forward": (
        "self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache", "kwargs",
    ),
}  # fmt: skip


def mismatches() -> list[str]:
    """Return what is not as listed, in words; SGLang must be importable."""
    found = []
    for target, expected in TARGETS.items():
        try:
            actual = _parameters(target)
        except (ImportError, AttributeError, KeyError) as error:
            found.append(f"{target} is gone ({type(error).__name__})")
            continue
        if actual != expected:
            found.append(f"{target} takes {', '.join(actual)}; expected {', '.join(expected)}")
    return found


def _parameters(target: str) -> tuple[str, ...]:
    owner_path, _, name = target.rpartition(".")
    owner: Any = pkgutil.resolve_name(owner_path)
    function = owner.__dict__[name]
    function = getattr(function, "__func__", function)
    return tuple(inspect.signature(function).parameters)
