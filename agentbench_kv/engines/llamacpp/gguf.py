"""GGUF files made of Hugging Face folders, or of random weights.

Conversion is for models small enough to check to the bit, of the families whose attention the
engine knows. Real models are better converted, and quantised, with llama.cpp's own tools.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from agentbench_kv.engines.core.context import rope_of
from agentbench_kv.engines.core.gguf_header import (
    CONTROL,
    NORMAL,
    ROPE_FACTORS,
    UNUSED,
    USER_DEFINED,
)
from agentbench_kv.engines.core.gguf_tokenizer import pretokenizer_name
from agentbench_kv.engines.embedded.model import read_document
from agentbench_kv.errors import KVBenchError, PrerequisiteError, UsageError

Array = npt.NDArray[np.float32]


# Hugging Face's model types with llama.cpp's name of the architecture.
ARCHITECTURES = {
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "llama": "llama",
    "mistral": "llama",
}
_EXPERT = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")
NO_TOKENIZER = "--no-tokenizer"


def convert(folder: Path, out: Path, *, tokenizer: bool = True) -> Path:
    """Write the model in `folder` to the GGUF file `out`, weights as float32; return `out`.

    An interrupted conversion leaves nothing under `out`. The engine needs no tokenizer in the file
    where it has the folder's. A UsageError names a family, a RoPE or a tokenizer that the file
    could not express, a PrerequisiteError a missing file or package.
    """
    try:
        import gguf
    except ImportError:
        raise PrerequisiteError(
            "converting needs the package gguf: pip install 'agentbench-kv[llamacpp]', "
            "or kvbench env create llamacpp"
        ) from None
    if out.exists() and not out.is_file():
        raise UsageError(f"{out} is no file; name one to write")
    config = read_document(folder / "config.json")
    architecture = _architecture(config)
    draft = out.with_name(f".{out.name}.part")
    out.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(draft, architecture)
    try:
        write_shape(writer, config, architecture)
        _write_special_ids(writer, folder, config)
        if tokenizer:
            _write_tokenizer(writer, folder, config)
        else:
            writer.add_tokenizer_model("none")
        for name, tensor in _tensors(folder, config, architecture):
            writer.add_tensor(name, tensor)
        write_file(writer)
        draft.replace(out)
    finally:
        draft.unlink(missing_ok=True)
    return out


def write_file(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _architecture(config: Mapping[str, Any]) -> str:
    family = config.get("model_type")
    if family not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UsageError(f"kvbench convert knows {known}, not {family!r}; use llama.cpp's own")
    kind = _rope(config)[0]
    if kind not in ("default", "linear", "yarn", "llama3"):
        raise UsageError(f"kvbench convert does not write RoPE {kind!r}; use llama.cpp's own")
    window = config.get("sliding_window")
    if window and (family == "mistral" or config.get("use_sliding_window")):
        raise UsageError("the model attends in a sliding window, which the engine refuses")
    sparse = config.get("decoder_sparse_step", 1) != 1 or config.get("mlp_only_layers")
    if family == "qwen3_moe" and (sparse or not config.get("norm_topk_prob")):
        raise UsageError("the model mixes its experts in a way that llama.cpp does not compute")
    return ARCHITECTURES[family]


def _rope(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    rope = rope_of(config)
    return str(rope.get("rope_type") or rope.get("type") or "default"), rope


def _write_rope(writer: Any, config: Mapping[str, Any], head_dim: int) -> None:
    """Add scaled RoPE: to the header, or as Llama's converter does by a tensor."""
    import gguf

    kind, rope = _rope(config)
    factor = float(rope.get("factor") or 1.0)
    original = rope.get("original_max_position_embeddings") or config["max_position_embeddings"]
    if kind == "llama3":
        writer.add_tensor(ROPE_FACTORS, np.array(llama3_factors(config, head_dim), np.float32))
    elif kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(factor)
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(original)
        usual = 0.1 * math.log(factor) + 1.0
        given = rope.get("attention_factor") or usual
        if rope.get("mscale") or not rope.get("truncate", True) or given != usual:
            raise UsageError("kvbench convert writes YaRN as it is usual; use llama.cpp's own")


def llama3_factors(config: Mapping[str, Any], head_dim: int) -> list[float]:
    """Return what Llama 3.1's scaling divides each pair's frequency by."""
    _, rope = _rope(config)
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    factor, original = float(rope["factor"]), rope["original_max_position_embeddings"]
    found = []
    for pair in range(head_dim // 2):
        turns = original * _theta(config) ** (-2 * pair / head_dim) / (2 * math.pi)
        share = min(max((turns - low) / (high - low), 0.0), 1.0)
        found.append(1 / ((1 - share) / factor + share))
    return found


def _theta(config: Mapping[str, Any]) -> float:
    return float(config.get("rope_theta") or rope_of(config).get("rope_theta") or 1e4)


def write_shape(writer: Any, config: Mapping[str, Any], architecture: str) -> None:
    """Add what a `config.json` says of a model's shape to a `gguf.GGUFWriter`."""
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_freq_base(_theta(config))
    _write_rope(writer, config, head_dim)
    writer.add_layer_norm_rms_eps(config.get("rms_norm_eps", 1e-6))  # as transformers has it
    writer.add_vocab_size(config["vocab_size"])
    if architecture == "llama":
        writer.add_rope_dimension_count(head_dim)
    if architecture == "qwen3moe":
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def _write_tokenizer(writer: Any, folder: Path, config: Mapping[str, Any]) -> None:
    tokenizer = read_document(folder / "tokenizer.json")
    model = tokenizer["model"]
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        raise UsageError("the tokenizer is no byte-level BPE; use the converter of llama.cpp")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pretokenizer_name(tokenizer))
    tokens, types = _vocabulary(tokenizer, config["vocab_size"])
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    merges = [" ".join(m) if isinstance(m, list) else m for m in model["merges"]]
    writer.add_token_merges(merges)
    writer.add_add_bos_token(False)
    if template := _chat_template(folder):
        writer.add_chat_template(template)


def _vocabulary(tokenizer: Mapping[str, Any], size: int) -> tuple[list[str], list[int]]:
    """Return the text and the GGUF type of every id; ids without a token are padding."""
    words = {index: text for text, index in tokenizer["model"]["vocab"].items()}
    added = {token["id"]: token for token in tokenizer.get("added_tokens", ())}
    tokens, types = [], []
    for index in range(size):
        if index in added:
            tokens.append(added[index]["content"])
            types.append(CONTROL if added[index]["special"] else USER_DEFINED)
        else:
            tokens.append(words.get(index, f"[PAD{index}]"))
            types.append(NORMAL if index in words else UNUSED)
    return tokens, types


def _write_special_ids(writer: Any, folder: Path, config: Mapping[str, Any]) -> None:
    generation = folder / "generation_config.json"
    chosen = {**config, **(read_document(generation) if generation.exists() else {})}
    ends = chosen.get("eos_token_id")
    ends = ends if isinstance(ends, list) else [ends]
    if ends[0] is not None:
        writer.add_eos_token_id(ends[0])
        writer.add_array("kvbench.eos_token_ids", ends)
    for role, add in (("bos", writer.add_bos_token_id), ("pad", writer.add_pad_token_id)):
        if chosen.get(f"{role}_token_id") is not None:
            add(chosen[f"{role}_token_id"])


def _chat_template(folder: Path) -> str:
    own = folder / "chat_template.jinja"
    if own.exists():
        return own.read_text(encoding="utf-8")
    path = folder / "tokenizer_config.json"
    return str(read_document(path).get("chat_template") or "") if path.exists() else ""


def _tensors(
    folder: Path, config: Mapping[str, Any], architecture: str
) -> Iterator[tuple[str, Array]]:
    """Yield GGUF names with float32 weights."""
    from gguf import MODEL_ARCH, get_tensor_name_map
    from safetensors import safe_open

    names = get_tensor_name_map(MODEL_ARCH[architecture.upper()], config["num_hidden_layers"])
    experts: dict[str, dict[int, Array]] = {}  # of layers that are not complete yet
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise PrerequisiteError(f"no *.safetensors in {folder}; give a model folder")
    for path in files:
        with safe_open(path, framework="pt") as weights:
            for key in weights.keys():  # noqa: SIM118  not a mapping
                if key == "lm_head.weight" and config.get("tie_word_embeddings"):
                    continue
                if expert := _EXPERT.fullmatch(key):
                    layer, number, part = expert.groups()
                    group = experts.setdefault(f"blk.{layer}.ffn_{part}_exps.weight", {})
                    group[int(number)] = weights.get_tensor(key).to(torch.float32).numpy()
                    if len(group) == config["num_experts"]:
                        ordered = [group.pop(each) for each in sorted(group)]
                        yield f"blk.{layer}.ffn_{part}_exps.weight", np.stack(ordered)
                    continue
                stem, _, kind = key.rpartition(".")
                name = names.get_name(stem) if kind in ("weight", "bias") else None
                if name is None:
                    raise UsageError(
                        f"kvbench convert does not know the tensor {key}; use llama.cpp's own"
                    )
                tensor = weights.get_tensor(key).to(torch.float32).numpy()
                if architecture == "llama":
                    tensor = _interleaved(key, tensor, config)
                yield f"{name}.{kind}", np.ascontiguousarray(tensor)


def _interleaved(key: str, tensor: Array, config: Mapping[str, Any]) -> Array:
    """Reorder the rows of queries and keys: llama.cpp's Llama rotates neighbours, not halves."""
    heads = config["num_attention_heads"]
    if "k_proj" in key:
        heads = config.get("num_key_value_heads") or heads
    elif "q_proj" not in key:
        return tensor
    halves = tensor.reshape(heads, 2, len(tensor) // heads // 2, *tensor.shape[1:])
    return halves.swapaxes(1, 2).reshape(tensor.shape)


@dataclass(frozen=True)
class MadeConfig:
    """What `config.json` says of a Qwen3, in its words; weights are float32 or float16."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    rope_theta: float = 1e6
    rms_norm_eps: float = 1e-6
    dtype: str = "float32"


TINY = MadeConfig(4, 128, 4, 2, 32, 256, 512, 8192)
# 8 KiB of float16 keys and values per token; large enough that a prefill costs something.
MID = MadeConfig(8, 512, 8, 4, 64, 1536, 4096, 32768, dtype="float16")


def make_model(path: Path, config: MadeConfig, seed: int = 0) -> Path:
    """Write a GGUF file with random weights and without a tokenizer; return its path."""
    import gguf

    writer = gguf.GGUFWriter(path, "qwen3")
    write_shape(writer, vars(config), "qwen3")
    writer.add_tokenizer_model("none")
    for name, tensor in _weights(config, seed):
        writer.add_tensor(f"{name}.weight", tensor)
    write_file(writer)
    return path


def _weights(config: MadeConfig, seed: int) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    hidden, inner, vocabulary = config.hidden_size, config.intermediate_size, config.vocab_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    draw = np.random.default_rng(seed)

    def matrix(rows: int, columns: int, scale: float = 1.0) -> npt.NDArray[Any]:
        values: npt.NDArray[Any] = draw.standard_normal((rows, columns), np.float32)
        return np.asarray(values * (scale / columns**0.5), config.dtype)

    yield "token_embd", matrix(vocabulary, hidden, hidden**0.5)
    yield "output_norm", np.ones(hidden, np.float32)
    yield "output", matrix(vocabulary, hidden, 2.0)
    # Above 1, so that attention is uneven enough for an eviction to show in the logits.
    gain = np.full(config.head_dim, 1.5, np.float32)
    for layer in range(config.num_hidden_layers):
        block = f"blk.{layer}"
        yield f"{block}.attn_norm", np.ones(hidden, np.float32)
        yield f"{block}.ffn_norm", np.ones(hidden, np.float32)
        yield f"{block}.attn_q", matrix(queries, hidden)
        yield f"{block}.attn_k", matrix(keys, hidden)
        yield f"{block}.attn_v", matrix(keys, hidden)
        yield f"{block}.attn_output", matrix(hidden, queries)
        yield f"{block}.attn_q_norm", gain
        yield f"{block}.attn_k_norm", gain
        yield f"{block}.ffn_gate", matrix(inner, hidden)
        yield f"{block}.ffn_up", matrix(inner, hidden)
        yield f"{block}.ffn_down", matrix(hidden, inner)


def main() -> int:
    """Convert FOLDER to OUT; errors of the user are one line on stderr and exit code 2."""
    folder, out = map(Path, sys.argv[1:3])
    try:
        convert(folder, out, tokenizer=sys.argv[3:] != [NO_TOKENIZER])
    except KVBenchError as error:
        print(error, file=sys.stderr)  # noqa: T201  the parent process reads it
        return error.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
