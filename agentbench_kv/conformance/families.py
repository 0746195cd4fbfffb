"""Tiny random models of the families people come with, each with what makes its attention special.

One table for every engine: `kvbench selftest models` drives them, `docs/models.md` shows the
outcome. Configurations are as publishers write them in `config.json`; sizes are what all engines
take (heads of 64 channels), windows and RoPE lengths so small that a few hundred tokens pass them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from agentbench_kv.conformance.engines.fixture import CONTEXT, VOCAB, suite_tokenizer

WINDOW = 48  # of layers that have one: several times over within a session, less than a chunk

_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": CONTEXT,
    # Wide, so that attention and logits are peaked: a wrong row changes tokens, rounding does not.
    "initializer_range": 0.12,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
_YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 128}
_MOE = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
}
_ALTERNATING = ["sliding_attention", "full_attention"] * 2
_GEMMA3 = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "full_attention"],
    "query_pre_attn_scalar": 24,  # not the head's channels, as in the 27B model
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "hidden_activation": "gelu_pytorch_tanh",
}
_VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def _longrope(pairs: int, original: int) -> dict[str, Any]:
    return {
        "original_max_position_embeddings": original,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0 + 0.02 * i for i in range(pairs)],
            "long_factor": [1.5 + 0.25 * i for i in range(pairs)],
        },
    }


@dataclass(frozen=True)
class TinyFamily:
    """One row of the table: a model type with what its configuration adds to the usual sizes."""

    model_type: str
    about: str  # what is special about its attention
    config: dict[str, Any] = field(default_factory=dict)
    nested: bool = False  # the decoder's settings lie in `text_config`, its weights under a prefix

    def document(self) -> dict[str, Any]:
        """Return `config.json`."""
        if not self.nested:
            return {"model_type": self.model_type, **_SIZES, **self.config}
        text = {"model_type": f"{self.model_type}_text", **_SIZES, **self.config}
        tokens = {"mm_tokens_per_image": 4, "image_token_index": VOCAB - 1}
        return {
            "model_type": self.model_type,
            "text_config": text,
            "vision_config": _VISION,
            **tokens,
            **{key: text[key] for key in ("initializer_range", "tie_word_embeddings")},
        }


FAMILIES: dict[str, TinyFamily] = {
    "qwen2": TinyFamily("qwen2", "bias on queries and keys"),
    "qwen2-window": TinyFamily(
        "qwen2",
        "windows in the upper layers",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    ),
    "qwen3": TinyFamily("qwen3", "normed queries and keys"),
    "qwen3-moe": TinyFamily("qwen3_moe", "experts", _MOE),
    "llama": TinyFamily("llama", "plain"),
    "llama-llama3": TinyFamily("llama", "RoPE scaled as in Llama 3.1", {"rope_scaling": _LLAMA3}),
    "llama-linear": TinyFamily(
        "llama", "RoPE scaled linearly", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    ),
    "llama-yarn": TinyFamily("llama", "RoPE scaled by YaRN", {"rope_scaling": _YARN}),
    "llama-dynamic": TinyFamily(
        "llama", "dynamic RoPE", {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}
    ),
    "mistral": TinyFamily("mistral", "no window", {"sliding_window": None}),
    "mistral-window": TinyFamily("mistral", "a window in every layer", {"sliding_window": WINDOW}),
    "phi3": TinyFamily("phi3", "Phi-3 4k and Phi-4", {"sliding_window": None}),
    "phi3-window": TinyFamily("phi3", "a window in every layer", {"sliding_window": WINDOW}),
    "phi3-longrope": TinyFamily(
        "phi3", "long context: LongRoPE", {"sliding_window": None, **_longrope(32, 64)}
    ),
    "phi4-mini": TinyFamily(
        "phi3",
        "partial rotary, LongRoPE",
        {"sliding_window": None, "partial_rotary_factor": 0.75, **_longrope(24, 64)},
    ),
    "glm4": TinyFamily(
        "glm4",
        "partial and interleaved rotary",
        {"partial_rotary_factor": 0.5, "attention_bias": True},
    ),
    "gemma3": TinyFamily("gemma3_text", "windows, two RoPE bases, own query scale", _GEMMA3),
    "gemma3-nested": TinyFamily("gemma3", "the same in a multimodal folder", _GEMMA3, nested=True),
    "gpt-oss": TinyFamily(
        "gpt_oss",
        "sinks, alternating windows, YaRN, experts",
        {
            "sliding_window": WINDOW,
            "layer_types": _ALTERNATING,
            "rope_theta": 150000.0,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 64,
            },
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 128,
            "attention_bias": True,
        },
    ),
    "gemma2": TinyFamily(
        "gemma2",
        "soft caps on attention logits",
        {"sliding_window": WINDOW, "query_pre_attn_scalar": 64, "attn_logit_softcapping": 50.0},
    ),
    "deepseek-v3": TinyFamily(
        "deepseek_v3",
        "latent attention (MLA)",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 48,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 32,
            "qk_nope_head_dim": 32,
            "v_head_dim": 64,
            "head_dim": 32,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 64,
            "first_k_dense_replace": 1,
        },
    ),
    "qwen3-next": TinyFamily(
        "qwen3_next",
        "recurrent layers between full ones",
        {
            **_MOE,
            "shared_expert_intermediate_size": 64,
            "partial_rotary_factor": 0.25,
            "layer_types": [*["linear_attention"] * 3, "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
        },
    ),
    "llama4": TinyFamily(
        "llama4_text",
        "attention in chunks",
        {
            "attention_chunk_size": 64,
            "layer_types": ["chunked_attention", "chunked_attention"] * 2,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 128,
        },
    ),
    "stablelm": TinyFamily("stablelm", "partial rotary; on no list of ours"),
}


def build_family(name: str, seed: int = 0) -> Any:
    """Build a family's model in memory, float32 on the CPU; weights are a function of the seed."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    family = FAMILIES[name]
    document = family.document()
    config = AutoConfig.for_model(document.pop("model_type"), **document)
    classes: Any = AutoModelForImageTextToText if family.nested else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        network = classes.from_config(config, dtype=torch.float32).eval()
        for parameter_name, parameter in sorted(network.named_parameters()):
            if parameter_name.endswith("sinks"):
                parameter.copy_(torch.randn_like(parameter) * 3)
            elif parameter.dim() == 1:
                # Norms and biases are ones and zeros by default: nobody would miss them.
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return network


def write_family(folder: Path, name: str, seed: int = 0) -> Path:
    """Write a family's model as its publisher would, with the suites' tokenizer."""
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    network, tokenizer = build_family(name, seed), suite_tokenizer()
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    written = FAMILIES[name].document()
    written |= {"architectures": [type(network).__name__], "dtype": "float32"}
    text = written.get("text_config", written)
    text["eos_token_id"] = tokenizer.eos_token_id
    (folder / "config.json").write_text(json.dumps(written, indent=2))
    (folder / "generation_config.json").unlink(missing_ok=True)
    return folder
