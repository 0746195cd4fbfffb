"""Driving any engine through its contract while everything it did is written down."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agentbench_kv.conformance.engines.kept import (
    KeptFiles,
    KeptRecorder,
    KeptSets,
    takes_recorder,
)
from agentbench_kv.conformance.engines.pools import pool_of
from agentbench_kv.conformance.engines.traces import EngineTrace, Step
from agentbench_kv.conformance.tracing import Event
from agentbench_kv.engines.base import Engine, Generation, Sampling
from agentbench_kv.engines.options import EngineOptions
from agentbench_kv.errors import KVBenchError
from agentbench_kv.methods.base import Method
from agentbench_kv.phases import TokenCodec, TokenPhases
from agentbench_kv.phases.decoding import IncrementalDecoder, StopMatcher

__all__ = ["Rig", "stop_matcher"]

_numbers = itertools.count(1)


def stop_matcher(codec: TokenCodec, text: str) -> StopMatcher:
    """Return a new matcher of one stop text."""
    return StopMatcher(IncrementalDecoder(codec, codec.special), [text])


@dataclass(frozen=True)
class _Play:
    """One session being played."""

    name: str
    steps: Sequence[Step]
    trace: EngineTrace
    between: Callable[[], None] | None


class Rig:
    """An engine under test, with what it says it kept.

    Parameters
    ----------
    cls : engine class
        With `create(options)`; gets a recorder if it takes one, else a trace folder.
    options : EngineOptions
    codec : TokenCodec
        The model's, for stop texts.
    """

    def __init__(self, cls: Any, options: EngineOptions, codec: TokenCodec) -> None:
        self._codec = codec
        self._scratch = tempfile.TemporaryDirectory(prefix="kvbench-trace-")
        self.method = options.method
        try:
            self.engine, self.kept = _start(cls, options, Path(self._scratch.name))
        except BaseException:
            self._scratch.cleanup()
            raise
        self.pool_at_start = pool_of(self.engine)

    def close(self) -> None:
        """Shut the engine down."""
        self.engine.shutdown()
        self._scratch.cleanup()

    def reconfigure(self, method: Method) -> bool:
        """Go on with another method, if the engine can without a new start."""
        change = getattr(self.engine, "reconfigure", None)
        if change is None:
            return False
        try:
            change(method)
        except (KVBenchError, OSError):
            return False
        self.method = method
        return True

    def play(
        self,
        sessions: Mapping[str, Sequence[Step]],
        *,
        together: bool = True,
        between: Callable[[], None] | None = None,
    ) -> dict[str, EngineTrace]:
        """Play sessions to their ends and close them.

        Parameters
        ----------
        sessions : mapping of name to steps
        together : bool
            Each on a thread of its own; or one after the other.
        between : callable, optional
            Called after every session's first step.
        """
        plays = {
            name: _Play(f"{name}-{next(_numbers)}", steps, EngineTrace(), between)
            for name, steps in sessions.items()
        }
        with ThreadPoolExecutor(len(plays) if together else 1) as threads:
            list(threads.map(self._run, plays.values()))
        return {name: play.trace for name, play in plays.items()}

    def _run(self, play: _Play) -> None:
        trace, names = play.trace, dict[str, None]()
        self.engine.open(play.name, TokenPhases())
        try:
            for index, step in enumerate(play.steps):
                self._step(play, step)
                trace.after.append(self.engine.stats(play.name))
                names[self._kept_name(play.name)] = None
                if index == 0 and play.between is not None:
                    play.between()
        except Exception as error:  # noqa: BLE001  an engine may raise anything; a check reports it
            trace.error = error
        finally:
            trace.stats = self.engine.close(play.name)
        self._read_events(trace, list(names))

    def _step(self, play: _Play, step: Step) -> None:
        trace = play.trace
        if step.prompt:
            label = TokenPhases().label
            self.engine.extend(play.name, step.prompt, [label(token) for token in step.prompt])
            trace.add(step.prompt, decoded=False)
        trace.turns.append([])
        if not step.max_tokens:
            trace.reasons.append(None)
            return
        generation = self.engine.generate(play.name, self._sampling(step))
        self._read(play, step, generation)
        trace.reasons.append(generation.finish_reason)

    def _read(self, play: _Play, step: Step, generation: Generation) -> None:
        trace, turn = play.trace, play.trace.turns[-1]
        if step.cancel_after == 0:
            generation.cancel()
        for token in generation:
            trace.add([token], decoded=True)
            turn.append(token)
            if len(turn) == step.cancel_after:
                generation.cancel()

    def _sampling(self, step: Step) -> Sampling:
        matcher = stop_matcher(self._codec, step.stop_text) if step.stop_text else None
        stop = matcher if matcher is None or not step.own_stop else (lambda t: matcher(t))
        return Sampling(max_tokens=step.max_tokens, stop_token_ids=step.stop_ids, stop=stop)

    def _kept_name(self, session: str) -> str:
        name = getattr(self.engine, "kept_names", None)
        return session if name is None else str(name(session))

    def _read_events(self, trace: EngineTrace, names: Sequence[str]) -> None:
        """Put kept sets to the events of the accounting."""
        kept, events = self.kept.of(names), trace.stats.events
        last = len(trace.tokens) - 1
        # An event behind the last forward may never be carried out: nobody would see it.
        needed = len([event for event in events if event.logical < last])
        if not needed <= len(kept) <= len(events):
            trace.kept_missing = f"{len(events)} events, kept sets of {len(kept)}"
        marks = [*trace.stats.restarts, (len(events), len(trace.tokens))]
        if marks != sorted(marks) or [n for _, n in marks] != sorted(n for _, n in marks):
            trace.kept_missing = f"restarts {trace.stats.restarts} are not in order"
        pairs = zip(events, kept, strict=False)
        trace.events = [Event(event.logical, rows) for event, rows in pairs]


def _start(cls: Any, options: EngineOptions, folder: Path) -> tuple[Engine, KeptSets]:
    """Start an engine and make it tell what its events keep."""
    if takes_recorder(cls.create):
        recorder = KeptRecorder()
        return cls.create(options, recorder=recorder), recorder
    return cls.create(replace(options, trace=folder)), KeptFiles(folder)
