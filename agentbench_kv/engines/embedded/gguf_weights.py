"""GGUF files as Hugging Face networks: weights are dequantised one by one, nothing is copied."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentbench_kv.engines.core.context import stretch
from agentbench_kv.engines.core.gguf_header import (
    damaged,
    read_metadata,
    read_rope_factors,
    rope_parameters,
)
from agentbench_kv.errors import KVBenchError, PrerequisiteError, UsageError

logger = logging.getLogger(__name__)

# llama.cpp's architectures with Hugging Face's model types.
FAMILIES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe"}
# Hugging Face's names of settings with llama.cpp's.
_SETTINGS = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
_EXPERTS = {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
Read = Callable[[str], Tensor]
_AT_ONCE = 1 << 22  # weights that are dequantised at once


def gguf_config(path: Path, context_limit: int = 0) -> Any:
    """Return the configuration of a file's model; UsageError if it is not supported."""
    from transformers import AutoConfig

    metadata = read_metadata(path)
    name = str(metadata.get("general.architecture"))
    if name not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise UsageError(
            f"{path.name}: the embedded engine reads GGUF files of {known}, not {name[:40]!r}; "
            "give the model's Hugging Face folder, or use --engine llamacpp"
        )
    try:
        settings = _settings(metadata, name)
        factors = read_rope_factors(path)
        rope = rope_parameters(metadata)
        _refuse(metadata, name, rope, factors)
        kind = "tensor" if factors else rope["rope_type"]
        trained = settings["max_position_embeddings"]
        if yarn := stretch(FAMILIES[name], trained, kind, context_limit):
            settings["max_position_embeddings"] = context_limit
            rope |= yarn.parameters()
    except KVBenchError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        raise damaged(path) from None
    return AutoConfig.for_model(FAMILIES[name], rope_parameters=rope, **settings)


def _settings(metadata: Mapping[str, Any], name: str) -> dict[str, Any]:
    own = {k.removeprefix(f"{name}."): v for k, v in metadata.items()}
    names = _SETTINGS | (_EXPERTS if name == "qwen3moe" else {})
    found = {ours: own[theirs] for ours, theirs in names.items() if theirs in own}
    missing = [theirs for ours, theirs in names.items() if ours not in found]
    if missing and missing != ["feed_forward_length"]:
        raise LookupError(missing[0])
    heads = found["num_attention_heads"]
    ends = [metadata.get(f"tokenizer.ggml.{role}_token_id") for role in ("eos", "eot")]
    ends = metadata.get("kvbench.eos_token_ids") or [*dict.fromkeys(ends)]
    return {
        **found,
        "num_key_value_heads": own.get("attention.head_count_kv", heads),
        "head_dim": own.get("attention.key_length", found["hidden_size"] // heads),
        "vocab_size": own.get("vocab_size") or len(metadata["tokenizer.ggml.tokens"]),
        "eos_token_id": [int(end) for end in ends if end is not None],
        "norm_topk_prob": True,  # as llama.cpp computes experts' weights
        "use_sliding_window": False,
    }


def _refuse(
    metadata: Mapping[str, Any], name: str, rope: Mapping[str, Any], factors: tuple[float, ...]
) -> None:
    own = {k.removeprefix(f"{name}."): v for k, v in metadata.items()}
    head = own.get("attention.key_length", own["embedding_length"] // own["attention.head_count"])
    reasons = {
        "a sliding window": own.get("attention.sliding_window"),
        "values of another size than keys": own.get("attention.value_length", head) != head,
        "RoPE over a part of a head": own.get("rope.dimension_count", head) != head,
        "layers with different numbers of KV heads": isinstance(
            own.get("attention.head_count_kv"), list
        ),
        "experts beside its layers": name != "qwen3moe" and own.get("expert_count"),
        "RoPE scaled twice": factors and rope["rope_type"] != "default",
        "RoPE factors of another size": factors and 2 * len(factors) != head,
    }
    if found := next((reason for reason, holds in reasons.items() if holds), ""):
        raise UsageError(
            f"{name} with {found}: the embedded engine does not read such GGUF files; give the "
            "model's Hugging Face folder"
        )


def load_gguf(path: Path, dtype: torch.dtype, context_limit: int = 0) -> Any:
    """Return a network with the weights of a GGUF file, dequantised to `dtype`, on the CPU.

    UsageError if the family is not supported, PrerequisiteError if the file lacks tensors or the
    package gguf is missing.
    """
    try:
        import gguf
    except ImportError:
        raise PrerequisiteError(
            "reading GGUF files here needs the package gguf: pip install 'agentbench-kv[llamacpp]'"
        ) from None
    from transformers import AutoModelForCausalLM

    config = gguf_config(path, context_limit)
    metadata = read_metadata(path)
    name = str(metadata["general.architecture"])
    held = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    config.tie_word_embeddings = "output.weight" not in held
    config.attention_bias = "blk.0.attn_q.bias" in held
    _say_size(path, sum(int(tensor.n_elements) for tensor in held.values()), dtype)
    made: Any = AutoModelForCausalLM  # transformers leaves this method untyped
    with torch.device("meta"):
        network: Any = made.from_config(config, dtype=dtype)

    def read(tensor: str) -> Tensor:
        if tensor not in held:
            raise PrerequisiteError(f"{path} lacks the tensor {tensor}; download it again")
        found = held[tensor]
        made = torch.empty(*map(int, reversed(found.shape)), dtype=dtype)
        step = max(1, _AT_ONCE // max(1, int(found.n_elements) // len(made)))
        for first in range(0, len(made), step):
            part = gguf.quants.dequantize(found.data[first : first + step], found.tensor_type)
            made[first : first + step] = torch.tensor(part)
        return made

    names = gguf.get_tensor_name_map(
        getattr(gguf.MODEL_ARCH, name.upper()), config.num_hidden_layers
    )
    state = {key: _weight(key, names, read, config) for key in _wanted(network)}
    network.load_state_dict(state, strict=False, assign=True)
    network.tie_weights()
    _place_rope(network, read_rope_factors(path))
    return network


def _say_size(path: Path, weights: int, dtype: torch.dtype) -> None:
    """Say what the weights take in memory; PrerequisiteError if this machine has less."""
    size = weights * dtype.itemsize
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    name = str(dtype).removeprefix("torch.")
    if size > whole:
        raise PrerequisiteError(
            f"{path.name} takes {size / 1e9:.1f} GB as {name}, and this machine has "
            f"{whole / 1e9:.1f}; use --dtype bfloat16, or --engine llamacpp (as it is)"
        )
    logger.info("%s: %.1f GB of weights as %s", path.name, size / 1e9, name)


def _wanted(network: Any) -> list[str]:
    tied = network.config.tie_word_embeddings
    return [key for key in network.state_dict() if not (tied and key == "lm_head.weight")]


def _weight(key: str, names: Any, read: Read, config: Any) -> Tensor:
    """Return what Hugging Face calls `key`."""
    if key.endswith("mlp.experts.gate_up_proj"):
        block = f"blk.{key.split('.')[2]}"
        halves = [read(f"{block}.ffn_{part}_exps.weight") for part in ("gate", "up")]
        return torch.cat(halves, 1)
    if key.endswith("mlp.experts.down_proj"):
        return read(f"blk.{key.split('.')[2]}.ffn_down_exps.weight")
    stem, _, kind = key.rpartition(".")
    found = names.get_name(stem)
    if found is None:
        raise UsageError(f"a weight of {config.model_type}, {key}, has no name in GGUF files")
    tensor = read(f"{found}.{kind}")
    return _in_halves(key, tensor, config) if config.model_type == "llama" else tensor


def _in_halves(key: str, tensor: Tensor, config: Any) -> Tensor:
    """Undo llama.cpp's order of a Llama's queries and keys, whose RoPE turns neighbours."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    count = heads.get(key.split(".")[-2])
    if count is None:
        return tensor
    pairs = tensor.reshape(count, len(tensor) // count // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)


def _place_rope(network: Any, factors: tuple[float, ...]) -> None:
    """Give a network that was built without memory its RoPE, scaled by the file's tensor if any."""
    rotary = type(network.model.rotary_emb)(network.config)
    if factors:
        rotary.inv_freq = rotary.inv_freq / torch.tensor(factors)
        rotary.original_inv_freq = rotary.inv_freq
    network.model.rotary_emb = rotary
