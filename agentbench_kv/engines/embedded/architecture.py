"""What a decoder's configuration says of its attention, and what of it this engine computes.

The only place that knows which of a model's layers see every row and which a window of the last
ones. Methods, budgets and captures count the former, from 0; the latter keep their rows to
themselves (docs/decisions, "windows").
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from agentbench_kv.accounting import LayerReach
from agentbench_kv.errors import UsageError
from agentbench_kv.methods.base import Method

# Model types whose code in transformers was found exact with this engine's attention.
FAMILIES = (
    *("qwen2", "qwen3", "qwen3_moe", "llama", "mistral", "phi3", "glm4", "gemma3_text", "gpt_oss"),
)
INTERLEAVED = ("glm4",)  # RoPE turns neighbouring channels, not a half against the other
_WINDOWED = ("mistral", "phi3", "qwen3_moe")  # their window, if there is one, is of every layer
_FULL, _SLIDING = "full_attention", "sliding_attention"
_RECURRENT = ("linear_attention", "mamba", "recurrent", "conv")


class LayerPlace(NamedTuple):
    """Where a model's layer keeps its rows: its number among the layers of its kind."""

    number: int
    windowed: bool


@dataclass(frozen=True)
class Attention:
    """The layers of a decoder; `window` is how many rows the windowed ones see, 0 without any."""

    places: tuple[LayerPlace, ...]
    window: int = 0
    interleaved: bool = False  # RoPE's pairs of channels are neighbours
    partial: bool = False  # RoPE leaves some channels of a head alone

    @cached_property
    def full(self) -> int:
        """Layers that see every row: those whose rows a method chooses among."""
        return sum(not place.windowed for place in self.places)

    @property
    def windowed(self) -> int:
        return len(self.places) - self.full

    def details(self) -> dict[str, str]:
        """Return what a run's record says of windows; nothing of models that have none."""
        return LayerReach(self.full, self.windowed, self.window).document()

    def check_method(self, method: Method) -> None:
        """Refuse a method that these layers cannot be given to."""
        if not self.full and (method.compresses or method.spans):
            raise UsageError(
                f"every layer of the model keeps a window of {self.window} tokens, so no method "
                "has anything to evict; use --method full, or set sliding_window to null in "
                "config.json if the model allows it"
            )
        if self.window and "memory_blocks" in method.needs:
            raise UsageError(
                f"layers of the model keep a window of {self.window} tokens and would see nothing "
                f"of what {method.label} brings back; choose another model"
            )
        if method.needs_calibration:
            self.check_calibration(method.label)

    def check_calibration(self, what: str) -> None:
        if self.interleaved or self.partial:
            raise UsageError(
                f"{what} reads queries as pairs of channels that RoPE turns, first half against "
                "second; this model's RoPE turns others"
            )


def read_attention(config: Any) -> Attention:
    """Describe the attention of a transformers configuration; UsageError if it is not exact here.

    Parameters
    ----------
    config : transformers' configuration of a decoder, `text_of` of a multimodal one
    """
    kinds = list(getattr(config, "layer_types", None) or [])
    window = int(getattr(config, "sliding_window", None) or 0)
    _refuse(config, set(kinds))
    if window >= config.max_position_embeddings:
        window = 0
    everywhere = _SLIDING if config.model_type in _WINDOWED else _FULL
    kinds = kinds or [everywhere] * int(config.num_hidden_layers)
    counts: Counter[bool] = Counter()
    places = []
    for kind in kinds:
        windowed = bool(window) and kind == _SLIDING
        places.append(LayerPlace(counts[windowed], windowed))
        counts[windowed] += 1
    return Attention(
        tuple(places),
        window if counts[True] else 0,
        config.model_type in INTERLEAVED,
        rotary_share(config) != 1,
    )


def text_of(config: Any) -> Any:
    """Return the decoder's part of a configuration: its `text_config` if it has one."""
    return getattr(config, "text_config", None) or config


def rotary_share(config: Any) -> float:
    """Return the share of a head's channels that RoPE turns."""
    rope = getattr(config, "rope_parameters", None) or {}
    return float(rope.get("partial_rotary_factor") or 1.0)


def _refuse(config: Any, kinds: set[str]) -> None:
    """Refuse what would be computed wrongly, or nobody has checked, with the reason."""
    reason = next((why for holds, why in _reasons(config, kinds) if holds), "")
    if reason:
        raise UsageError(
            f"model family {config.model_type!r} is not supported by the embedded engine: {reason}"
        )


def _reasons(config: Any, kinds: set[str]) -> list[tuple[bool, str]]:
    def has(name: str) -> bool:
        return bool(getattr(config, name, None))

    recurrent = sorted(kind for kind in kinds if kind.startswith(_RECURRENT))
    unknown = sorted(kinds - {_FULL, _SLIDING})
    return [
        (has("kv_lora_rank"), "its latent attention (MLA) caches no keys and values a head"),
        (
            bool(recurrent),
            f"its {', '.join(recurrent)} layers keep a state instead of rows, one a session, "
            "which this engine does not hold",
        ),
        (
            has("attention_chunk_size") or "chunked_attention" in kinds,
            "its layers attend in chunks (attention_chunk_size)",
        ),
        (has("attn_logit_softcapping"), "it caps attention logits (attn_logit_softcapping)"),
        (has("use_bidirectional_attention"), "its attention is not causal"),
        (bool(unknown), f"its layers are of unknown types: {', '.join(unknown)}"),
        (
            config.model_type not in FAMILIES,
            f"nobody has checked it; supported: {', '.join(FAMILIES)}",
        ),
        (_SLIDING in kinds and not has("sliding_window"), "its layers slide over no window"),
    ]
