"""Driving any engine through its contract and recording everything it did.

What a session was asked and what an engine did in it, the same for every engine.

What an engine's events kept: told to a recorder in this process, or read from a trace folder.

What an engine says of its memory.
"""

from __future__ import annotations

import inspect
import itertools
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import quote

from torch import Tensor

from agentbench_kv.conformance.reference import Event, Trace, feed
from agentbench_kv.engines.base import EngineOptions, FinishReason, KVStats, Sampling
from agentbench_kv.engines.embedded.observer import Observer
from agentbench_kv.errors import KVBenchError
from agentbench_kv.methods.base import Method
from agentbench_kv.phases import TokenCodec, TokenPhases
from agentbench_kv.phases.tokens import IncrementalDecoder, StopMatcher


@dataclass(frozen=True)
class Step:
    """One turn of a session: what to prefill, and when to stop."""

    prompt: tuple[int, ...]
    max_tokens: int  # 0 leaves the prompt for the next step's generation
    stop_ids: frozenset[int] = frozenset()
    stop_text: str = ""
    own_stop: bool = False  # the text is matched by a function the engine cannot look into
    cancel_after: int | None = None  # tokens read before the cancel


@dataclass
class EngineTrace(Trace):
    """A trace of any engine, without logits; lists have one entry per step."""

    turns: list[list[int]] = field(default_factory=list)  # generated ids
    reasons: list[FinishReason | None] = field(default_factory=list)
    after: list[KVStats] = field(default_factory=list)  # accounting after the step
    kept_missing: str = ""  # why `events` are not those of `stats`; empty if they are
    error: Exception | None = None  # what ended the session early


def epochs(trace: EngineTrace) -> list[tuple[list[int], Trace]]:
    """Cut a session where its rows were lost, as its accounting says.

    Each part is the positions of the tokens generated in it, and the session up to its end with
    the events since its start: a loss undoes evictions, as everything before it is computed again
    in one prefill without a mask.
    """
    starts = [(0, 0), *trace.stats.restarts, (len(trace.events), len(trace.tokens))]
    found = []
    for (before, start), (until, end) in pairwise(starts):
        positions = [position for position in trace.decoded_at if start <= position < end]
        if positions:
            # Later events than the last token's query change nothing.
            last = positions[-1]
            events = [event for event in trace.events[before:until] if event.logical < last]
            found.append((positions, Trace(trace.tokens[: last + 1], events=events)))
    return found


class KeptRecorder(Observer):
    """Kept sets of an engine that runs in this process."""

    def __init__(self) -> None:
        self._kept: dict[str, list[Tensor]] = defaultdict(list)

    def on_event(self, session: str, logical: int, kept_positions: Tensor) -> None:  # noqa: ARG002
        self._kept[session].append(kept_positions.detach().cpu().clone())

    def of(self, names: Sequence[str]) -> list[Tensor]:
        """Return original positions [layers, kv_heads, budget] of every event, in order.

        `names` is what the engine called the session, one name after the other.
        """
        return [kept for name in names for kept in self._kept[name]]


def read_kept(folder: Path, names: Sequence[str]) -> list[Tensor]:
    """As `KeptRecorder.of`, from the files that an engine wrote to its `EngineOptions.trace`."""
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors"))
    starts = [quote(name, safe="") + "." for name in names]
    return [load_file(f)["kept"] for start in starts for f in files if f.name.startswith(start)]


def takes_recorder(create: Any) -> bool:
    return "recorder" in inspect.signature(create).parameters


PATIENCE_S = 10.0


_COMPARED = {"free_blocks", "total_blocks", "sessions", "allocated_bytes"}


def pool_of(engine: Any) -> dict[str, Any] | None:
    """Return what an engine says of its memory; None if it says nothing."""
    return {key: value for key, value in engine.pool().items() if key in _COMPARED} or None


def settled(engine: Any, wanted: dict[str, Any]) -> dict[str, Any]:
    """Wait until the pool is as wanted, at most `PATIENCE_S`; return it as it is then.

    Engines free what a closed session held on a thread of their own.
    """
    deadline = time.monotonic() + PATIENCE_S
    while (pool := pool_of(engine) or {}) != wanted and time.monotonic() < deadline:
        time.sleep(0.02)
    return pool


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
