"""Masked-cache equality: an engine that evicts must give the logits of a model that masks.

The embedded engine is driven over several turns while a recorder writes down its logits and what
every event kept. The plain Hugging Face model then reads the same ids in one pass, every query
blind to the tokens that were evicted before it was computed, per layer and KV head. If rows,
positions, masks or compaction were wrong anywhere, the logits differ.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from agentbench_kv.conformance.result import CheckResult
from agentbench_kv.engines.base import KVStats, Phase, Sampling
from agentbench_kv.engines.embedded import EmbeddedEngine
from agentbench_kv.engines.options import EngineOptions
from agentbench_kv.methods.base import Method

TOLERANCE = 1e-4
REFERENCE_ATTENTION = "kvbench_masked_reference"


@dataclass(frozen=True)
class Turn:
    """One turn: ids to prefill, then how many tokens to decode."""

    prompt: list[int]
    decode: int


@dataclass(frozen=True)
class Event:
    """What one compression kept: original positions [layers, kv_heads, budget]."""

    logical: int
    kept: Tensor


@dataclass
class Trace:
    """Everything an engine did in one session.

    Attributes
    ----------
    tokens, phases : list of int
        All ids of the session with their phases; the last id was never fed to the model.
    decoded_at : list of int
        Positions of the ids that were generated.
    logits : dict
        Logical position -> logits [vocab] that predict it.
    """

    tokens: list[int] = field(default_factory=list)
    phases: list[int] = field(default_factory=list)
    decoded_at: list[int] = field(default_factory=list)
    logits: dict[int, Tensor] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    stats: KVStats = field(default_factory=KVStats)

    def add(self, tokens: Sequence[int], *, decoded: bool) -> None:
        """Append prompt or generated ids."""
        if decoded:
            self.decoded_at += range(len(self.tokens), len(self.tokens) + len(tokens))
        self.tokens += tokens
        self.phases += [int(TokenPhases().label(token)) for token in tokens]


class TokenPhases:
    """Label a token by its id, so that all four phases occur."""

    def label(self, token: int) -> Phase:
        """Return the phase of `token`."""
        return Phase(token % len(Phase))


class TraceRecorder:
    """The engine's recorder: one trace per session."""

    def __init__(self, sessions: Sequence[str]) -> None:
        self.traces = {session: Trace() for session in sessions}

    def on_logits(self, session: str, logical: int, logits: Tensor) -> None:
        """Keep the logits that predict position `logical`."""
        self.traces[session].logits[logical] = logits.detach().cpu().clone()

    def on_event(self, session: str, logical: int, kept_positions: Tensor) -> None:
        """Keep the positions an event kept."""
        self.traces[session].events.append(Event(logical, kept_positions.detach().cpu().clone()))


@dataclass(frozen=True)
class Capture:
    """Post-RoPE queries [q_heads, n, d] and keys [kv_heads, n, d] of every layer."""

    queries: list[Tensor]
    keys: list[Tensor]


def tiny_model(
    family: str = "qwen3",
    *,
    q_heads: int = 4,
    kv_heads: int = 2,
    layers: int = 3,
    vocab: int = 64,
    seed: int = 0,
) -> Any:
    """Build a random decoder in memory whose attention is peaked enough for masks to matter."""
    from transformers import AutoConfig, AutoModelForCausalLM

    causal_lm: Any = AutoModelForCausalLM
    config = AutoConfig.for_model(
        family,
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=q_heads,
        num_key_value_heads=kv_heads,
        head_dim=8,
        max_position_embeddings=4096,
        initializer_range=0.25,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = causal_lm.from_config(config, dtype=torch.float32)
    return model.eval()


def default_turns(vocab: int = 64, seed: int = 0) -> list[Turn]:
    """Return six turns: 240 decoded tokens, prompts of 1 to 600 ids (several prefill chunks)."""
    generator = torch.Generator().manual_seed(seed)
    lengths = (120, 600, 1, 33, 70, 15)
    return [
        Turn(torch.randint(vocab, (length,), generator=generator).tolist(), 40)
        for length in lengths
    ]


def drive(model: Any, method: Method, sessions: dict[str, list[Turn]]) -> dict[str, Trace]:
    """Run all sessions together on the embedded engine and return their traces.

    Parameters
    ----------
    model : transformers causal LM
        Left as it is; the engine gets a copy.
    method : Method
    sessions : dict
        Session name -> turns; the turns of all sessions run at the same time.
    """
    recorder = TraceRecorder(list(sessions))
    options = EngineOptions(model="in-memory", method=method, device="cpu", max_live_tokens=10**6)
    engine = EmbeddedEngine.create(options, model=copy.deepcopy(model), recorder=recorder)
    try:
        for name in sessions:
            engine.open(name, TokenPhases())
        for index in range(max(len(turns) for turns in sessions.values())):
            _drive_turn(engine, recorder, sessions, index)
        for name, trace in recorder.traces.items():
            trace.stats = engine.close(name)
    finally:
        engine.shutdown()
    return recorder.traces


def _drive_turn(
    engine: EmbeddedEngine, recorder: TraceRecorder, sessions: dict[str, list[Turn]], index: int
) -> None:
    label = TokenPhases().label
    running = []
    for name, turns in sessions.items():
        if index < len(turns):
            turn, trace = turns[index], recorder.traces[name]
            engine.extend(name, turn.prompt, [label(token) for token in turn.prompt])
            trace.add(turn.prompt, decoded=False)
            sampling = Sampling(max_tokens=turn.decode, temperature=1.0, seed=index)
            running.append((trace, engine.generate(name, sampling)))
    for trace, generation in running:
        trace.add(list(generation), decoded=True)


def visible(trace: Trace, layers: int, kv_heads: int) -> Tensor:
    """Return which keys each query may see, [layers, kv_heads, queries, keys] of bool."""
    fed = len(trace.tokens) - 1
    causal = torch.ones(fed, fed, dtype=torch.bool).tril()
    allowed = causal.expand(layers, kv_heads, fed, fed).clone()
    for event in trace.events:
        survives = torch.zeros(layers, kv_heads, fed, dtype=torch.bool)
        survives.scatter_(2, event.kept, True)
        survives[:, :, event.logical :] = True
        allowed[:, :, event.logical :] &= survives[:, :, None, :]
    return allowed


def reference_logits(
    model: Any, tokens: Sequence[int], allowed: Tensor, capture: Capture | None = None
) -> Tensor:
    """Read `tokens` in one pass under a mask per (layer, KV head).

    Parameters
    ----------
    model : transformers causal LM
        Left as it is.
    tokens : sequence of int
    allowed : Tensor [layers, kv_heads, tokens, tokens] of bool
    capture : Capture, optional
        Filled with every layer's post-RoPE queries and keys.

    Returns
    -------
    Tensor [tokens, vocab], float32
    """
    from transformers import AttentionInterface

    AttentionInterface.register(REFERENCE_ATTENTION, _masked_attention)
    plain = copy.deepcopy(model)
    plain.set_attn_implementation(REFERENCE_ATTENTION)
    with torch.inference_mode():
        output = plain(
            input_ids=torch.tensor([list(tokens)]),
            use_cache=False,
            kvbench_allowed=allowed,
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
    kvbench_capture: Capture | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Textbook attention over repeated KV heads."""
    if kvbench_capture is not None:
        kvbench_capture.queries.append(query[0].clone())
        kvbench_capture.keys.append(key[0].clone())
    group = query.shape[1] // key.shape[1]
    allowed = kvbench_allowed[int(module.layer_idx)].repeat_interleave(group, 0)
    logits = query[0] @ key[0].repeat_interleave(group, 0).transpose(1, 2) * scaling
    weights = logits.masked_fill(~allowed, float("-inf")).softmax(-1)
    output = weights @ value[0].repeat_interleave(group, 0)
    return output.transpose(0, 1).unsqueeze(0), None


def largest_difference(model: Any, trace: Trace) -> float:
    """Return the largest absolute difference between recorded and masked-reference logits."""
    shape = model.config
    allowed = visible(trace, shape.num_hidden_layers, shape.num_key_value_heads)
    expected = reference_logits(model, trace.tokens[:-1], allowed)
    return max(
        float((logits - expected[position - 1]).abs().max())
        for position, logits in trace.logits.items()
    )


def reference_error(model: Any, tokens: Sequence[int]) -> float:
    """Return how far the reference without evictions is from the model's own eager attention."""
    shape = model.config
    everything = visible(
        Trace(tokens=[*tokens, 0]), shape.num_hidden_layers, shape.num_key_value_heads
    )
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("eager")
    with torch.inference_mode():
        eager = plain(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0]
    return float((eager - reference_logits(model, tokens, everything)).abs().max())


def check_masked_cache(
    method: Method,
    model: Any = None,
    *,
    turns: Sequence[Turn] | None = None,
    interval: int = 32,
    min_events: int = 5,
    tolerance: float = TOLERANCE,
) -> list[CheckResult]:
    """Drive the embedded engine with `method` and compare it with the masked reference.

    Parameters
    ----------
    method : Method
        Budget included; it must be below the tokens of the turns for events to happen.
    model : transformers causal LM, optional
        A tiny random Qwen3 if not given.
    turns : sequence of Turn, optional
        `default_turns` if not given; a second session runs beside them.
    interval : int
        Replaces the method's own, so that a short run has events.
    min_events : int
        A compressing method with fewer events fails.
    """
    model = tiny_model() if model is None else model
    vocab = int(model.config.vocab_size)
    sessions = {
        "first": list(turns or default_turns(vocab)),
        "second": default_turns(vocab, 1)[2:4],
    }
    traces = drive(model, replace(method, interval=interval), sessions)
    results = [_check_reference(model, traces["second"], tolerance)]
    for name, trace in traces.items():
        results += check_trace(
            name, model, method, trace, min_events if name == "first" else 0, tolerance
        )
    return results


def check_trace(
    name: str,
    model: Any,
    method: Method,
    trace: Trace,
    min_events: int = 0,
    tolerance: float = TOLERANCE,
) -> list[CheckResult]:
    """Check one session's trace: coverage, kept sets, accounting, and equality of the logits."""
    checks: dict[str, Callable[[], str]] = {
        "logits recorded": lambda: _coverage_problem(trace),
        "events": lambda: _event_problem(method, trace, min_events),
        "kept sets": lambda: _kept_problem(method, trace),
        "accounting": lambda: _accounting_problem(trace),
    }
    problems = {check: find() for check, find in checks.items()}
    results = [CheckResult(f"{name}: {key}", not text, text) for key, text in problems.items()]
    if problems["kept sets"]:
        skipped = CheckResult(f"{name}: masked-cache equality", False, "kept sets are not valid")
        return [*results, skipped]
    return [*results, _check_equality(name, model, trace, tolerance)]


def _check_equality(name: str, model: Any, trace: Trace, tolerance: float) -> CheckResult:
    largest = largest_difference(model, trace)
    return CheckResult(
        f"{name}: masked-cache equality",
        largest <= tolerance,
        f"largest logit difference {largest:.2e} over {len(trace.logits)} positions, "
        f"{len(trace.events)} events",
    )


def _check_reference(model: Any, trace: Trace, tolerance: float) -> CheckResult:
    error = reference_error(model, trace.tokens[:200])
    detail = f"largest logit difference {error:.2e} to eager attention without evictions"
    return CheckResult("reference is the plain model", error <= tolerance, detail)


def _coverage_problem(trace: Trace) -> str:
    wrong = sorted(set(trace.decoded_at) ^ set(trace.logits))
    return f"logits are missing or unexpected at positions {wrong[:8]}" if wrong else ""


def _event_problem(method: Method, trace: Trace, min_events: int) -> str:
    if not method.compresses:
        return f"{len(trace.events)} events, expected none" if trace.events else ""
    few = len(trace.events) < min_events
    return f"{len(trace.events)} events, expected at least {min_events}" if few else ""


def _kept_problem(method: Method, trace: Trace) -> str:
    """Kept positions must be `budget` distinct ones that were still cached."""
    cached: Tensor | None = None
    before = 0
    for number, event in enumerate(trace.events):
        kept = event.kept.sort(-1).values
        where = f"event {number} at {event.logical}: "
        if kept.shape[-1] != method.budget:
            return f"{where}{kept.shape[-1]} rows kept, budget {method.budget}"
        if bool((kept[..., 1:] == kept[..., :-1]).any()):
            return f"{where}a position is kept twice in one head"
        if bool((kept < 0).any() or (kept >= event.logical).any()):
            return f"{where}a kept position is not in [0, {event.logical})"
        if cached is not None:
            again = (kept < before) & ~(kept[..., :, None] == cached[..., None, :]).any(-1)
            if bool(again.any()):
                return f"{where}position {int(kept[again][0])} is back after its eviction"
        cached, before = kept, event.logical
    return ""


def _accounting_problem(trace: Trace) -> str:
    stats = trace.stats
    fed = len(trace.tokens) - 1
    evicted = sum(event.live_before - event.live_after for event in stats.events)
    figures = {
        "logical": (stats.logical, len(trace.tokens)),
        "decode_tokens": (stats.decode_tokens, len(trace.decoded_at)),
        "prefill_tokens": (stats.prefill_tokens, len(trace.tokens) - len(trace.decoded_at)),
        "evicted": (stats.evicted, evicted),
        "live": (stats.live, fed - evicted),
        "events": (
            [(event.logical, event.live_after) for event in stats.events],
            [(event.logical, event.kept.shape[-1]) for event in trace.events],
        ),
    }
    wrong = [f"{key} {got}, expected {want}" for key, (got, want) in figures.items() if got != want]
    return "; ".join(wrong)
