"""Driving an engine through its contract and recording everything it did.

`drive` runs the embedded engine on a model in memory, turn by turn; a `Driver` runs any engine as a
user starts it, each session on a thread of its own.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from torch import Tensor

from agentbench_kv.analysis.traces import CacheEvent, ScoredEvent
from agentbench_kv.conformance.scenes import made_up_calibration
from agentbench_kv.engines.base import (
    Capability,
    Engine,
    EngineOptions,
    FinishReason,
    Generation,
    KVStats,
    PhaseLabeller,
    Sampling,
)
from agentbench_kv.engines.core.grammar import GrammarVocabulary
from agentbench_kv.engines.embedded.engine import EmbeddedEngine
from agentbench_kv.engines.embedded.model import fix_rope
from agentbench_kv.engines.embedded.observer import Observer
from agentbench_kv.errors import KVBenchError
from agentbench_kv.methods.base import Method, Selection
from agentbench_kv.methods.spans import Source, TurnNotes
from agentbench_kv.phases import TokenCodec, TokenPhases
from agentbench_kv.phases.tokens import IncrementalDecoder, StopMatcher

PATIENCE_S = 10.0
SYSTEM_SHARE = 3  # of a session's first prompt, one part in so many passes for a system message
_POOL_FIGURES = {"free_blocks", "total_blocks", "sessions", "allocated_bytes"}
_numbers = itertools.count(1)


@dataclass(frozen=True)
class TurnPlan:
    """One turn of a session: what to prefill, and when to stop."""

    prompt: Sequence[int]
    max_tokens: int  # 0 leaves the prompt for the next turn's generation
    stop_ids: frozenset[int] = frozenset()
    stop_text: str = ""
    own_stop: bool = False  # the text is matched by a function the engine cannot look into
    cancel_after: int | None = None  # tokens read before the cancel
    system: int = 0  # first tokens of a session that are its system message; 0: some of them
    grammar: str = ""  # that the answer is held to, in llguidance's Lark


IDLE = TurnPlan((), 0)
"""A turn in which a session does nothing while others continue."""


def default_turns(vocab: int = 64, seed: int = 0) -> list[TurnPlan]:
    """Return six turns: 240 decoded tokens, prompts of 1 to 600 ids (several prefill chunks)."""
    return _random_turns(vocab, seed, [(length, 40) for length in (120, 600, 1, 33, 70, 15)])


def short_turns(vocab: int = 64, seed: int = 0) -> list[TurnPlan]:
    """Return three turns: 205 decoded tokens after 190 of prompts."""
    return _random_turns(vocab, seed, [(90, 70), (40, 65), (60, 70)])


def _random_turns(vocab: int, seed: int, sizes: Sequence[tuple[int, int]]) -> list[TurnPlan]:
    generator = torch.Generator().manual_seed(seed)
    return [
        TurnPlan(torch.randint(vocab, (prompt,), generator=generator).tolist(), decode)
        for prompt, decode in sizes
    ]


@dataclass
class SessionTrace:
    """Everything an engine did in one session; `turns`, `reasons`, `after` have an entry a turn."""

    tokens: list[int] = field(default_factory=list)  # the last one was never fed to the model
    phases: list[int] = field(default_factory=list)
    decoded_at: list[int] = field(default_factory=list)  # positions of the generated ids
    # [vocab], by the position they predict; none of engines that do not show them.
    logits: dict[int, Tensor] = field(default_factory=dict)
    events: list[CacheEvent] = field(default_factory=list)
    stats: KVStats = field(default_factory=KVStats)
    turns: list[list[int]] = field(default_factory=list)  # generated ids
    reasons: list[FinishReason | None] = field(default_factory=list)
    after: list[KVStats] = field(default_factory=list)  # accounting after the turn
    kept_missing: str = ""  # why `events` are not those of `stats`; empty if they are
    error: Exception | None = None  # what ended the session early
    system: int = 0  # tokens that the engine was told are the system message

    @property
    def prompt(self) -> int:
        """Tokens of the first prefill."""
        return self.decoded_at[0] if self.decoded_at else len(self.tokens)

    def add(self, tokens: Sequence[int], *, decoded: bool) -> None:
        if decoded:
            self.decoded_at += range(len(self.tokens), len(self.tokens) + len(tokens))
        self.tokens += tokens
        self.phases += map(int, plain_phases(tokens))


def plain_phases(tokens: Sequence[int]) -> list[Any]:
    """Return the phases of tokens of which none is a marker."""
    return [TokenPhases().label(token) for token in tokens]


def epochs(trace: SessionTrace) -> list[tuple[list[int], SessionTrace]]:
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
            found.append((positions, SessionTrace(trace.tokens[: last + 1], events=events)))
    return found


class TraceRecorder(Observer):
    """Logits and events of an engine in this process, by session: its recorder and observer."""

    def __init__(self) -> None:
        self.logits: dict[str, dict[int, Tensor]] = defaultdict(dict)
        self.events: dict[str, list[CacheEvent]] = defaultdict(list)
        self._selected: dict[str, ScoredEvent] = {}

    def on_logits(self, session: str, logical: int, logits: Tensor) -> None:
        self.logits[session][logical] = logits.detach().cpu().clone()

    def on_selection(
        self, session: str, logical: int, positions: Tensor, selection: Selection
    ) -> None:
        self._selected[session] = ScoredEvent.from_selection(logical, positions, selection)

    def on_event(self, session: str, logical: int, kept_positions: Tensor) -> None:
        """Take what is in the cache after an event, whatever the method had selected."""
        event = CacheEvent(logical, kept_positions.detach().cpu().clone())
        selected = self._selected.pop(session, None)
        self.events[session].append(replace(selected, **vars(event)) if selected else event)

    def kept(self, names: Sequence[str]) -> list[Tensor]:
        """Return original positions [layers, kv_heads, budget] of every event, in order.

        `names` is what the engine called the session, one name after the other.
        """
        return [event.kept for name in names for event in self.events[name]]


def read_kept(folder: Path, names: Sequence[str]) -> list[Tensor]:
    """As `TraceRecorder.kept`, from files that an engine wrote to its `EngineOptions.trace`."""
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors"))
    starts = [quote(name, safe="") + "." for name in names]
    return [load_file(f)["kept"] for start in starts for f in files if f.name.startswith(start)]


class DrivenSession:
    """A session opened on an engine, and its trace."""

    def __init__(self, engine: Engine, name: str) -> None:
        self.engine, self.name, self.trace = engine, name, SessionTrace()
        engine.open(name, TokenPhases())

    def fork(self, name: str, labeller: PhaseLabeller) -> DrivenSession:
        """Return a session that goes on from here; its trace has this one's turns."""
        twin = copy.copy(self)
        self.engine.fork(self.name, name, labeller)
        twin.name, twin.trace = name, copy.deepcopy(self.trace)
        return twin

    def feed(self, prompt: Sequence[int]) -> None:
        engine = self.engine
        if Capability.PROTECT_SYSTEM in engine.capabilities and engine.wants_notes:
            if not self.trace.tokens:
                self.trace.system = self.trace.system or len(prompt) // SYSTEM_SHARE
            notes = TurnNotes([(len(prompt), Source.DOCUMENT)], system=self.trace.system)
            engine.note(self.name, prompt, notes)
        engine.extend(self.name, prompt, plain_phases(prompt))
        self.trace.add(prompt, decoded=False)

    def start(self, turn: TurnPlan, sampling: Sampling) -> Generation | None:
        """Prefill a turn's prompt and start its generation, if it has one."""
        if turn.prompt:
            self.trace.system = self.trace.system or turn.system
            self.feed(turn.prompt)
        return self.engine.generate(self.name, sampling) if turn.max_tokens else None

    def read(self, generation: Generation | None, cancel_after: int | None = None) -> None:
        """Read a turn's generation to its end."""
        generated: list[int] = []
        self.trace.turns.append(generated)
        if generation is not None:
            if cancel_after == 0:
                generation.cancel()
            for token in generation:
                self.trace.add([token], decoded=True)
                generated.append(token)
                if len(generated) == cancel_after:
                    generation.cancel()
        self.trace.reasons.append(generation.finish_reason if generation else None)

    def close(self) -> None:
        self.trace.stats = self.engine.close(self.name)


def calibrated_for(model: Any, method: Method) -> Method:
    """Return the method with made-up statistics of a model in memory, if it needs any."""
    if not method.needs_calibration:
        return method
    shape = model.config
    rope = fix_rope(copy.deepcopy(model.model.rotary_emb), shape.max_position_embeddings)
    sizes = (shape.num_hidden_layers, shape.num_attention_heads)
    return method.with_calibration(made_up_calibration(*sizes, rope.full.float(), rope.scale))


def in_memory_engine(model: Any, method: Method, recorder: TraceRecorder) -> EmbeddedEngine:
    """Start the embedded engine on a copy of a transformers model, watched by a recorder."""
    options = EngineOptions(model="in-memory", method=method, device="cpu", max_live_tokens=10**6)
    return EmbeddedEngine.create(options, model=copy.deepcopy(model), recorder=recorder)


def drive(
    model: Any, method: Method, sessions: Mapping[str, Sequence[TurnPlan]], *, together: bool = True
) -> dict[str, SessionTrace]:
    """Run sessions on one embedded engine and return their traces, with logits and scores.

    The engine gets a copy of `model`; the method made-up statistics of it, if it needs any. The
    turns of all sessions run at the same time, or each session after the one before.
    """
    recorder = TraceRecorder()
    engine = in_memory_engine(model, calibrated_for(model, method), recorder)
    groups = [sessions] if together else [{name: turns} for name, turns in sessions.items()]
    traces = {}
    try:
        for group in groups:
            traces.update(_drive_group(engine, group))
    finally:
        engine.shutdown()
    for name, trace in traces.items():
        trace.logits, trace.events = recorder.logits[name], recorder.events[name]
    return traces


def _drive_group(
    engine: EmbeddedEngine, sessions: Mapping[str, Sequence[TurnPlan]]
) -> dict[str, SessionTrace]:
    opened = {name: DrivenSession(engine, name) for name in sessions}
    for index in range(max(map(len, sessions.values()))):
        running = [
            (opened[name], opened[name].start(turns[index], random_sampling(turns[index], index)))
            for name, turns in sessions.items()
            if index < len(turns)
        ]
        for session, generation in running:
            session.read(generation)
    for session in opened.values():
        session.close()
    return {name: session.trace for name, session in opened.items()}


def random_sampling(turn: TurnPlan, seed: int) -> Sampling:
    """Draw tokens at random, so that a session wanders through the vocabulary."""
    return Sampling(turn.max_tokens, temperature=1.0, seed=seed)


def pool_of(engine: Any) -> dict[str, Any] | None:
    """Return what an engine says of its memory; None if it says nothing."""
    return {key: value for key, value in engine.pool().items() if key in _POOL_FIGURES} or None


def settled(engine: Any, wanted: dict[str, Any]) -> dict[str, Any]:
    """Wait until the pool is as wanted, at most `PATIENCE_S`; return it as it is then.

    Engines free what a closed session held on a thread of their own.
    """
    deadline = time.monotonic() + PATIENCE_S
    while (pool := pool_of(engine) or {}) != wanted and time.monotonic() < deadline:
        time.sleep(0.02)
    return pool


def stop_matcher(codec: TokenCodec, text: str) -> StopMatcher:
    return StopMatcher(IncrementalDecoder(codec, codec.special), [text])


def takes_recorder(create: Any) -> bool:
    return "recorder" in inspect.signature(create).parameters


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
                recorder = TraceRecorder()
                self.engine = cls.create(options, recorder=recorder)
                self._kept = recorder.kept
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
        try:
            self.engine.reconfigure(method)
        except (KVBenchError, OSError):
            return False
        self.method = method
        return True

    def play(
        self,
        sessions: Mapping[str, Sequence[TurnPlan]],
        *,
        together: bool = True,
        between: Callable[[], None] = lambda: None,
    ) -> dict[str, SessionTrace]:
        """Play sessions to their ends, each on its own thread or one after the other.

        `between` is called after every session's first turn.
        """
        with ThreadPoolExecutor(len(sessions) if together else 1) as threads:
            play_one = partial(self._play_one, between=between)
            traces = threads.map(play_one, sessions, sessions.values())
            return dict(zip(sessions, traces, strict=True))

    def _play_one(
        self, label: str, turns: Sequence[TurnPlan], *, between: Callable[[], None]
    ) -> SessionTrace:
        session = DrivenSession(self.engine, f"{label}-{next(_numbers)}")
        name, trace = session.name, session.trace
        # What the engine calls the session in its recorder or trace folder; a restart changes it.
        kept_name, kept_names = getattr(self.engine, "kept_names", str), dict[str, None]()
        try:
            for index, turn in enumerate(turns):
                session.read(session.start(turn, self._sampling(turn)), turn.cancel_after)
                trace.after.append(self.engine.stats(name))
                kept_names[str(kept_name(name))] = None
                if index == 0:
                    between()
        except Exception as error:  # noqa: BLE001  an engine may raise anything; a check reports it
            trace.error = error
        finally:
            session.close()
        self._read_events(trace, list(kept_names))
        return trace

    def _sampling(self, turn: TurnPlan) -> Sampling:
        matcher = stop_matcher(self._codec, turn.stop_text) if turn.stop_text else None
        stop = matcher if matcher is None or not turn.own_stop else (lambda t: matcher(t))
        held = self._vocabulary.constraint(turn.grammar) if turn.grammar else None
        return Sampling(turn.max_tokens, stop_token_ids=turn.stop_ids, stop=stop, constraint=held)

    @cached_property
    def _vocabulary(self) -> GrammarVocabulary:
        ends = self.engine.info.eos_token_ids
        return GrammarVocabulary(self._codec.tokenizer.backend_tokenizer.to_str(), ends)

    def _read_events(self, trace: SessionTrace, names: Sequence[str]) -> None:
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
        trace.events = [CacheEvent(event.logical, rows) for event, rows in pairs]
