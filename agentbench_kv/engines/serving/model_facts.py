"""What a model folder says of a model, and how much cache a server on a CPU gets for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentbench_kv.engines.base import EngineOptions
from agentbench_kv.engines.core.kv_dtype import BLOCK, BLOCKS, KV_DTYPES
from agentbench_kv.engines.core.ledger import WindowBytes
from agentbench_kv.engines.embedded.model import MOVING_ROPE, end_ids, free_memory, read_document
from agentbench_kv.errors import PrerequisiteError
from agentbench_kv.phases.tokens import quiet_library

# Model types whose keys were found to turn by `core.policy.rope_frequencies`.
TURNABLE = ("llama", "mistral", "phi3", "qwen2", "qwen3", "qwen3_moe")
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class ModelFacts:
    """Shapes and limits of a decoder, and what is special about its attention."""

    family: str
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    context_limit: int  # last position + 1
    eos_token_ids: tuple[int, ...]
    rope_type: str = "default"
    rope_share: float = 1.0  # of a head's channels that RoPE turns
    rope_original: int = 0  # context before RoPE was scaled, if the config says
    # How many tokens each layer looks back on, 0 for all; empty if all layers look back on all.
    windows: tuple[int, ...] = ()
    extras: tuple[str, ...] = ()  # what attention does besides, in words: sinks, soft caps
    # Why eviction row by row would be wrong or has no rows to evict, in words.
    unevictable: str = ""
    nested: bool = False  # a multimodal model's decoder
    vocabulary: int | None = None  # ids that the model knows, from 0; None if it does not say
    stored_bytes: int = 0  # of the weights
    stored_dtype: str = ""

    @property
    def window(self) -> int:
        """The largest window of any layer; 0 without windows."""
        return max(self.windows, default=0)

    @property
    def full_layers(self) -> int:
        """Layers that look back on everything, in which a method can evict."""
        return self.layers - sum(window > 0 for window in self.windows)

    def groups_of(self, layers: int) -> int:
        """Return how many KV cache groups vLLM makes of so many layers of one kind.

        All groups have as many layers as the kind of which there are fewer, or about as many.
        """
        fewer, more = sorted((self.full_layers, self.layers - self.full_layers))
        return -(-layers // (more if more < 1.5 * fewer or not fewer else fewer))

    @property
    def groups(self) -> int:
        return self.groups_of(self.full_layers) + self.groups_of(self.layers - self.full_layers)

    def unturnable(self) -> str:
        """Say why keys cannot be turned to other positions; empty if they can."""
        if self.rope_share != 1:
            return f"{self.family} here turns {self.rope_share:.0%} of a head"
        if self.rope_type in MOVING_ROPE:
            return f"RoPE {self.rope_type!r} has frequencies that change with the length"
        if self.window:
            return f"{self.family} here has windows, whose keys would have to turn along"
        return "" if self.family in TURNABLE else f"{self.family} has not been checked"

    def bytes_per_token(self, dtype: str) -> int:
        """Keys and values of a token in the layers that look back on everything."""
        return self.full_layers * self._layer_bytes(dtype)

    def window_bytes(self, dtype: str) -> WindowBytes | None:
        """Return what a session reads besides, in layers with a window; None without any."""
        layers = self.layers - self.full_layers
        return WindowBytes(layers * self._layer_bytes(dtype), self.window) if layers else None

    def held_bytes(self, kv_dtype: str, dtype: str) -> Callable[[int], int] | None:
        """Return what gives the bytes of so many rows where not all take the same."""
        form = KV_DTYPES.get(kv_dtype)
        if form is None or not form.residual:
            return None
        return form.held(self.full_layers * self.kv_heads, self.head_dim, _BYTES[dtype])

    def pool_bytes(self, dtype: str) -> int:
        """Bytes of a token's place in a pool for all layers."""
        return self.layers * self._layer_bytes(dtype)

    def weight_bytes(self, dtype: str) -> int:
        """About what the weights take once they are loaded."""
        return self.stored_bytes * max(1, _BYTES[dtype] // _BYTES.get(self.stored_dtype, 4))

    def _layer_bytes(self, dtype: str) -> int:
        """Return bytes of a token in a layer; `dtype` may be a precision of cached rows."""
        if dtype in _BYTES:
            return 2 * self.kv_heads * self.head_dim * _BYTES[dtype]
        if dtype in BLOCKS:
            return 2 * self.kv_heads * self.head_dim // BLOCK * BLOCKS[dtype]
        return KV_DTYPES[dtype.partition("_")[0]].row_bytes(self.kv_heads, self.head_dim)


def read_model(path: Path) -> ModelFacts:
    """Read a model folder's config; PrerequisiteError if it lacks what a decoder's config has."""
    whole = read_document(path / "config.json")
    try:
        config, nested = decoder_config(path), isinstance(whole.get("text_config"), dict)
        heads = int(config["num_attention_heads"])
        kv_heads = int(config.get("num_key_value_heads") or heads)
        head_dim = int(config.get("head_dim") or int(config["hidden_size"]) // heads)
        return ModelFacts(
            *(str(config["model_type"]), int(config["num_hidden_layers"]), heads, kv_heads),
            *(head_dim, int(config["max_position_embeddings"]), _eos_ids(path, config)),
            *_rope(config),
            windows=_windows(config),
            extras=_extras(config),
            unevictable=_unevictable(config, whole),
            nested=nested,
            vocabulary=None if (size := config.get("vocab_size")) is None else int(size),
            stored_bytes=sum(file.stat().st_size for file in path.glob("*.safetensors")),
            stored_dtype=str(whole.get("dtype") or whole.get("torch_dtype") or ""),
        )
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise PrerequisiteError(
            f"{path / 'config.json'} is not a decoder's ({error}); give a Hugging Face model folder"
        ) from None


def decoder_config(path: Path) -> dict[str, Any]:
    """Return a decoder's configuration, with what its family has where the file says nothing.

    A multimodal model's is in `text_config`. What transformers does not know counts as written.
    """
    from transformers import AutoConfig

    whole = read_document(path / "config.json")
    text = whole.get("text_config")
    written: dict[str, Any] = text if isinstance(text, dict) else whole
    try:
        with quiet_library():
            found = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
            known: dict[str, Any] = getattr(found, "text_config", found).to_dict()
    except Exception:  # noqa: BLE001  a family or a value that transformers refuses, in any way
        return {"model_type": whole.get("model_type"), **written}
    return written | known


def _windows(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return each layer's window; without `layer_types` a window is of all layers."""
    window = int(config.get("sliding_window") or 0)
    if not window or config.get("use_sliding_window") is False:
        return ()
    layers = int(config["num_hidden_layers"])
    kinds = config.get("layer_types") or [_SLIDING] * layers
    found = tuple(window if kind == _SLIDING else 0 for kind in kinds)
    return found if any(found) else ()


def _extras(config: Mapping[str, Any]) -> tuple[str, ...]:
    there = {
        "attention sinks": config.get("model_type") == "gpt_oss",
        "capped attention logits": bool(config.get("attn_logit_softcapping")),
    }
    return tuple(name for name, has in there.items() if has)


# Keys that configurations of models with recurrent layers have, where `layer_types` is missing.
_RECURRENT = ("layers_block_type", "block_types", "hybrid_override_pattern", "mamba_d_state")
_ALIBI = ("bloom", "mpt", "baichuan")


def _unevictable(config: Mapping[str, Any], whole: Mapping[str, Any]) -> str:
    kinds = set(config.get("layer_types") or ()) - {_FULL, _SLIDING}
    chunks = [
        key for key in ("attention_chunk_size", "dual_chunk_attention_config") if config.get(key)
    ]
    recurrent = bool(kinds - {"chunked_attention"}) or any(config.get(key) for key in _RECURRENT)
    alibi = config.get("alibi") or config.get("model_type") in _ALIBI
    reasons = {
        "latent attention (MLA), which caches no keys and values of heads": bool(
            config.get("kv_lora_rank")
        ),
        f"layers that cache a state instead of rows ({', '.join(sorted(kinds))})": recurrent,
        f"attention in chunks ({', '.join(chunks)})": bool(chunks or kinds),
        "attention by distance (ALiBi), which rows that moved would change": bool(alibi),
        "layers that share another one's cache": bool(config.get("num_kv_shared_layers")),
        "an encoder or cross attention": bool(
            whole.get("is_encoder_decoder") or config.get("cross_attention_layers")
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _rope(config: Mapping[str, Any]) -> tuple[str, float, int]:
    """Return the kind of RoPE, the share of a head that it turns, and its original context."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise TypeError("its RoPE is no JSON object")
    # Gemma 3 has one for each kind of layer.
    rope = rope.get(_FULL) or rope
    kind = rope.get("rope_type") or rope.get("type") or "default"
    given = [each.get("partial_rotary_factor") for each in (rope, config)]
    share = next((float(share) for share in given if share is not None), 1.0)
    key = "original_max_position_embeddings"
    return str(kind), share, int(rope.get(key) or config.get(key) or 0)


def _eos_ids(path: Path, config: dict[str, Any]) -> tuple[int, ...]:
    generation = path / "generation_config.json"
    found = read_document(generation).get("eos_token_id") if generation.exists() else None
    return end_ids(config.get("eos_token_id") if found is None else found, path / "config.json")


@dataclass(frozen=True)
class CpuRoom:
    """What a server on a CPU has for its cache."""

    tokens: int  # that it gets: all sessions' whole contexts, if they fit into `most`
    most: int  # half of the memory that is free beside the weights
    bytes_per_token: int

    def said(self) -> str:
        """Say it for a run's record."""
        return f"{self.tokens} tokens, {self.tokens * self.bytes_per_token / 2**30:.2f} GiB"


def room_on_cpu(facts: ModelFacts, options: EngineOptions, context: int) -> CpuRoom:
    """Size the cache of a server on a CPU for as many sessions of `context` as run at once."""
    size = facts.pool_bytes(options.kv_dtype or options.dtype)
    weights = 0 if options.load_format == "dummy" else facts.weight_bytes(options.dtype)
    most = max(0, free_memory() - weights) // 2 // size
    return CpuRoom(min(context * options.concurrency, most), most, size)
