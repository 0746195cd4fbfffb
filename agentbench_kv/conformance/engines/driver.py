"""Driving any engine through its contract and recording everything it did."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from agentbench_kv.conformance.engines.kept import KeptRecorder, read_kept, takes_recorder
from agentbench_kv.conformance.engines.pools import pool_of
from agentbench_kv.conformance.engines.traces import EngineTrace, Step
from agentbench_kv.conformance.tracing import Event, feed
from agentbench_kv.engines.base import Sampling
from agentbench_kv.engines.options import EngineOptions
from agentbench_kv.errors import KVBenchError
from agentbench_kv.methods.base import Method
from agentbench_kv.phases import TokenCodec, TokenPhases
from agentbench_kv.phases.decoding import IncrementalDecoder, StopMatcher

_numbers = itertools.count(1)


def stop_matcher(codec: TokenCodec, text: str) -> StopMatcher:
    return StopMatcher(IncrementalDecoder(codec, codec.special), [text])


class Driver:
    """An engine under test, and what it says it kept.

    `cls.create(options)` gets a recorder if it takes one, else a trace folder; `codec` is the
    model's, for stop texts.
    """

    def __init__(self, cls: Any, options: EngineOptions, codec: TokenCodec) -> None:
        self._codec = codec
        self._scratch = tempfile.TemporaryDirectory(prefix="kvbench-trace-")
        self.method = options.method
        try:
            if takes_recorder(cls.create):
                recorder = KeptRecorder()
                self.engine = cls.create(options, recorder=recorder)
                self._kept = recorder.of
            else:
                folder = Path(self._scratch.name)
                self.engine = cls.create(replace(options, trace=folder))
                self._kept = partial(read_kept, folder)
        except BaseException:
            self._scratch.cleanup()
            raise
        self.pool_at_start = pool_of(self.engine)

    def close(self) -> None:
        self.engine.shutdown()
        self._scratch.cleanup()

    def reconfigure(self, method: Method) -> bool:
        """Change to another method, if the engine can without a new start."""
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
        between: Callable[[], None] = lambda: None,
    ) -> dict[str, EngineTrace]:
        """Play sessions to their ends, each on its own thread or one after the other.

        `between` is called after every session's first step.
        """
        with ThreadPoolExecutor(len(sessions) if together else 1) as threads:
            play_one = partial(self._play_one, between=between)
            traces = threads.map(play_one, sessions, sessions.values())
            return dict(zip(sessions, traces, strict=True))

    def _play_one(
        self, label: str, steps: Sequence[Step], *, between: Callable[[], None]
    ) -> EngineTrace:
        name, trace, kept_names = f"{label}-{next(_numbers)}", EngineTrace(), dict[str, None]()
        # What the engine calls the session in its recorder or trace folder; a restart changes it.
        kept_name = getattr(self.engine, "kept_names", str)
        self.engine.open(name, TokenPhases())
        try:
            for index, step in enumerate(steps):
                self._step(name, step, trace)
                trace.after.append(self.engine.stats(name))
                kept_names[str(kept_name(name))] = None
                if index == 0:
                    between()
        except Exception as error:  # noqa: BLE001  an engine may raise anything; a check reports it
            trace.error = error
        finally:
            trace.stats = self.engine.close(name)
        self._read_events(trace, list(kept_names))
        return trace

    def _step(self, name: str, step: Step, trace: EngineTrace) -> None:
        if step.prompt:
            feed(self.engine, name, step.prompt, trace)
        turn: list[int] = []
        trace.turns.append(turn)
        if not step.max_tokens:
            trace.reasons.append(None)
            return
        generation = self.engine.generate(name, self._sampling(step))
        if step.cancel_after == 0:
            generation.cancel()
        for token in generation:
            trace.add([token], decoded=True)
            turn.append(token)
            if len(turn) == step.cancel_after:
                generation.cancel()
        trace.reasons.append(generation.finish_reason)

    def _sampling(self, step: Step) -> Sampling:
        matcher = stop_matcher(self._codec, step.stop_text) if step.stop_text else None
        stop = matcher if matcher is None or not step.own_stop else (lambda t: matcher(t))
        return Sampling(max_tokens=step.max_tokens, stop_token_ids=step.stop_ids, stop=stop)

    def _read_events(self, trace: EngineTrace, names: Sequence[str]) -> None:
        """Match kept sets with the events of the accounting."""
        kept, events = self._kept(names), trace.stats.events
        last = len(trace.tokens) - 1
        # An event behind the last forward may never be carried out: nobody would see it.
        needed = sum(event.logical < last for event in events)
        if not needed <= len(kept) <= len(events):
            trace.kept_missing = f"{len(events)} events, kept sets of {len(kept)}"
        marks = [*trace.stats.restarts, (len(events), len(trace.tokens))]
        if marks != sorted(marks) or [n for _, n in marks] != sorted(n for _, n in marks):
            trace.kept_missing = f"restarts {trace.stats.restarts} are not in order"
        pairs = zip(events, kept, strict=False)
        trace.events = [Event(event.logical, rows) for event, rows in pairs]
