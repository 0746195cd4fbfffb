"""What the SGLang versions that the plug-in takes call their insides.

0.5.23 keeps a request's rows in a record that a session owns and its turns borrow, has no cache of
its own for a server without the radix cache, and plans a batch from the one that is given. All
that the plug-in has to know of it is here; the rest is written against both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentbench_kv.engines.core.host import symbol_problems

Targets = Mapping[str, tuple[str, ...]]

_BATCH = "sglang.srt.managers.schedule_batch.ScheduleBatch."
_REQ = "sglang.srt.managers.schedule_batch.Req."
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler."
_ADDER = "sglang.srt.managers.schedule_policy.PrefillAdder."
_STREAMING = "sglang.srt.session.streaming_session.StreamingSession."
_SESSION = "sglang.srt.session.session_controller."
_INIT_NEW = "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new"

# Functions that are wrapped in every version, with their parameters.
_COMMON: dict[str, tuple[str, ...]] = {
    _SCHEDULER + "init_request_dispatcher": ("self",),
    _SCHEDULER + "process_input_requests": ("self", "recv_reqs"),
    _SCHEDULER + "init_req_max_new_tokens": ("self", "req"),
    _SCHEDULER + "_add_request_to_queue": ("self", "req", "is_retracted"),
    _SCHEDULER + "abort_request": ("self", "recv_req"),
    _SCHEDULER + "update_running_batch": ("self", "batch"),
    _BATCH + "prepare_for_extend": ("self",),
    _BATCH + "prepare_for_decode": ("self",),
    _REQ + "init_next_round_input": ("self", "tree_cache", "cow_mamba"),
    _REQ + "_check_token_based_finish": ("self", "new_accepted_tokens"),
    _ADDER + "add_one_req": ("self", "req", "has_chunked_req", "truncation_align_size"),
    _ADDER + "_get_running_request_total_token_offset": ("self", "req"),
    _SESSION + "SessionController._close": ("self", "session_id"),
    _STREAMING + "_trim_overshoot": ("self", "req", "finished_len"),
    _STREAMING + "release_session": ("self", "session_id"),
    "sglang.srt.model_executor.model_runner.ModelRunner.sample": (
        "self", "logits_output", "forward_batch",
    ),
    "sglang.srt.layers.attention.base_attn_backend.AttentionBackend.forward": (
        "self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache", "kwargs",
    ),
}  # fmt: skip


class Sglang0512:
    """The names of 0.5.12."""

    targets: Targets = _COMMON | {
        "sglang.srt.model_executor.model_runner_kv_cache_mixin.ModelRunnerKVCacheMixin"
        ".init_memory_pool": ("self", "pre_model_load_memory"),
        _SCHEDULER + "get_new_batch_prefill": ("self",),
        _BATCH + "release_req": ("self", "idx", "remaing_req_count", "server_args"),
        _SESSION + "Session.create_req": (
            "self", "req", "tokenizer", "vocab_size", "eos_token_ids",
        ),
        "sglang.srt.mem_cache.chunk_cache.ChunkCache.cache_finished_req": (
            "self", "req", "is_insert",
        ),
        _INIT_NEW: ("cls", "batch", "model_runner"),
    }  # fmt: skip

    def options(self, runner: Any) -> Any:
        """Return the server's options as SGLang takes them, its own choices included."""
        return runner.server_args

    def captures_decodes(self, options: Any) -> bool:
        return options.device == "cuda" and not options.disable_cuda_graph

    def captures_prefills(self, options: Any) -> bool:
        return options.device == "cuda" and not options.disable_piecewise_cuda_graph

    def layers(self, runner: Any) -> int:
        return int(runner.num_effective_layers)

    def has_mrope(self, runner: Any) -> bool:
        return bool(runner.model_is_mrope)

    def rows(self, holder: Any) -> Any:
        """Return where a request or a session's slot keeps its row in the table and its lengths."""
        return holder

    def sessions(self, cache: Any) -> Any:
        """Return what keeps the sessions' slots for the scheduler's cache."""
        return cache

    def slot(self, row: int, rows: int, shared: int) -> Any:
        """Make the slot of a session at rest, of whose rows the first `shared` are another's."""
        from sglang.srt.session.streaming_session import SessionSlot

        return SessionSlot(
            req_pool_idx=row,
            kv_committed_len=rows,
            kv_allocated_len=rows,
            cache_protected_len=shared,
        )

    def take_row(self, req_to_token_pool: Any) -> int:
        """Take a row of the table, of which one at least is free."""
        return int(req_to_token_pool.free_slots.pop(0))

    def forget_rows(self, request: Any) -> None:
        """Let a request be as one that never had rows; they are freed."""
        request.req_pool_idx = None
        request.kv_committed_len = request.kv_allocated_len = 0

    def free_rows_of(self, cache: Any, request: Any) -> None:
        """Free all rows of a session whose request is running."""
        name, row = request.session.session_id, request.req_pool_idx
        # There is none before the end of its first turn.
        slot = cache.slots.setdefault(name, self.slot(row, 0, request.cache_protected_len))
        slot.req_pool_idx = row
        cache.release_session(name)
        request.req_pool_idx = None

    def free_behind(self, streaming: Any, request: Any, live: int) -> None:
        """Free a request's whole pages behind its first `live` rows, and say so in its lengths."""
        streaming._free_kv_aligned(request.req_pool_idx, live, request.kv_allocated_len)
        request.kv_committed_len = request.kv_allocated_len = live

    def prefilled(self, request: Any) -> Sequence[int]:
        """Return the ids of a request that the prefill about to run computes."""
        ids: Sequence[int] = request.fill_ids[len(request.prefix_indices) :]
        return ids

    def uncached(self, request: Any) -> int:
        """Return how many ids of a request a prefill has still to compute."""
        return int(request.extend_input_len)

    def skip_ids(self, request: Any, count: int) -> None:
        """Let a round begin behind a request's first ids, whose rows are gone."""
        request.fill_ids = request.fill_ids[count:]
        request.set_extend_input_len(len(request.fill_ids) - len(request.prefix_indices))

    def rewrite_history(self, history: Any) -> None:
        """Take note that a session's last request is not the one that SGLang put there."""

    def running_of(self, scheduler: Any, planned: Any) -> tuple[Any, Any]:
        """Return the new batch of a planned step, None for none, and the one that runs already."""
        return planned, scheduler.running_batch

    def send_abort(self, scheduler: Any, abort: Any, request: Any) -> None:
        scheduler.send_to_tokenizer.send_output(abort, request)

    def arguments(self, words: Sequence[str]) -> list[str]:
        """Return a server's options, spelled for 0.5.12, as this version spells them."""
        return list(words)


class Sglang0523(Sglang0512):
    """The names of 0.5.23."""

    targets: Targets = _COMMON | {
        "sglang.srt.model_executor.model_runner.ModelRunner.alloc_memory_pool": (
            "self", "memory_pool_config", "draft_parallel_layout",
        ),
        _SCHEDULER + "get_new_batch_prefill": ("self", "running_batch"),
        _BATCH + "release_req": ("self", "idx", "remaing_req_count", "offload_kv"),
        _SESSION + "Session.create_req": (
            "self", "req", "tokenizer", "vocab_size", "eos_token_ids", "disagg_mode", "req_factory",
        ),
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.claim_kv_row": ("self", "req"),
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.update_request_meta_info": (
            "self", "meta_info", "state", "customized_info", "index", "finish_reason",
        ),
        _INIT_NEW: (
            "cls", "batch", "model_runner", "capture_hidden_mode",
            "return_hidden_states_before_norm", "extend_position_info", "spec_mrope_positions",
            "kv_loc_plan", "write_cols",
        ),
    }  # fmt: skip

    def options(self, runner: Any) -> Any:
        # What was asked for; what SGLang made of it lies beside it.
        from sglang.srt.arg_groups.model_override_base import resolved_view

        return resolved_view(runner.server_args)

    def captures_decodes(self, options: Any) -> bool:
        graphs = options.cuda_graph_config
        return bool(options.device == "cuda" and graphs.decode.backend != "disabled")

    def captures_prefills(self, options: Any) -> bool:
        graphs = options.cuda_graph_config
        return bool(options.device == "cuda" and graphs.prefill.backend != "disabled")

    def layers(self, runner: Any) -> int:
        return int(runner.layer_info.num_effective_layers)

    def has_mrope(self, runner: Any) -> bool:
        return bool(runner.model_config.model_is_mrope)

    def rows(self, holder: Any) -> Any:
        # A running turn and its session's slot hold one and the same record.
        return holder.kv

    def sessions(self, cache: Any) -> Any:
        return cache.session

    def slot(self, row: int, rows: int, shared: int) -> Any:
        from sglang.srt.managers.schedule_batch import ReqKvInfo
        from sglang.srt.session.streaming_session import SessionSlot

        held = ReqKvInfo(
            req_pool_idx=row,
            kv_committed_len=rows,
            kv_allocated_len=rows,
            cache_protected_len=shared,
        )
        return SessionSlot(kv=held)

    def take_row(self, req_to_token_pool: Any) -> int:
        return int(req_to_token_pool.alloc_rows(1)[0])

    def forget_rows(self, request: Any) -> None:
        request.detach_kv()

    def free_rows_of(self, cache: Any, request: Any) -> None:
        cache.release_session(request.session.session_id)
        request.detach_kv()

    def free_behind(self, streaming: Any, request: Any, live: int) -> None:
        streaming._free_kv_aligned(request.kv, live, request.kv.kv_allocated_len)
        request.kv.kv_committed_len = request.kv.kv_allocated_len = live

    def prefilled(self, request: Any) -> Sequence[int]:
        ids: Sequence[int] = request.get_fill_ids()[request.prefix_len :]
        return ids

    def uncached(self, request: Any) -> int:
        return len(request.full_untruncated_fill_ids) - int(request.prefix_len)

    def skip_ids(self, request: Any, count: int) -> None:
        # SGLang appends to the ids of the last round, which may have been cut here.
        ids = request.origin_input_ids + request.output_ids
        request.full_untruncated_fill_ids = ids[count:]

    def rewrite_history(self, history: Any) -> None:
        # Or the next request would go on in the last one's arrays, up to lengths noted before.
        history.committed_origin_len = None

    def running_of(self, scheduler: Any, planned: Any) -> tuple[Any, Any]:  # noqa: ARG002
        return planned.batch_to_run, planned.running_batch

    def send_abort(self, scheduler: Any, abort: Any, request: Any) -> None:
        scheduler.send_abort_output(abort, request)

    def arguments(self, words: Sequence[str]) -> list[str]:
        renamed = {"--disable-piecewise-cuda-graph": "--disable-prefill-cuda-graph"}
        return [renamed.get(word, word) for word in words]


VERSIONS: tuple[Sglang0512, ...] = (Sglang0512(), Sglang0523())


def find_version() -> tuple[Sglang0512, list[str]]:
    """Return the version whose insides are here, or else the nearest one and what differs."""
    found = []
    for version in VERSIONS:
        problems = symbol_problems(version.targets, exact=True)
        if not problems:
            return version, []
        found.append((version, problems))
    return min(found, key=lambda each: len(each[1]))
