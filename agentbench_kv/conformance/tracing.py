"""Driving the embedded engine over several turns while everything it did is written down."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from agentbench_kv.conformance.scenes import made_up_calibration
from agentbench_kv.engines.base import KVStats, Sampling
from agentbench_kv.engines.embedded import EmbeddedEngine, Observer
from agentbench_kv.engines.options import EngineOptions
from agentbench_kv.methods.base import Method, Selection
from agentbench_kv.phases import TokenPhases

__all__ = [
    "IDLE",
    "Event",
    "TokenPhases",
    "Trace",
    "TraceRecorder",
    "Turn",
    "calibrated_for",
    "default_turns",
    "drive",
    "short_turns",
]


@dataclass(frozen=True)
class Turn:
    """One turn: ids to prefill, then how many tokens to decode."""

    prompt: list[int]
    decode: int


IDLE = Turn([], 0)
"""A turn in which a session does nothing while others go on."""


@dataclass(frozen=True)
class Event:
    """What one compression did.

    Attributes
    ----------
    logical : int
        Tokens seen before it.
    kept : Tensor [layers, kv_heads, budget]
        Original positions.
    scores : Tensor [layers, kv_heads, live], optional
        Of the tokens held before it, by ascending position; NaN where always kept.
    """

    logical: int
    kept: Tensor
    scores: Tensor | None = None


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

    @property
    def prompt(self) -> int:
        """Tokens of the first prefill."""
        return self.decoded_at[0] if self.decoded_at else len(self.tokens)

    def add(self, tokens: Sequence[int], *, decoded: bool) -> None:
        """Append prompt or generated ids."""
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
        """Keep the logits that predict position `logical`."""
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
        """Keep the positions an event kept."""
        kept = kept_positions.detach().cpu().clone()
        self.traces[session].events.append(Event(logical, kept, self._scores.get(session)))


def default_turns(vocab: int = 64, seed: int = 0) -> list[Turn]:
    """Return six turns: 240 decoded tokens, prompts of 1 to 600 ids (several prefill chunks)."""
    generator = torch.Generator().manual_seed(seed)
    lengths = (120, 600, 1, 33, 70, 15)
    return [
        Turn(torch.randint(vocab, (length,), generator=generator).tolist(), 40)
        for length in lengths
    ]


def short_turns(vocab: int = 64, seed: int = 0) -> list[Turn]:
    """Return three turns: 205 decoded tokens after 190 of prompts."""
    generator = torch.Generator().manual_seed(seed)
    sizes = ((90, 70), (40, 65), (60, 70))
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


def drive(
    model: Any, method: Method, sessions: dict[str, list[Turn]], *, together: bool = True
) -> dict[str, Trace]:
    """Run sessions on one embedded engine and return their traces.

    Parameters
    ----------
    model : transformers causal LM
        Left as it is; the engine gets a copy.
    method : Method
        Gets made-up statistics of the model if it needs any.
    sessions : dict
        Session name -> turns.
    together : bool
        The turns of all sessions run at the same time; or each session after the one before.
    """
    recorder = TraceRecorder(list(sessions))
    method = calibrated_for(model, method)
    options = EngineOptions(model="in-memory", method=method, device="cpu", max_live_tokens=10**6)
    engine = EmbeddedEngine.create(
        options, model=copy.deepcopy(model), recorder=recorder, observer=recorder
    )
    groups = [sessions] if together else [{name: turns} for name, turns in sessions.items()]
    try:
        for group in groups:
            _drive_group(engine, recorder, group)
    finally:
        engine.shutdown()
    return recorder.traces


def _drive_group(
    engine: EmbeddedEngine, recorder: TraceRecorder, sessions: dict[str, list[Turn]]
) -> None:
    for name in sessions:
        engine.open(name, TokenPhases())
    for index in range(max(len(turns) for turns in sessions.values())):
        _drive_turn(engine, recorder, sessions, index)
    for name in sessions:
        recorder.traces[name].stats = engine.close(name)


def _drive_turn(
    engine: EmbeddedEngine, recorder: TraceRecorder, sessions: dict[str, list[Turn]], index: int
) -> None:
    label = TokenPhases().label
    running = []
    for name, turns in sessions.items():
        if index < len(turns) and turns[index] is not IDLE:
            turn, trace = turns[index], recorder.traces[name]
            engine.extend(name, turn.prompt, [label(token) for token in turn.prompt])
            trace.add(turn.prompt, decoded=False)
            sampling = Sampling(max_tokens=turn.decode, temperature=1.0, seed=index)
            running.append((trace, engine.generate(name, sampling)))
    for trace, generation in running:
        trace.add(list(generation), decoded=True)
