"""A session: the exact token log, what the client knows of it, and its accounting."""

from __future__ import annotations

import hashlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Self

from agentbench_kv.engines.base import Engine, KVStats
from agentbench_kv.errors import KVBenchError
from agentbench_kv.gateway.aside import AsideAnswer
from agentbench_kv.gateway.dropping import SessionDrops
from agentbench_kv.gateway.exchange import Cancellation
from agentbench_kv.gateway.messages import Canonical, Message, canonical, tools_key
from agentbench_kv.gateway.reports import SessionReport, TurnInfo
from agentbench_kv.methods.base import Phase
from agentbench_kv.methods.spans import Hints, Source, TurnNotes
from agentbench_kv.phases.machine import PhaseMachine, PhaseState, PhaseTable
from agentbench_kv.phases.opening import system_tokens

_ROLES = {"user": Source.USER, "assistant": Source.ASSISTANT}


def notes_for(machine: PhaseMachine, ids: Sequence[int], hints: Hints) -> TurnNotes:
    """Return the messages that prompt ids consist of, and the client's hints about them.

    `machine` is the session's, before these ids; it is not advanced.
    """
    machine = machine.copy()
    messages: list[_Message] = []
    table = machine.table
    for token in ids:
        # What closes the message before goes with the first one: it is too little to be apart.
        begins = table.atomic.get(token, "") in table.family.opens
        if not messages or (begins and messages[-1].header):
            messages.append(_Message())
        messages[-1].add(machine.label(token), machine.state.header)
    return TurnNotes([(message.size, message.source) for message in messages], hints)


class _Message:
    """One message while its tokens are read."""

    def __init__(self) -> None:
        self.size = 0
        self.header = ""
        self._tool = False

    def add(self, phase: Phase, header: str) -> None:
        self.size += 1
        self.header = header or self.header
        self._tool = self._tool or phase is Phase.TOOL

    @property
    def source(self) -> Source:
        # Tool results are documents, whoever sends them.
        role = self.header.strip().partition("<")[0].split()
        return _ROLES.get(role[0] if role and not self._tool else "", Source.DOCUMENT)


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
    keep: int | None = None  # tokens of the log that stay, where the rest is written anew
    text: str = ""  # that the ids are of, in a chat


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
    drops: SessionDrops | None = None  # under a method that drops messages
    # It brings past sessions back, each method its own, so that prompts tell nothing of a drift.
    remembers: bool = False
    prompt_sha: str | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    opened: bool = False
    gone: bool = False
    running: Cancellation | None = None
    used_at: float = 0.0  # by the gateway's clock: when its last request began or ended
    note: str = ""

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
        account = (turns, self.resets, self.prompt_sha, stats, outputs)
        return SessionReport(self.id, *account, note=self.note)


class SessionLabeller(PhaseMachine):
    """Labels every token of a session once: prompt ids here, generated ones when the engine asks.

    An engine may have sampled further than anybody read: `keep` says which ids the log takes.
    """

    def __init__(self, table: PhaseTable) -> None:
        super().__init__(table)
        self._kept = self.state
        self._asked: list[tuple[int, Phase, PhaseState]] = []

    def label(self, token: int) -> Phase:
        phase = super().label(token)
        self._asked.append((token, phase, self.state))
        return phase

    def move_to(self, state: PhaseState) -> None:
        """Go on from where another machine has come to in the log."""
        self.state = self._kept = state
        self._asked = []

    def keep(self, ids: Sequence[int]) -> list[Phase]:
        """Return the phases of the ids that follow the log, and go on behind them."""
        phases: list[Phase] = []
        self.state = self._kept
        for token, (known, phase, state) in zip(ids, self._asked, strict=False):
            if token != known:
                break
            phases.append(phase)
            self.state = state
        phases += [PhaseMachine.label(self, token) for token in ids[len(phases) :]]
        self.move_to(self.state)
        return phases


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
    bank: str = ""  # of past sessions that its prompts bring back
    appended: int = 0  # first tokens whose rows are in it by now

    def __post_init__(self) -> None:
        self.labeller = SessionLabeller(self.table)

    @property
    def fresh(self) -> bool:
        return not self.tokens

    def prepare(self, plan: Plan) -> None:
        """Have an open engine session: empty after a reset, shorter where it is written anew."""
        if plan.reset:
            self._begin_anew()
            self.resets += 1
        elif plan.keep is not None:
            self._rewind(plan.keep)
        if not self.opened:
            self.engine.open(self.id, self.labeller)
            self.opened = True
            if self.bank:
                self.engine.attach(self.id, self.bank)

    def _begin_anew(self) -> None:
        self.close()
        self.broken = False
        self.tokens, self.phases, self.known, self.appended = [], [], None, 0
        self.labeller = SessionLabeller(self.table)

    def _rewind(self, keep: int) -> None:
        """Forget the log from a token on, in the engine too; it may have to begin anew for that."""
        kept = self.tokens[:keep]
        if keep == 0 or not self.rewinds:
            self._begin_anew()
            return
        # Until the rest is read, nobody can go on from what the client knows.
        self.known = None
        self.engine.rewind(self.id, keep)
        self.appended = min(self.appended, keep)
        machine = PhaseMachine(self.table)
        self.tokens, self.phases = kept, machine.label_many(kept)
        self.labeller.move_to(machine.state)

    @property
    def rewinds(self) -> bool:
        """Whether the engine can forget the end of a session alone."""
        return self.engine.info.rewinds

    def extend(self, ids: Sequence[int], hints: Hints) -> None:
        """Append prompt ids to the engine session and to the log."""
        if self.prompt_sha is None and not self.remembers:
            self.prompt_sha = hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()
        if not ids:
            return
        if hints or self.engine.wants_notes:
            system = system_tokens(self.table, ids) if self.fresh else 0
            notes = replace(notes_for(self.labeller, ids, hints), system=system)
            self.engine.note(self.id, ids, notes)
        # The log changes only when the engine has taken the ids.
        machine = self.labeller.copy()
        phases = machine.label_many(ids)
        self.engine.extend(self.id, ids, phases)
        self.labeller.move_to(machine.state)
        self.tokens.extend(ids)
        self.phases.extend(phases)

    def record_output(self, ids: Sequence[int]) -> None:
        self.phases.extend(self.labeller.keep(ids))
        self.tokens.extend(ids)
        self.outputs.append(tuple(ids))

    def fork(self, name: str) -> Session:
        """Open an engine session that goes on from here; return it, with an account of its own."""
        log = (self.tokens.copy(), self.phases.copy(), self.calls)
        twin = Session(name, self.engine, self.table, *log, bank=self.bank, known=self.known)
        twin.appended = self.appended
        twin.drops = None if self.drops is None else self.drops.copy()
        twin.labeller.move_to(self.labeller.state)
        self.engine.fork(self.id, name, twin.labeller)
        twin.opened = True
        return twin

    def next_call_id(self) -> str:
        self.calls += 1
        return self.table.syntax.call_ids.format(self.calls)

    def stats(self) -> KVStats:
        now = self.engine.stats(self.id) if self.opened else KVStats()
        return self._with_drops(self.carried.followed_by(now))

    def _with_drops(self, stats: KVStats) -> KVStats:
        """Add what an engine cannot know under a method that drops messages."""
        return stats if self.drops is None else self.drops.account(stats)

    def charge(self, answer: AsideAnswer) -> None:
        """Put a request that was made beside the session, and is over, to its account."""
        tokens = answer.stats.prefill_tokens + answer.stats.decode_tokens
        if self.drops is not None:
            live = self.engine.stats(self.id).live if self.opened else 0
            # A fork shares what the session holds, and holds what it has read and generated.
            self.drops.beside(live, tokens)
        paid = KVStats(
            auxiliary_calls=1,
            auxiliary_tokens=tokens,
            auxiliary_s=answer.seconds,
            auxiliary_bytes_read=answer.stats.bytes_read,
        )
        self.carried = paid.followed_by(self.carried)

    def abandon_aside(self) -> None:
        """End what is asked beside the session, if anything is; it is paid for all the same.

        How far its answer came is chance, so that it counts for what it had to read.
        """
        aside = None if self.drops is None else self.drops.aside
        if self.drops is not None and aside is not None:
            self.drops.aside = None
            aside.cancel()
            self.charge(replace(aside.result(), stats=KVStats(prefill_tokens=aside.reads)))

    def close(self) -> SessionReport:
        self.abandon_aside()
        if self.opened:
            self.opened = False
            self.carried = self.carried.followed_by(self.engine.close(self.id))
        return self.report(self._with_drops(self.carried))


class SessionBusyError(KVBenchError):
    """A session answers one request at a time; a second one at the same moment is refused."""


class SessionLimitError(KVBenchError):
    """The gateway holds as many sessions as it may."""


class UnknownSessionError(KVBenchError):
    """No open session has this id."""
