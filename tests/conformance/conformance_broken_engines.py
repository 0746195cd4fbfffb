"""Embedded engines with one mistake each, and one that loses rows and says so."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Self

import torch

from agentbench_kv.engines.base import (
    EngineOptions,
    FinishReason,
    Generation,
    KVStats,
    PhaseLabeller,
    Sampling,
)
from agentbench_kv.engines.embedded.engine import EmbeddedEngine
from agentbench_kv.kernels import rope_rotate
from agentbench_kv.methods.base import Phase


class Watched(EmbeddedEngine):
    """Lets a variant reach into every session that is opened."""

    def open(self, session: str, labeller: PhaseLabeller) -> None:
        super().open(session, labeller)
        self.spoil(self._scheduler.get(session))

    def spoil(self, state: Any) -> None:
        """Break a session."""


class KeptOffByOne(Watched):
    """Keeps the rows beside those its method chose, and says so."""

    def spoil(self, state: Any) -> None:
        keep = state.cache.keep

        def shifted(kept: torch.Tensor, *more: Any) -> int:
            moved = (kept + 1) % state.cache.length
            return int(keep(moved.sort(-1).values, *more))

        state.cache.keep = shifted


class RowsMisplaced(Watched):
    """Moves keys one row too far, and says nothing."""

    def spoil(self, state: Any) -> None:
        keep = state.cache.keep

        def misplaced(*arguments: Any) -> int:
            moved = int(keep(*arguments))
            live = state.cache.keys[:, :, : state.cache.length]
            live.copy_(live.roll(1, 2))
            return moved

        state.cache.keep = misplaced


class RopeOffByOne(Watched):
    """Goes on one position too far behind an event."""

    def spoil(self, state: Any) -> None:
        compress = state.compress

        def skipping(*arguments: Any) -> None:
            compress(*arguments)
            state._next += 1

        state.compress = skipping


class RecallsTheLast(EmbeddedEngine):
    """Brings a memory's last rows back, whatever a prompt needs."""

    def attach(self, session: str, bank: str) -> None:
        super().attach(session, bank)
        memory: Any = self._scheduler.get(session).memory
        memory._method = dataclasses.replace(memory._method, pick="last")


class RecallsMisplaced(EmbeddedEngine):
    """Brings a memory's rows back one position too far."""

    def attach(self, session: str, bank: str) -> None:
        super().attach(session, bank)
        memory: Any = self._scheduler.get(session).memory
        front = memory.front

        def misplaced(layer: int) -> tuple[torch.Tensor, torch.Tensor]:
            keys, values = front(layer)
            rope_rotate(keys[None], torch.tensor(1), memory._frequencies)
            return keys, values

        memory.front = misplaced


class RecallsItself(EmbeddedEngine):
    """Brings a session's own rows back to it."""

    def attach(self, session: str, bank: str) -> None:
        super().attach(session, bank)
        memory: Any = self._scheduler.get(session).memory
        memory.has = lambda _: None


class AppendsApart(EmbeddedEngine):
    """Begins a block with every turn that a memory takes."""

    def memorise(self, session: str, bank: str, tokens: int | None = None, start: int = 0) -> int:
        self._scheduler.get(session).mark = object()
        return super().memorise(session, bank, tokens, start)


class RecallsUncounted(EmbeddedEngine):
    """Says nothing of what a memory brought back."""

    def close(self, session: str) -> KVStats:
        return dataclasses.replace(super().close(session), restored=0)


class BudgetOffByOne(EmbeddedEngine):
    """Keeps one token less than the budget."""

    @classmethod
    def create(cls, options: EngineOptions, **more: Any) -> Self:
        method = options.method
        less = dataclasses.replace(method, budget=(method.budget or 1) - 1)
        return super().create(dataclasses.replace(options, method=less), **more)


class PeakUnderstated(EmbeddedEngine):
    """Reports the live tokens of now as the most there ever were."""

    def close(self, session: str) -> KVStats:
        stats = super().close(session)
        stats.peak_live = stats.live
        return stats


class CompanyMatters(Watched):
    """Evicts at other times when other sessions run beside."""

    def spoil(self, state: Any) -> None:
        if len(self._scheduler._sessions) > 1:
            state.ledger._schedule._since_due = 5


class Leaky(EmbeddedEngine):
    """Frees no session of whose name is divisible by three."""

    def close(self, session: str) -> KVStats:
        if int(session.rpartition("-")[2]) % 3 == 0:
            self._scheduler.get(session).free = lambda: None  # type: ignore[method-assign]
        return super().close(session)


class StopsLate(EmbeddedEngine):
    """Sees a stop text one token after it is complete."""

    def generate(self, session: str, sampling: Sampling) -> Generation:
        stop, seen = sampling.stop, [False]
        if stop is None:
            return super().generate(session, sampling)

        def late(token: int) -> bool:
            before, seen[0] = seen[0], seen[0] or stop(token)
            return before

        return super().generate(session, dataclasses.replace(sampling, stop=late))


class Forgetful(Generation):
    """Keeps the newest token of a cancelled generation to itself."""

    def __init__(self, inner: Generation) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[int]:
        held: list[int] = []
        for token in self.inner:
            yield from held
            held = [token]
        self.finish_reason = self.inner.finish_reason
        if self.finish_reason is not FinishReason.CANCELLED:
            yield from held

    def cancel(self) -> None:
        self.inner.cancel()


class CancelInexact(EmbeddedEngine):
    """Loses a token of every cancelled generation."""

    def generate(self, session: str, sampling: Sampling) -> Generation:
        return Forgetful(super().generate(session, sampling))


class NoLimit(EmbeddedEngine):
    """Takes prompts of any length."""

    def extend(self, session: str, tokens: Sequence[int], phases: Sequence[Phase]) -> None:
        self._scheduler.get(session).extend(tokens, phases)


class Losing(EmbeddedEngine):
    """Loses a session's rows before its second generation and computes them again."""

    counts = True

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.labellers: dict[str, PhaseLabeller] = {}
        self.logs: dict[str, list[tuple[int, Phase]]] = {}
        self.carried: dict[str, KVStats] = {}

    def open(self, session: str, labeller: PhaseLabeller) -> None:
        super().open(session, labeller)
        self.labellers[session], self.logs[session] = labeller, []

    def extend(self, session: str, tokens: Sequence[int], phases: Sequence[Phase]) -> None:
        self.logs[session] += zip(tokens, phases, strict=True)
        super().extend(session, tokens, phases)

    def generate(self, session: str, sampling: Sampling) -> Generation:
        if self._scheduler.get(session).fed and session not in self.carried:
            self.lose(session)
        return Noted(super().generate(session, sampling), self, session)

    def lose(self, session: str) -> None:
        state = self._scheduler.get(session)
        lost, before = state.fed, super().close(session)
        if self.counts:
            before.recomputed += lost
            before.restarts.append((len(before.events), len(self.logs[session])))
        self.carried[session] = before
        super().open(session, self.labellers[session])
        super().extend(session, *zip(*self.logs[session], strict=True))

    def stats(self, session: str) -> KVStats:
        return self.carried.get(session, KVStats()).followed_by(super().stats(session))

    def close(self, session: str) -> KVStats:
        return self.carried.get(session, KVStats()).followed_by(super().close(session))


class Noted(Generation):
    """Writes generated tokens into the engine's own log."""

    def __init__(self, inner: Generation, engine: Losing, session: str) -> None:
        self.inner, self.engine, self.session = inner, engine, session

    def __iter__(self) -> Iterator[int]:
        label = self.engine.labellers[self.session].label
        for token in self.inner:
            self.engine.logs[self.session].append((token, label(token)))
            yield token
        self.finish_reason = self.inner.finish_reason

    def cancel(self) -> None:
        self.inner.cancel()


class LosingUnseen(Losing):
    """Does not count what it computes again."""

    counts = False


class WritesOverForks(EmbeddedEngine):
    """Lets whoever goes on write behind its own rows, though others have rows there."""

    def fork(self, session: str, new: str, labeller: PhaseLabeller) -> None:
        super().fork(session, new, labeller)
        for name in (session, new):
            self._scheduler.get(name).cache._overwrites = lambda _: False  # type: ignore[method-assign]


class CompactsOverForks(EmbeddedEngine):
    """Moves rows into holes though others have rows there."""

    def fork(self, session: str, new: str, labeller: PhaseLabeller) -> None:
        super().fork(session, new, labeller)
        for name in (session, new):
            self._scheduler.get(name).cache.own_slot = lambda: None  # type: ignore[method-assign]


class RewindsOverForks(EmbeddedEngine):
    """Writes in place behind the rows it went back to, though a fork reads what lies there."""

    def rewind(self, session: str, length: int) -> None:
        super().rewind(session, length)
        self._scheduler.get(session).cache._overwrites = lambda _: False  # type: ignore[method-assign]


class RewindsRowsOnly(EmbeddedEngine):
    """Goes back to the right rows, and on at the position it had come to."""

    def rewind(self, session: str, length: int) -> None:
        state = self._scheduler.get(session)
        before = state.next_position
        super().rewind(session, length)
        state._next = before


class RewindKeepsPending(EmbeddedEngine):
    """Feeds the token that was generated last all the same."""

    def rewind(self, session: str, length: int) -> None:
        state = self._scheduler.get(session)
        drawn = list(state.pending)[:1]
        super().rewind(session, length)
        if drawn and not state.pending:
            state.pending.extend(drawn)


class RewindLeaks(EmbeddedEngine):
    """Keeps the memory of what it forgot."""

    def rewind(self, session: str, length: int) -> None:
        super().rewind(session, length)
        self._scheduler.get(session).free = lambda: None  # type: ignore[method-assign]


class RewindsAnything(EmbeddedEngine):
    """Refuses no method."""

    def _check_rewind(self, *_: Any, **__: Any) -> None:
        return None


class ForgetsWhen(EmbeddedEngine):
    """Counts a fork's tokens to its next event from the fork on."""

    def fork(self, session: str, new: str, labeller: PhaseLabeller) -> None:
        super().fork(session, new, labeller)
        self._scheduler.get(new).ledger._schedule._since_due = 0


class ReadsAnswers(EmbeddedEngine):
    """Reads a forced answer as if it were a prompt, but for its last token."""

    def force(self, session: str, tokens: Sequence[int], *, predict: bool = False) -> Generation:
        self.extend(session, tokens[:-1], [Phase.OTHERS for _ in tokens[:-1]])
        given = super().force(session, tokens[-1:], predict=predict)
        return Prefixed(given, tokens[:-1])


class EchoesAnswers(EmbeddedEngine):
    """Says of given tokens that it would have drawn them."""

    def force(self, session: str, tokens: Sequence[int], *, predict: bool = False) -> Generation:
        generation = super().force(session, tokens)
        generation.best = list(tokens) if predict else ()
        return generation


class Prefixed(Generation):
    """Yields ids before those of a generation."""

    def __init__(self, inner: Generation, before: Sequence[int]) -> None:
        self._inner, self._before = inner, before

    def __iter__(self) -> Iterator[int]:
        yield from self._before
        yield from self._inner
        self.finish_reason = self._inner.finish_reason

    def cancel(self) -> None:
        self._inner.cancel()
