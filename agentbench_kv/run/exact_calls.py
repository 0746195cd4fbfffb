"""What a running engine's cache does to recorded tool calls: fidelity's `calls_exact`, anywhere.

Divergences need two caches at once, and only the embedded engine has them. Whether a call's every
token is the cache's own best needs one, on any engine that takes given answers.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from agentbench_kv.analysis.fidelity import FidelityCounts
from agentbench_kv.engines.base import Engine
from agentbench_kv.errors import KVBenchError
from agentbench_kv.gateway.session import notes_for
from agentbench_kv.methods.base import Phase
from agentbench_kv.methods.spans import Hints
from agentbench_kv.phases import PhaseMachine, PhaseTable, load_tokenizer, system_tokens
from agentbench_kv.run.kinds import Labelled
from agentbench_kv.run.recordings import RecordedTurn, Recording, refuse_other_labels


@dataclass(frozen=True)
class ExactCalls:
    """Recorded calls, and those whose every token is the best by the cache as it then was."""

    right: int
    asked: int
    events: int  # evictions in those sessions, and times that a method dropped messages
    seconds: float  # that playing them took
    parts: Mapping[str, tuple[int, int]]  # right and asked of each session with calls
    behind: Mapping[str, tuple[int, int]]  # of these, those of answers behind an event


def exact_calls(
    engine: Engine,
    recordings: Sequence[Recording],
    tool_syntax: str = "auto",
    closing: str = "",
) -> ExactCalls:
    """Play recorded sessions one after the other, with their answers given.

    `closing` is the method's, `tool_syntax` is how the recorded calls are written. A KVBenchError
    if the engine has no room for one, or does not say what it would have drawn.
    """
    if closing:
        refuse_other_labels(closing)
    table = PhaseTable.for_tokenizer(load_tokenizer(engine.info.model_path), tool_syntax)
    parts: dict[str, tuple[int, int]] = {}
    behind: dict[str, tuple[int, int]] = {}
    events, began = 0, time.perf_counter()
    for number, recording in enumerate(recordings):
        counts = {False: FidelityCounts(), True: FidelityCounts()}  # behind an event, or not
        session = _Session(engine, f"given|{number}|{recording.sample}", table)
        try:
            for turn in recording.turns:
                session.read(turn)
                earlier, start = session.events, engine.stats(session.name).decode_tokens
                same = _played(engine, session.name, turn.answer)
                # An event of the prompt comes with the answer's first token.
                late = earlier > 0 or session.first_event <= start + 1
                counts[late].add_calls(same, same, [each is Phase.ACT for _, each in turn.answer])
                counts[late].end_call()
                session.log += turn.answer
        finally:
            events += session.close()
        before, after = (counts[late].sums["calls_exact"] for late in (False, True))
        right, asked = (int(one + other) for one, other in zip(before, after, strict=True))
        if asked:
            parts[recording.sample] = (right, asked)
        if after[1]:
            behind[recording.sample] = (int(after[0]), int(after[1]))
    right, asked = (sum(pair[side] for pair in parts.values()) for side in (0, 1))
    return ExactCalls(right, asked, events, time.perf_counter() - began, parts, behind)


class _Session:
    """A session of the engine, and what it holds."""

    def __init__(self, engine: Engine, name: str, table: PhaseTable) -> None:
        self.name = name
        self.log: Labelled = ()
        self._engine, self._table = engine, table
        self._events = 0
        self._machine = PhaseMachine(table)
        engine.open(name, self._machine)

    @property
    def events(self) -> int:
        """How often something left it so far, as `ExactCalls.events` counts."""
        return self._events + len(self._engine.stats(self.name).events)

    @property
    def first_event(self) -> float:
        """Tokens that were drawn before the engine's first event; endless without one."""
        events = self._engine.stats(self.name).events
        return events[0].decoded if events else inf

    def read(self, turn: RecordedTurn) -> None:
        """Add a turn's prompt, with the notes that a gateway would give."""
        prompt = turn.prompt if turn.keep is None else self._shortened(turn.keep) + turn.prompt
        ids, phases = zip(*prompt, strict=True)
        if self._engine.wants_notes:
            system = 0 if self.log else system_tokens(self._table, ids)
            notes = replace(notes_for(self._machine, ids, Hints()), system=system)
            self._engine.note(self.name, ids, notes)
        self._machine.label_many(ids)  # what is answered is labelled from where they end
        self._engine.extend(self.name, ids, phases)
        self.log += prompt

    def close(self) -> int:
        """Free the session; return its events."""
        return self._events + len(self._engine.close(self.name).events)

    def _shortened(self, keep: int) -> Labelled:
        """Forget all but the first tokens; return those that the engine has to read again."""
        self._events += 1
        kept = self.log[:keep]
        if keep and self._engine.info.rewinds:
            self._engine.rewind(self.name, keep)
            self.log = kept
            self._machine.state = PhaseMachine(self._table).state
            self._machine.label_many([token for token, _ in kept])
            return ()
        self._events += len(self._engine.close(self.name).events)
        self.log, self._machine = (), PhaseMachine(self._table)
        self._engine.open(self.name, self._machine)
        return kept


def _played(engine: Engine, session: str, answer: Sequence[tuple[int, Phase]]) -> list[bool]:
    """Have the engine take an answer; return which of its tokens it would have drawn itself."""
    given = [token for token, _ in answer]
    generation = engine.force(session, given, predict=True)
    for _ in generation:
        pass
    if len(generation.best) != len(given):
        raise KVBenchError(
            f"engine {engine.info.name!r} said what it would have drawn of {len(generation.best)} "
            f"of {len(given)} given tokens"
        )
    return [own == token for own, token in zip(generation.best, given, strict=True)]
