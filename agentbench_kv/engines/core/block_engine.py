"""Span-level methods over any engine that can save, evict and restore spans.

The method sits between the gateway and the engine: before a generation it brings blocks back and
makes room, while the generation runs it is cut where the cache reaches the watermark, and at its
end the cache is within the budget. The engine below knows nothing of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count

from agentbench_kv.engines.base import (
    Capability,
    Engine,
    FinishReason,
    Generation,
    KVStats,
    PhaseLabeller,
    Sampling,
    TokenLogprob,
)
from agentbench_kv.errors import UsageError
from agentbench_kv.methods.base import Phase
from agentbench_kv.methods.spans import Source, SpanMethod, SpanRange, SpanSession, TurnNotes

# Between the seeds of a generation's pieces, so that no piece repeats another's draws.
SEED_STEP = 0x9E3779B97F4A7C15


class BlockEngine(Engine):
    """An engine that runs `method.below()` and whose sessions a span-level method manages."""

    wants_notes = True

    def __init__(self, engine: Engine, method: SpanMethod) -> None:
        # What the method knows of a session neither forks nor goes back with its rows.
        able = engine.info.capabilities - {Capability.FORK, Capability.REWIND}
        self.info = replace(engine.info, capabilities=able)
        self.below = engine
        self._method = method
        self._sessions = method.sessions()
        self._managed: dict[str, SpanSession] = {}
        self._notes: dict[str, TurnNotes] = {}
        self._decode: Callable[[Sequence[int]], str] | None = None

    def decode_with(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode

    def open(self, session: str, labeller: PhaseLabeller) -> None:
        self.below.open(session, labeller)
        self._managed[session] = self._sessions.open(_SessionCache(self, session))

    def note(self, session: str, tokens: Sequence[int], notes: TurnNotes) -> None:
        self._managed[session].check(tokens, notes)
        self._notes[session] = notes

    def recalls(self, session: str, tokens: Sequence[int], notes: TurnNotes) -> list[SpanRange]:
        return self._managed[session].recalls(tokens, notes)

    def extend(self, session: str, tokens: Sequence[int], phases: Sequence[Phase]) -> None:
        notes = self._notes.pop(session, None) or TurnNotes([(len(tokens), Source.DOCUMENT)])
        self.below.extend(session, tokens, phases)
        self._managed[session].admit(tokens, notes)

    def generate(self, session: str, sampling: Sampling) -> Generation:
        return _PiecewiseGeneration(self.below, session, self._managed[session], sampling)

    def force(self, session: str, tokens: Sequence[int], *, predict: bool = False) -> Generation:
        asked, managed = Sampling(max_tokens=len(tokens)), self._managed[session]
        return _PiecewiseGeneration(self.below, session, managed, asked, tokens, predict)

    def stats(self, session: str) -> KVStats:
        return self._with_figures(self.below.stats(session), self._managed[session].figures())

    def close(self, session: str) -> KVStats:
        managed = self._managed.pop(session)
        self._notes.pop(session, None)
        try:
            figures = managed.figures()
            managed.close()
        finally:  # the engine's rows, whatever the method's own end comes to
            stats = self.below.close(session)
        return self._with_figures(stats, figures)

    def _with_figures(self, stats: KVStats, figures: dict[str, int]) -> KVStats:
        return replace(stats, budget=self._method.budget_at(stats.logical), figures=figures)

    @property
    def restarts(self) -> int:
        return self.below.restarts

    def pool(self) -> dict[str, int]:
        return self.below.pool()

    def pool_peak(self) -> int | None:
        return self.below.pool_peak()

    def drop_prefixes(self) -> None:
        self.below.drop_prefixes()

    def progress(self) -> int | None:
        return self.below.progress()

    def shutdown(self) -> None:
        self.below.shutdown()
        self._sessions.close()

    def text(self, tokens: Sequence[int]) -> str:
        if self._decode is None:  # no gateway has said how
            raise UsageError("an encoder that reads text needs a gateway above the engine")
        return self._decode(tokens)


class _SessionCache:
    """One session of an engine, as `SpanCache`."""

    def __init__(self, owner: BlockEngine, name: str) -> None:
        engine = self._engine = owner.below
        self.name = name
        self.save = partial(engine.save_block, name)
        self.evict = partial(engine.evict_spans, name)
        self.restore = partial(engine.restore_block, name)
        self.attention = partial(engine.span_attention, name)
        self.embed = engine.embed_tokens
        self.text = owner.text
        self._losses = 0
        self._away_before = 0

    @property
    def live(self) -> int:
        return self._engine.stats(self.name).live

    @property
    def fed(self) -> int:
        stats = self._engine.stats(self.name)
        away = stats.evicted - stats.restored
        if len(stats.restarts) != self._losses:
            # What was away when the rows were lost has been computed again.
            self._losses, self._away_before = len(stats.restarts), away
        return stats.live + away - self._away_before

    @property
    def losses(self) -> int:
        return len(self._engine.stats(self.name).restarts)


@dataclass(eq=False)
class _PiecewiseGeneration(Generation):
    """A generation in pieces: each ends at the latest where the cache reaches the watermark."""

    _engine: Engine
    _session: str
    _managed: SpanSession
    _sampling: Sampling
    _given: Sequence[int] = ()  # tokens to be forced; none to decode
    _predict: bool = False

    def __post_init__(self) -> None:
        self._piece: Generation | None = None
        self._cancelled = False
        self._started = time.perf_counter()
        self.logprobs: list[TokenLogprob] = []
        self.best: list[int] = []

    def __iter__(self) -> Iterator[int]:
        generated: list[int] = []
        self._managed.before_prefill()
        for number in count():
            yield from self._run(number, generated)
            if not self._goes_on(len(generated)):
                break
            self._managed.at_watermark(generated)
        self._managed.after_turn(generated)

    def cancel(self) -> None:
        self._cancelled = True
        if self._piece is not None:
            self._piece.cancel()

    def _goes_on(self, produced: int) -> bool:
        cut = self.finish_reason is FinishReason.LENGTH and produced < self._sampling.max_tokens
        if cut and self._cancelled:
            self.finish_reason = FinishReason.CANCELLED
        return cut and not self._cancelled

    def _run(self, number: int, generated: list[int]) -> Iterator[int]:
        left = self._sampling.max_tokens - len(generated)
        sampling = replace(
            self._sampling,
            max_tokens=min(left, self._managed.room()),
            seed=(self._sampling.seed + number * SEED_STEP) % (1 << 63),
        )
        started = time.perf_counter() - self._started
        piece = self._piece = self._start(sampling, len(generated))
        if self._cancelled:
            piece.cancel()
        for place, token in enumerate(piece):
            generated.append(token)
            self.logprobs += piece.logprobs[place : place + 1]
            yield token
        self.best += piece.best
        self.finish_reason = piece.finish_reason
        if piece.first_token_s is not None and piece.last_token_s is not None:
            if self.first_token_s is None:
                self.first_token_s = started + piece.first_token_s
            self.last_token_s = started + piece.last_token_s

    def _start(self, sampling: Sampling, done: int) -> Generation:
        if not self._given:
            return self._engine.generate(self._session, sampling)
        part = self._given[done : done + sampling.max_tokens]
        asked = {"predict": True} if self._predict else {}
        return self._engine.force(self._session, part, **asked)
