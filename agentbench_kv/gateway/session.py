"""A session: the exact token log, what the client knows of it, and its accounting."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from agentbench_kv.engines.base import Engine, Hints, KVStats, Phase, TurnNotes
from agentbench_kv.gateway.accounting import SessionReport, TurnInfo, merge_stats
from agentbench_kv.gateway.cancellation import Cancellation
from agentbench_kv.gateway.sources import notes_for
from agentbench_kv.phases.machine import PhaseMachine, PhaseTable

__all__ = ["Known", "Plan", "Session"]

Canonical = tuple[str, str, str]
NO_HINTS = Hints()


@dataclass(frozen=True)
class Known:
    """What the client has seen of a session: messages, or a text, never both.

    Attributes
    ----------
    messages : tuple
        Canonical messages, the generated ones included.
    tools : str
        Canonical tool list.
    text : str or None
        Prompt and generated text of a raw session.
    tail : str
        Text of the stop that ended the last generation: in the log, for the client to add.
    """

    messages: tuple[Canonical, ...] = ()
    tools: str = ""
    text: str | None = None
    tail: str = ""


@dataclass(frozen=True)
class Plan:
    """How a request changes the log: ids to append, after a reset or not."""

    ids: list[int]
    reset: bool
    known: Known
    thinking: bool = False


@dataclass
class Session:
    """One engine session and everything the gateway knows about it.

    `tokens` and `phases` hold every id the engine session was given or generated, in order. Whoever
    holds `lock` owns the session; one that is `gone` was closed while its owner-to-be waited.
    """

    id: str
    engine: Engine
    table: PhaseTable
    tokens: list[int] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    known: Known | None = None
    turns: list[TurnInfo] = field(default_factory=list)
    outputs: list[tuple[int, ...]] = field(default_factory=list)
    resets: int = 0
    calls: int = 0
    prompt_sha: str | None = None
    broken: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)
    carried: KVStats = field(default_factory=KVStats)
    opened: bool = False
    gone: bool = False
    running: Cancellation | None = None

    def __post_init__(self) -> None:
        """Make the two machines: the log's own, and the one the engine asks."""
        self.machine = PhaseMachine(self.table)
        self.engine_machine = PhaseMachine(self.table)

    @property
    def fresh(self) -> bool:
        """Whether nothing is in the log."""
        return not self.tokens

    def prepare(self, *, reset: bool) -> None:
        """Have an open engine session, an empty one after a reset."""
        if reset:
            self._reset()
        if not self.opened:
            self.engine.open(self.id, self.engine_machine)
            self.opened = True

    def notes(self, ids: Sequence[int], hints: Hints) -> TurnNotes:
        """Return what is known of prompt ids that are about to be appended."""
        return notes_for(self.machine, ids, hints)

    def extend(self, ids: Sequence[int], hints: Hints = NO_HINTS) -> None:
        """Append prompt ids to the engine session and to the log."""
        if self.prompt_sha is None:
            self.prompt_sha = _sha(ids)
        if not ids:
            return
        if hints or self.engine.wants_notes:
            self.engine.note(self.id, ids, self.notes(ids, hints))
        machine = self.machine.copy()
        phases = machine.label_many(ids)
        self.engine.extend(self.id, ids, phases)
        self.machine = machine
        self.engine_machine.state = machine.state
        self.tokens.extend(ids)
        self.phases.extend(phases)

    def record_output(self, ids: Sequence[int]) -> None:
        """Append generated ids to the log."""
        self.phases.extend(self.machine.label_many(ids))
        self.tokens.extend(ids)
        self.outputs.append(tuple(ids))
        self.engine_machine.state = self.machine.state

    def next_call_id(self) -> str:
        """Return the id of the session's next tool call."""
        self.calls += 1
        return f"call_{self.calls}"

    def stats(self) -> KVStats:
        """Return the accounting over all resets."""
        now = self.engine.stats(self.id) if self.opened else KVStats()
        return merge_stats(self.carried, now)

    def report(self) -> SessionReport:
        """Return the accounting with the turns it is made of."""
        return self._report(self.stats())

    def close(self) -> SessionReport:
        """Free the engine session and return the final accounting."""
        if self.opened:
            self.opened = False
            self.carried = merge_stats(self.carried, self.engine.close(self.id))
        return self._report(self.carried)

    def _report(self, stats: KVStats) -> SessionReport:
        turns, outputs = tuple(self.turns), tuple(self.outputs)
        return SessionReport(self.id, turns, self.resets, self.prompt_sha, stats, outputs)

    def _reset(self) -> None:
        self.close()
        self.resets += 1
        self.broken = False
        self.tokens, self.phases, self.known = [], [], None
        self.machine = PhaseMachine(self.table)
        self.engine_machine = PhaseMachine(self.table)


def _sha(ids: Sequence[int]) -> str:
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()
