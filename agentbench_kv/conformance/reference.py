"""The reference: a plain Hugging Face model that is blind to what was evicted.

It reads all ids of a session in one pass. Every query sees the tokens that were cached when it was
computed, per layer and head, and no others. Where positions are the cache's, keys are taken before
RoPE: whenever a query is computed, every key it may see is rotated by its row in the cache, and the
query by its own, the last one, as StreamingLLM's authors do.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from agentbench_kv.conformance.driver import SessionTrace

TOLERANCE = 1e-4
"""Logits that differ by less are equal."""

REFERENCE_ATTENTION = "kvbench_masked_reference"


@dataclass(frozen=True)
class ReferenceTensors:
    """What the reference computed per layer; before RoPE where positions are the cache's."""

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

    `allowed` is [layers, heads, tokens, tokens]; heads are KV heads, or query heads where each has
    its own cache. `capture` is filled with what every layer computed. With positions `logical` RoPE
    goes by the place in the session, with `cache` by the row in the cache: `rows` as `cache_rows`
    gives them, or visible keys in the order of the session.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(REFERENCE_ATTENTION, _masked_attention)
    plain = copy.deepcopy(model)
    plain.set_attn_implementation(REFERENCE_ATTENTION)
    rope = remove_rotary(plain) if positions == "cache" else None
    if rope is not None and rows is None:
        rows = allowed.cumsum(-1) - 1
    with torch.inference_mode():
        output = plain(
            input_ids=torch.tensor([list(tokens)]),
            use_cache=False,
            kvbench_allowed=allowed,
            kvbench_rope=rope,
            kvbench_rows=rows,
            kvbench_capture=capture,
        )
    logits: Tensor = output.logits[0].float()
    return logits


def _masked_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001  `kvbench_allowed` is the mask
    scaling: float,
    kvbench_allowed: Tensor,
    kvbench_rope: Rope | None,
    kvbench_rows: Tensor | None,
    kvbench_capture: ReferenceTensors | None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Textbook attention over repeated KV heads."""
    q, k, v = query[0], _repeated(key[0], query), _repeated(value[0], query)
    allowed = _repeated(kvbench_allowed[int(module.layer_idx)], query)
    if kvbench_rope is None or kvbench_rows is None:
        logits = q @ k.transpose(1, 2) * scaling
    else:
        rows = _repeated(kvbench_rows[int(module.layer_idx)], query)
        logits = relative_logits(q, k, rows, kvbench_rope) * scaling
    weights = logits.masked_fill(~allowed, float("-inf")).softmax(-1).to(q.dtype)
    if kvbench_capture is not None:
        kvbench_capture.queries.append(q.clone())
        kvbench_capture.keys.append(key[0].clone())
        kvbench_capture.values.append(value[0].clone())
        kvbench_capture.weights.append(weights)
    return (weights @ v).transpose(0, 1).unsqueeze(0), None


def _repeated(heads: Tensor, query: Tensor) -> Tensor:
    """Give every query head [1, q_heads, ...] its copy of what its KV head has [heads, ...]."""
    return heads.repeat_interleave(query.shape[1] // heads.shape[0], 0)


def largest_difference(model: Any, trace: SessionTrace, positions: str = "logical") -> float:
    """Return the largest absolute difference between recorded and masked-reference logits."""
    size = (model.config.num_hidden_layers, cache_heads(model, trace))
    allowed = visible(trace, *size)
    rows = cache_rows(trace, *size) if positions == "cache" else None
    expected = reference_logits(model, trace.tokens[:-1], allowed, positions=positions, rows=rows)
    return max(
        float((logits - expected[position - 1]).abs().max())
        for position, logits in trace.logits.items()
    )


def cache_heads(model: Any, trace: SessionTrace) -> int:
    """Return how many heads the engine's cache had, as its events show."""
    kv_heads = int(model.config.num_key_value_heads)
    return trace.events[0].kept.shape[1] if trace.events else kv_heads


def reference_error(model: Any, tokens: Sequence[int], positions: str = "logical") -> float:
    """Return how far the reference without evictions is from the model's own eager attention."""
    shape = model.config
    everything = visible(
        SessionTrace([*tokens, 0]), shape.num_hidden_layers, shape.num_key_value_heads
    )
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("eager")
    with torch.inference_mode():
        eager = plain(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0]
    masked = reference_logits(model, tokens, everything, positions=positions)
    return float((eager - masked).abs().max())


class Rope(NamedTuple):
    """A model's rotary embedding."""

    frequencies: Tensor  # inverse, [head_dim / 2], float64
    factor: float  # its attention scaling


class _Unrotated(nn.Module):
    """Replaces a model's rotary embedding: cosines and sines of angle 0."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim

    def forward(self, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        ones = torch.ones(*position_ids.shape, self.head_dim, dtype=hidden.dtype)
        return ones, torch.zeros_like(ones)


def remove_rotary(model: Any) -> Rope:
    """Make a model's layers hand over queries and keys before RoPE; return what it was."""
    rotary = model.model.rotary_emb
    frequencies = rotary.inv_freq.double()
    model.model.rotary_emb = _Unrotated(2 * len(frequencies))
    return Rope(frequencies, float(getattr(rotary, "attention_scaling", 1.0)))


def relative_logits(query: Tensor, key: Tensor, rows: Tensor, rope: Rope) -> Tensor:
    """Return unscaled q·k [heads, n, n] in float64, every pair rotated by its distance.

    `query` and `key` [heads, n, head_dim] are before RoPE. `rows` [heads, n, n] is the position of
    each key when each query was computed; a query's own key is the last one.
    """
    own = rows.diagonal(dim1=-2, dim2=-1)[..., None]
    # Keys behind the query are not seen; their distance must only be an index.
    distance = (own - rows).clamp(min=0)
    q, k = _pairs(query), _pairs(key)
    angles = torch.arange(rows.shape[-1]).double()[:, None] * rope.frequencies
    total = torch.zeros(rows.shape, dtype=torch.float64)
    for f, table in enumerate(torch.polar(torch.ones_like(angles), angles).unbind(1)):
        product = q[..., f][:, :, None] * k[..., f].conj()[:, None, :]
        total += (product * table[distance]).real
    return total * rope.factor**2


def rotated(vectors: Tensor, positions: Tensor, rope: Rope) -> Tensor:
    """Apply RoPE at `positions` [..., n] to vectors [..., n, head_dim], in float64."""
    angles = positions[..., None].double() * rope.frequencies
    turned = _pairs(vectors) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], -1) * rope.factor


def _pairs(vectors: Tensor) -> Tensor:
    first, second = vectors.double().chunk(2, -1)
    return torch.complex(first.contiguous(), second.contiguous())


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
