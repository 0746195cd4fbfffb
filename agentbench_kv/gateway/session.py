"""A session: the exact token log, what the client knows of it, and its accounting."""

from __future__ import annotations

import hashlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Self

from agentbench_kv.engines.accounting import merge_stats
from agentbench_kv.engines.base import Engine, Hints, KVStats, Phase
from agentbench_kv.gateway.accounting import SessionReport, TurnInfo
from agentbench_kv.gateway.cancellation import Cancellation
from agentbench_kv.gateway.messages import Canonical, Message, canonical, tools_key
from agentbench_kv.gateway.sources import notes_for
from agentbench_kv.phases.machine import PhaseMachine, PhaseTable


@dataclass(frozen=True)
class Known:
    """What the client has seen of a session: messages, or a text, never both."""

    messages: tuple[Canonical, ...] = ()  # the generated ones included
    tools: str = ""
    text: str | None = None  # prompt and generated text of a raw session
    tail: str = ""  # the stop that ended the last generation: in the log, for the client to add

    @classmethod
    def of_chat(
        cls, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None
    ) -> Self:
        return cls(tuple(canonical(message) for message in messages), tools_key(tools))

    def extends(self, old: Known) -> bool:
        """Return whether a chat request goes on from `old`: same tools, a longer history."""
        same = old.text is None and old.tools == self.tools
        return same and self.messages[: len(old.messages)] == old.messages


@dataclass(frozen=True)
class Plan:
    """How a request changes the log: ids to append, after a reset or not."""

    ids: list[int]
    reset: bool
    known: Known
    thinking: bool = False


@dataclass
class BaseSession(ABC):
    """What a gateway knows of a session, whatever its engine works with.

    Whoever holds `lock` owns the session; one that is `gone` was closed while its owner-to-be
    waited.
    """

    id: str
    _: KW_ONLY
    known: Known | None = None
    turns: list[TurnInfo] = field(default_factory=list)
    outputs: list[tuple[int, ...]] = field(default_factory=list)
    resets: int = 0
    prompt_sha: str | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    opened: bool = False
    gone: bool = False
    running: Cancellation | None = None

    @abstractmethod
    def stats(self) -> KVStats:
        """Return the accounting over all resets."""

    @abstractmethod
    def close(self) -> SessionReport:
        """Free the session and return the final accounting."""

    def report(self, final: KVStats | None = None) -> SessionReport:
        """Return the accounting, so far or `final`, with the turns it is made of."""
        stats = self.stats() if final is None else final
        turns, outputs = tuple(self.turns), tuple(self.outputs)
        return SessionReport(self.id, turns, self.resets, self.prompt_sha, stats, outputs)


@dataclass
class Session(BaseSession):
    """One engine session and everything the gateway knows about it.

    `tokens` and `phases` hold every id the engine session was given or generated, in order.
    """

    engine: Engine
    table: PhaseTable
    tokens: list[int] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    calls: int = 0
    broken: bool = False
    carried: KVStats = field(default_factory=KVStats)

    def __post_init__(self) -> None:
        """Make the two machines: the log's own, and the one the engine asks."""
        self.machine = PhaseMachine(self.table)
        self.engine_machine = PhaseMachine(self.table)

    @property
    def fresh(self) -> bool:
        return not self.tokens

    def prepare(self, *, reset: bool) -> None:
        """Have an open engine session, an empty one after a reset."""
        if reset:
            self.close()
            self.resets += 1
            self.broken = False
            self.tokens, self.phases, self.known = [], [], None
            self.machine = PhaseMachine(self.table)
            self.engine_machine = PhaseMachine(self.table)
        if not self.opened:
            self.engine.open(self.id, self.engine_machine)
            self.opened = True

    def extend(self, ids: Sequence[int], hints: Hints) -> None:
        """Append prompt ids to the engine session and to the log."""
        if self.prompt_sha is None:
            self.prompt_sha = hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()
        if not ids:
            return
        if hints or self.engine.wants_notes:
            self.engine.note(self.id, ids, notes_for(self.machine, ids, hints))
        # The log changes only when the engine has taken the ids.
        machine = self.machine.copy()
        phases = machine.label_many(ids)
        self.engine.extend(self.id, ids, phases)
        self.machine = machine
        self.engine_machine.state = machine.state
        self.tokens.extend(ids)
        self.phases.extend(phases)

    def record_output(self, ids: Sequence[int]) -> None:
        self.phases.extend(self.machine.label_many(ids))
        self.tokens.extend(ids)
        self.outputs.append(tuple(ids))
        self.engine_machine.state = self.machine.state

    def next_call_id(self) -> str:
        self.calls += 1
        return f"call_{self.calls}"

    def stats(self) -> KVStats:
        now = self.engine.stats(self.id) if self.opened else KVStats()
        return merge_stats(self.carried, now)

    def close(self) -> SessionReport:
        if self.opened:
            self.opened = False
            self.carried = merge_stats(self.carried, self.engine.close(self.id))
        return self.report(self.carried)
