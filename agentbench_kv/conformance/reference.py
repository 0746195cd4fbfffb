"""The reference: a plain Hugging Face model that is blind to what was evicted.

It reads all ids of a session in one pass. Every query sees the tokens that were cached when it was
computed, per layer and head, and no others.

Driving the embedded engine over several turns and recording everything it did.

Attention where a key's position is its row in the cache: what `positions=cache` has to equal.

Keys are stored before RoPE. Whenever a query is computed, every key it may see is rotated by its
row in the cache, and the query by its own, the last one, as StreamingLLM's authors do. Keys and
values themselves stay what they were when their token was read.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from agentbench_kv.conformance.scenes import made_up_calibration
from agentbench_kv.engines.base import Engine, EngineOptions, KVStats, Sampling
from agentbench_kv.engines.embedded.engine import EmbeddedEngine
from agentbench_kv.engines.embedded.observer import Observer
from agentbench_kv.methods.base import Method, Selection
from agentbench_kv.phases import TokenPhases


@dataclass(frozen=True)
class Turn:
    """One turn: ids to prefill, then how many tokens to decode."""

    prompt: list[int]
    decode: int


IDLE = Turn([], 0)


"""A turn in which a session does nothing while others continue."""


@dataclass(frozen=True)
class Event:
    """What one compression did."""

    logical: int  # tokens seen before it
    kept: Tensor  # original positions [layers, kv_heads, budget]
    # Of the tokens held before it, by ascending position [layers, kv_heads, live]; NaN where
    # always kept.
    scores: Tensor | None = None


@dataclass
class Trace:
    """Everything an engine did in one session."""

    tokens: list[int] = field(default_factory=list)  # the last one was never fed to the model
    phases: list[int] = field(default_factory=list)
    decoded_at: list[int] = field(default_factory=list)  # positions of the generated ids
    logits: dict[int, Tensor] = field(default_factory=dict)  # [vocab], by the position they predict
    events: list[Event] = field(default_factory=list)
    stats: KVStats = field(default_factory=KVStats)

    @property
    def prompt(self) -> int:
        """Tokens of the first prefill."""
        return self.decoded_at[0] if self.decoded_at else len(self.tokens)

    def add(self, tokens: Sequence[int], *, decoded: bool) -> None:
        if decoded:
            self.decoded_at += range(len(self.tokens), len(self.tokens) + len(tokens))
        self.tokens += tokens
        self.phases += [int(TokenPhases().label(token)) for token in tokens]


class TraceRecorder(Observer):
    """Keeps one trace per session."""

    def __init__(self, sessions: Sequence[str]) -> None:
        self.traces = {session: Trace() for session in sessions}
        self._scores: dict[str, Tensor] = {}

    def on_logits(self, session: str, logical: int, logits: Tensor) -> None:
        self.traces[session].logits[logical] = logits.detach().cpu().clone()

    def on_selection(
        self,
        session: str,
        logical: int,  # noqa: ARG002
        positions: Tensor,  # noqa: ARG002
        selection: Selection,
    ) -> None:
        """Hold the scores for the event that follows."""
        self._scores[session] = selection.scores.detach().cpu().clone()

    def on_event(self, session: str, logical: int, kept_positions: Tensor) -> None:
        kept = kept_positions.detach().cpu().clone()
        self.traces[session].events.append(Event(logical, kept, self._scores.get(session)))


def default_turns(vocab: int = 64, seed: int = 0) -> list[Turn]:
    """Return six turns: 240 decoded tokens, prompts of 1 to 600 ids (several prefill chunks)."""
    return _random_turns(vocab, seed, [(length, 40) for length in (120, 600, 1, 33, 70, 15)])


def short_turns(vocab: int = 64, seed: int = 0) -> list[Turn]:
    """Return three turns: 205 decoded tokens after 190 of prompts."""
    return _random_turns(vocab, seed, [(90, 70), (40, 65), (60, 70)])


def _random_turns(vocab: int, seed: int, sizes: Sequence[tuple[int, int]]) -> list[Turn]:
    generator = torch.Generator().manual_seed(seed)
    return [
        Turn(torch.randint(vocab, (prompt,), generator=generator).tolist(), decode)
        for prompt, decode in sizes
    ]


def calibrated_for(model: Any, method: Method) -> Method:
    """Return the method with made-up statistics of a model in memory, if it needs any."""
    if not method.needs_calibration:
        return method
    rotary, shape = model.model.rotary_emb, model.config
    made = made_up_calibration(
        shape.num_hidden_layers,
        shape.num_attention_heads,
        rotary.inv_freq.float(),
        float(getattr(rotary, "attention_scaling", 1.0)),
    )
    return method.with_calibration(made)


def in_memory_engine(model: Any, method: Method, recorder: TraceRecorder) -> EmbeddedEngine:
    """Start the embedded engine on a copy of a transformers model, watched by a recorder."""
    options = EngineOptions(model="in-memory", method=method, device="cpu", max_live_tokens=10**6)
    return EmbeddedEngine.create(options, model=copy.deepcopy(model), recorder=recorder)


def feed(engine: Engine, session: str, prompt: Sequence[int], trace: Trace) -> None:
    """Extend a session with ids in the phases of plain tokens, and the trace with them."""
    label = TokenPhases().label
    engine.extend(session, prompt, [label(token) for token in prompt])
    trace.add(prompt, decoded=False)


def drive(
    model: Any, method: Method, sessions: dict[str, list[Turn]], *, together: bool = True
) -> dict[str, Trace]:
    """Run sessions on one embedded engine and return their traces.

    The engine gets a copy of `model`; the method made-up statistics of it, if it needs any. The
    turns of all sessions run at the same time, or each session after the one before.
    """
    recorder = TraceRecorder(list(sessions))
    engine = in_memory_engine(model, calibrated_for(model, method), recorder)
    groups = [sessions] if together else [{name: turns} for name, turns in sessions.items()]
    try:
        for group in groups:
            _drive_group(engine, group, recorder.traces)
    finally:
        engine.shutdown()
    return recorder.traces


def _drive_group(
    engine: EmbeddedEngine, sessions: dict[str, list[Turn]], traces: dict[str, Trace]
) -> None:
    for name in sessions:
        engine.open(name, TokenPhases())
    for index in range(max(len(turns) for turns in sessions.values())):
        running = []
        for name, turns in sessions.items():
            if index < len(turns) and turns[index] is not IDLE:
                feed(engine, name, turns[index].prompt, traces[name])
                sampling = Sampling(turns[index].decode, temperature=1.0, seed=index)
                running.append((traces[name], engine.generate(name, sampling)))
        for trace, generation in running:
            trace.add(list(generation), decoded=True)
    for name in sessions:
        traces[name].stats = engine.close(name)


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


def turn(vectors: Tensor, positions: Tensor, rope: Rope) -> Tensor:
    """Apply RoPE at `positions` [..., n] to vectors [..., n, head_dim], in float64."""
    angles = positions[..., None].double() * rope.frequencies
    turned = _pairs(vectors) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], -1) * rope.factor


def _pairs(vectors: Tensor) -> Tensor:
    first, second = vectors.double().chunk(2, -1)
    return torch.complex(first.contiguous(), second.contiguous())


REFERENCE_ATTENTION = "kvbench_masked_reference"


@dataclass(frozen=True)
class ReferenceTensors:
    """What the reference computed per layer; before RoPE where positions are the cache's."""

    queries: list[Tensor] = field(default_factory=list)  # [q_heads, n, head_dim]
    keys: list[Tensor] = field(default_factory=list)  # [kv_heads, n, head_dim]
    values: list[Tensor] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)  # attention probabilities [q_heads, n, n]


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


def visible(trace: Trace, layers: int, heads: int) -> Tensor:
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


def cache_rows(trace: Trace, layers: int, heads: int) -> Tensor:
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


def largest_difference(model: Any, trace: Trace, positions: str = "logical") -> float:
    """Return the largest absolute difference between recorded and masked-reference logits."""
    size = (model.config.num_hidden_layers, cache_heads(model, trace))
    allowed = visible(trace, *size)
    rows = cache_rows(trace, *size) if positions == "cache" else None
    expected = reference_logits(model, trace.tokens[:-1], allowed, positions=positions, rows=rows)
    return max(
        float((logits - expected[position - 1]).abs().max())
        for position, logits in trace.logits.items()
    )


def cache_heads(model: Any, trace: Trace) -> int:
    """Return how many heads the engine's cache had, as its events show."""
    kv_heads = int(model.config.num_key_value_heads)
    return trace.events[0].kept.shape[1] if trace.events else kv_heads


def reference_error(model: Any, tokens: Sequence[int], positions: str = "logical") -> float:
    """Return how far the reference without evictions is from the model's own eager attention."""
    shape = model.config
    everything = visible(
        Trace(tokens=[*tokens, 0]), shape.num_hidden_layers, shape.num_key_value_heads
    )
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("eager")
    with torch.inference_mode():
        eager = plain(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0]
    masked = reference_logits(model, tokens, everything, positions=positions)
    return float((eager - masked).abs().max())
