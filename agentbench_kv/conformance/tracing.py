"""Driving the embedded engine over several turns and recording everything it did."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from agentbench_kv.conformance.scenes import made_up_calibration
from agentbench_kv.engines.base import Engine, KVStats, Sampling
from agentbench_kv.engines.embedded import EmbeddedEngine, Observer
from agentbench_kv.engines.options import EngineOptions
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
    """The engine's recorder and observer: one trace per session."""

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
    return EmbeddedEngine.create(
        options, model=copy.deepcopy(model), recorder=recorder, observer=recorder
    )


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
