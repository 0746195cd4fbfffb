"""What physical eviction in SGLang does not support, said when it starts."""

from __future__ import annotations

from typing import Any


def refuse_unsupported(runner: Any) -> None:
    """Refuse options and models that eviction would make wrong."""
    found = [name for name, there in {**_options(runner), **_model(runner)}.items() if there]
    if found:
        raise ValueError(f"kvbench: eviction in SGLang does not support {', '.join(found)}")


def _options(runner: Any) -> dict[str, bool]:
    args = runner.server_args
    return {
        "the radix cache (--disable-radix-cache is missing)": not args.disable_radix_cache,
        "running without --enable-streaming-session": not args.enable_streaming_session,
        "prefill without chunks": (args.chunked_prefill_size or 0) < 1,
        "parallelism over several GPUs": max(args.tp_size, args.pp_size, args.dp_size) > 1,
        "speculative decoding": args.speculative_algorithm is not None,
        "mixed prefill and decode": args.enable_mixed_chunk,
        "prefill/decode disaggregation": args.disaggregation_mode != "null",
        "hierarchical caches": args.enable_hierarchical_cache or args.enable_hisparse,
        "two-batch overlap": args.enable_two_batch_overlap,
        "piecewise CUDA graphs": args.device == "cuda" and not args.disable_piecewise_cuda_graph,
        "a quantised KV cache": args.kv_cache_dtype not in ("auto", "bfloat16", "bf16"),
    }


def _model(runner: Any) -> dict[str, bool]:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    config, pool = runner.model_config, runner.token_to_kv_pool
    window = getattr(runner, "sliding_window_size", None)
    return {
        f"this model's cache ({type(pool).__name__})": type(pool) is not MHATokenToKVPool,
        "sliding-window attention": runner.is_hybrid_swa or (window is not None and window > 0),
        "multimodal models": config.is_multimodal or runner.model_is_mrope,
        "encoder-decoder models": config.is_encoder_decoder,
        "attention in chunks": getattr(config, "attention_chunk_size", None) is not None,
    }
