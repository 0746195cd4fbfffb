"""The reference: a plain Hugging Face model that is blind to what was evicted.

It reads all ids of a session in one pass. Every query sees the tokens that were cached when it was
computed, per layer and head, and no others. Where positions are the cache's, keys are taken before
RoPE: whenever a query is computed, every key it may see is rotated by its row in the cache, and the
query by its own, the last one, as StreamingLLM's authors do.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from agentbench_kv.conformance.driver import SessionTrace

TOLERANCE = 1e-4
"""Logits that differ by less are equal."""

REFERENCE_ATTENTION = "kvbench_masked_reference"


@dataclass(frozen=True)
class ReferenceTensors:
    """What the reference computed in layers with full attention.

    Before RoPE where positions are the cache's; queries scaled so that their logits are q·k/√d.
    """

    queries: list[Tensor] = field(default_factory=list)  # [q_heads, n, head_dim]
    keys: list[Tensor] = field(default_factory=list)  # [kv_heads, n, head_dim]
    values: list[Tensor] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)  # attention probabilities [q_heads, n, n]


def visible(trace: SessionTrace, layers: int, heads: int) -> Tensor:
    """Return which keys each query may see, [layers, heads, queries, keys] of bool."""
    fed = len(trace.tokens) - 1
    causal = torch.ones(fed, fed, dtype=torch.bool).tril()
    allowed = causal.expand(layers, heads, fed, fed).clone()
    for event in trace.events:
        survives = torch.zeros(layers, heads, fed, dtype=torch.bool)
        survives.scatter_(2, event.kept, True)
        survives[:, :, event.logical :] = True
        # Not `&=`: a span that came back is visible again.
        allowed[:, :, event.logical :, : event.logical] = survives[:, :, None, : event.logical]
    return allowed


def cache_rows(trace: SessionTrace, layers: int, heads: int) -> Tensor:
    """Return each key's cache row when each query was computed, [layers, heads, queries, keys].

    An event names the rows it left in their order, and what is fed later lies behind them; so a
    span that came back at the end has rows behind those of younger tokens. Rows of keys that are
    not `visible` mean nothing.
    """
    fed = len(trace.tokens) - 1
    rows = torch.arange(fed).expand(layers, heads, fed, fed).clone()
    for event in trace.events:
        held = event.kept.shape[-1]
        following = torch.zeros(layers, heads, fed, dtype=torch.int64)
        following.scatter_(2, event.kept, torch.arange(held).expand_as(event.kept))
        following[:, :, event.logical :] = held + torch.arange(fed - event.logical)
        rows[:, :, event.logical :] = following[:, :, None]
    return rows


def reference_logits(
    model: Any,
    tokens: Sequence[int],
    allowed: Tensor,
    capture: ReferenceTensors | None = None,
    *,
    positions: str = "logical",
    rows: Tensor | None = None,
) -> Tensor:
    """Read `tokens` in one pass under a mask per (layer, head); return logits [tokens, vocab].

    `allowed` is [layers, heads, tokens, tokens], of the layers with full attention; heads are KV
    heads, or query heads where each has its own cache. `capture` is filled with what these layers
    computed. With positions `logical` RoPE goes by the place in the session, with `cache` by the
    row in the cache: `rows` as `cache_rows` gives them, or visible keys in the order of the
    session. Layers that see a window see it whole, as transformers masks it.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

    masks = ALL_MASK_ATTENTION_FUNCTIONS["eager"]
    AttentionMaskInterface.register(REFERENCE_ATTENTION, masks)
    plain = copy.deepcopy(model)
    ropes = remove_rotary(plain, len(tokens)) if positions == "cache" else None
    if ropes is not None and rows is None:
        rows = allowed.cumsum(-1) - 1
    reading = _Reading(allowed, ropes, rows, capture, decoder_config(model).max_position_embeddings)
    # Not handed to the model: some families' code passes on only what it knows itself.
    AttentionInterface.register(REFERENCE_ATTENTION, partial(_masked_attention, reading))
    plain.set_attn_implementation(REFERENCE_ATTENTION)
    with torch.inference_mode():
        output = plain(input_ids=torch.tensor([list(tokens)]), use_cache=False)
    if len(allowed) not in (len(reading.full), decoder_config(model).num_hidden_layers):
        raise ValueError(
            f"the cache has {len(allowed)} layers, the model {len(reading.full)} with full "
            "attention"
        )
    logits: Tensor = output.logits[0].float()
    return logits


@dataclass
class _Reading:
    """What the reference's attention is told of a session."""

    allowed: Tensor
    ropes: Ropes | None
    rows: Tensor | None
    capture: ReferenceTensors | None
    context: int
    full: list[int] = field(default_factory=list)  # layers with full attention, as they come


def _masked_attention(
    reading: _Reading,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float,
    **about: Any,
) -> tuple[Tensor, Tensor]:
    """Call the model's own eager attention under transformers' mask and ours."""
    n = query.shape[2]
    eager = sys.modules[type(module).__module__].eager_attention_forward
    window = about.get("sliding_window")
    windowed = window is not None and window < reading.context
    rows = torch.arange(n).expand(key.shape[1], n, n)
    mask = attention_mask
    if not windowed:
        number = len(reading.full)
        reading.full.append(int(module.layer_idx))
        hidden = ~_repeated(reading.allowed[number], query)
        mask = mask.masked_fill(hidden, torch.finfo(mask.dtype).min)
        rows = rows if reading.rows is None else reading.rows[number]
    given = (query, key)
    if reading.ropes is not None:
        rope = reading.ropes.windows if windowed else reading.ropes.full
        keys = _repeated(key[0], query)
        logits = relative_logits(query[0], keys, _repeated(rows, query), rope)
        # Against the identity, eager attention takes the queries for its logits, unscaled.
        given = (logits.to(query.dtype)[None], torch.eye(n).expand(1, key.shape[1], n, n))
    output, weights = eager(module, *given, value, mask, scaling=scaling, **about)
    if reading.capture is not None and not windowed:
        as_scored = query[0] * (scaling * query.shape[-1] ** 0.5)
        reading.capture.queries.append(as_scored)
        reading.capture.keys.append(key[0].clone())
        reading.capture.values.append(value[0].clone())
        reading.capture.weights.append(weights[0])
    return output, weights


def _repeated(heads: Tensor, query: Tensor) -> Tensor:
    """Give every query head [1, q_heads, ...] its copy of what its KV head has [heads, ...]."""
    return heads.repeat_interleave(query.shape[1] // heads.shape[0], 0)


def largest_difference(model: Any, trace: SessionTrace, positions: str = "logical") -> float:
    """Return the largest absolute difference between recorded and masked-reference logits."""
    size = cache_size(model, trace)
    allowed = visible(trace, *size)
    rows = cache_rows(trace, *size) if positions == "cache" else None
    expected = reference_logits(model, trace.tokens[:-1], allowed, positions=positions, rows=rows)
    return max(
        float((logits - expected[position - 1]).abs().max())
        for position, logits in trace.logits.items()
    )


def cache_size(model: Any, trace: SessionTrace) -> tuple[int, int]:
    """Return how many layers and heads the engine's cache had, as its events show."""
    if trace.events:
        layers, heads, _ = trace.events[0].kept.shape
        return layers, heads
    config = decoder_config(model)
    return int(config.num_hidden_layers), int(config.num_key_value_heads)


def decoder_config(model: Any) -> Any:
    """Return the configuration of the decoder, which a multimodal model has inside."""
    return getattr(model.config, "text_config", None) or model.config


def decoder_of(model: Any) -> Any:
    """Return the decoder itself: layers, and the rotary embedding before them."""
    return getattr(model.model, "language_model", model.model)


def reference_error(model: Any, tokens: Sequence[int], positions: str = "logical") -> float:
    """Return how far the reference without evictions is from the model's own eager attention."""
    trace = SessionTrace([*tokens, 0])
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("eager")
    with torch.inference_mode():
        eager = plain(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0]
    everything = visible(trace, *cache_size(model, trace))
    masked = reference_logits(model, tokens, everything, positions=positions)
    return float((eager - masked).abs().max())


class Rope(NamedTuple):
    """A model's rotary embedding, as its own code applies it."""

    frequencies: Tensor  # inverse, [pairs], float64
    factor: float  # its attention scaling
    first: Tensor  # [pairs]: channels that turn
    second: Tensor  # [pairs]: and those they turn towards


class Ropes(NamedTuple):
    """RoPE of the layers with full attention, and of those that see a window."""

    full: Rope
    windows: Rope


class _Unrotated(nn.Module):
    """A rotary embedding that turns nothing, in the shape of another."""

    def __init__(self, rotary: Any) -> None:
        super().__init__()
        self.rotary = rotary

    def forward(self, hidden: Tensor, *place: Any, **about: Any) -> tuple[Tensor, Tensor]:
        cos, sin = self.rotary(hidden, *place, **about)
        return torch.ones_like(cos), torch.zeros_like(sin)


def remove_rotary(model: Any, tokens: int) -> Ropes:
    """Make a model's layers hand over queries and keys before RoPE; return what it was.

    Of a RoPE that follows the length: what it is for a session of so many tokens.
    """
    decoder = decoder_of(model)
    found = Ropes(*(_read_rope(decoder, kind, tokens) for kind in _LAYER_TYPES))
    decoder.rotary_emb = _Unrotated(decoder.rotary_emb)
    return found


_LAYER_TYPES = ("full_attention", "sliding_attention")


def _read_rope(decoder: Any, kind: str, tokens: int) -> Rope:
    """Read RoPE off what the model's code makes of the unit vectors at position 1."""
    rotary, attention = decoder.rotary_emb, decoder.layers[0].self_attn
    own = {"layer_type": kind} if isinstance(getattr(rotary, "rope_type", ""), dict) else {}
    if own and kind not in rotary.rope_type:
        own = {"layer_type": next(iter(rotary.rope_type))}
    prefix = f"{own['layer_type']}_" if own else ""
    size = int(attention.head_dim)
    # Beside the session's last position: RoPE at position 1 alone may be another one.
    cos, sin = rotary(torch.zeros(1, 1, 1), torch.tensor([[1, tokens - 1]]), **own)
    frequencies = getattr(rotary, f"{prefix}inv_freq").double().clone()
    factor = float(getattr(rotary, f"{prefix}attention_scaling", 1.0))
    apply = sys.modules[type(attention).__module__].apply_rotary_pos_emb
    units = torch.eye(size)[None, None]
    turned = apply(units, units, *(part[:, :1].expand(1, size, -1) for part in (cos, sin)))[0][0, 0]
    across = turned - torch.diag(turned.diagonal())
    first = (across > 0).any(1).nonzero()[:, 0]
    second = across[first].argmax(1)
    angles = torch.atan2(turned[first, second], turned[first, first]).double()
    if not torch.allclose(angles, frequencies, rtol=1e-3, atol=1e-7):
        raise ValueError("the reference does not understand this model's RoPE")
    return Rope(frequencies, factor, first, second)


def relative_logits(query: Tensor, key: Tensor, rows: Tensor, rope: Rope) -> Tensor:
    """Return unscaled q·k [heads, n, n] in float64, every query and key rotated to its place.

    `query` and `key` [heads, n, head_dim] are before RoPE. `rows` [heads, n, n] is the position of
    each key when each query was computed; a query's own key is the last one.
    """
    n = rows.shape[-1]
    turned = rotated(query, rows.diagonal(dim1=-2, dim2=-1), rope)
    # Between two events keys stay where they are, so they are rotated once.
    moved = ((rows[:, 1:] != rows[:, :-1]) & torch.ones(n - 1, n).tril().bool()).any(-1).any(0)
    starts = [0, *(moved.nonzero()[:, 0] + 1).tolist(), n]
    parts = [
        turned[:, first:last] @ rotated(key, rows[:, last - 1], rope).transpose(1, 2)
        for first, last in pairwise(starts)
    ]
    return torch.cat(parts, 1)


def rotated(vectors: Tensor, positions: Tensor, rope: Rope) -> Tensor:
    """Apply RoPE at `positions` [..., n] to vectors [..., n, head_dim], in float64."""
    angles = positions[..., None].double() * rope.frequencies
    found = vectors.double().clone()
    pairs = torch.complex(found[..., rope.first], found[..., rope.second])
    turned = pairs * torch.polar(torch.ones_like(angles), angles) * rope.factor
    found[..., rope.first], found[..., rope.second] = turned.real, turned.imag
    return found


def tiny_model(
    family: str = "qwen3",
    *,
    q_heads: int = 4,
    kv_heads: int = 2,
    layers: int = 3,
    vocab: int = 64,
    seed: int = 0,
    rope: dict[str, Any] | None = None,
) -> Any:
    """Build a random decoder in memory whose attention is peaked enough for masks to matter.

    `rope` is merged into transformers' `rope_parameters`.
    """
    return random_model(
        family,
        seed=seed,
        rope=rope,
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=q_heads,
        num_key_value_heads=kv_heads,
        head_dim=8,
        max_position_embeddings=4096,
        initializer_range=0.25,
    )


def random_model(
    family: str, *, seed: int, rope: dict[str, Any] | None = None, **sizes: Any
) -> Any:
    """Build a causal LM of a transformers model type from its configuration, in float32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    causal_lm: Any = AutoModelForCausalLM
    rope = {"rope_theta": 1e4, "rope_type": "default", **(rope or {})}
    config = AutoConfig.for_model(family, tie_word_embeddings=False, rope_parameters=rope, **sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return causal_lm.from_config(config, dtype=torch.float32).eval()
