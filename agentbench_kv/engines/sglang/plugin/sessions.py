"""Sessions as SGLang's scheduler knows them: who runs, how far it is, what it held last."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentbench_kv.engines.base import KVStats
from agentbench_kv.engines.core.control import GivenAnswer, SchedulerSession
from agentbench_kv.engines.core.ledger import SessionLedger
from agentbench_kv.engines.core.prefixes import PrefixTable, plan_prefix
from agentbench_kv.methods.base import Method
from agentbench_kv.phases.machine import PromptPhases
from agentbench_kv.phases.tokens import StopMatcher

MatcherSource = Callable[[dict[str, Any]], StopMatcher]
ACCOUNT = "kvbench"  # what an answer calls its session's accounting


@dataclass(frozen=True)
class StopRule:
    """What ends a generation: ids, and texts matched while they are generated."""

    ids: frozenset[int]
    text: StopMatcher | None = None

    def __call__(self, token: int) -> bool:
        """Take the next id; True if the generation ends with it."""
        matched = self.text is not None and self.text(token)
        return matched or token in self.ids


@dataclass
class SlotPrefix:
    """Whole pages that sessions begin with and none writes."""

    name: str  # of its slot, and what the worker calls it
    rows: int
    row: int  # in SGLang's table
    release: Callable[[str], None]
    readers: set[str] = field(default_factory=set)  # sessions
    freed: bool = False

    @property
    def rows_in_use(self) -> bool:
        return bool(self.readers)

    def free(self) -> None:
        self.freed = True
        if not self.readers:
            self.release(self.name)

    def join(self, session: str) -> None:
        """Note that a session's first rows are the prefix's."""
        self.readers.add(session)

    def leave(self, session: str) -> None:
        """Note that they are gone."""
        self.readers.discard(session)
        if self.freed and not self.readers:
            self.release(self.name)


@dataclass
class SglangSession(SchedulerSession):
    """One session, or one request without a session."""

    request: Any = None  # the SGLang request in flight, or None
    tokens: int = 0  # tokens after the last completed turn
    starting: int | None = None  # new tokens of a turn whose prefill has not begun
    samples: int = 0  # sampled tokens of the turn that are accounted for
    drawn: bool = False  # a forward draws, or drew, one more
    decoding: bool = False  # a decode forward is on its way or done that is not accounted for
    resampling: int = 0  # samples that are counted already and will be drawn again
    stop: StopRule | None = None
    used: int = 0  # when it was last at work, in no unit
    settled: KVStats | None = None  # the accounting after its last turn; None while one runs
    # Its first `shared` rows are another session's, the parent's, or else the prefix's.
    parent: str | None = None
    prefix: SlotPrefix | None = None
    shared: int = 0

    @property
    def running(self) -> bool:
        return self.request is not None


@dataclass
class SglangSessions:
    """All sessions."""

    method: Method  # for ledgers of new sessions
    bytes_per_token: int
    page: int  # rows of a page
    matcher: MatcherSource  # makes a matcher of a stop document
    sessions: dict[str, SglangSession] = field(default_factory=dict)
    prefixes: PrefixTable[SglangSession, SlotPrefix] = field(default_factory=PrefixTable)
    _clock: itertools.count[int] = field(default_factory=itertools.count)

    def open(self, name: str, *, lasting: bool) -> SglangSession:
        """Return the session of a name, new if there is none."""
        session = self.sessions.get(name)
        if session is None:
            ledger = SessionLedger(self.method, self.bytes_per_token)
            session = self.sessions[name] = SglangSession(name, ledger, lasting)
        return session

    def of(self, request: Any) -> SglangSession | None:
        """Return the session whose turn a request is; None for requests that were refused."""
        session = self.sessions.get(_session_name(request) or request.rid)
        return session if session is not None and session.request is request else None

    def begin(self, request: Any) -> SglangSession:
        name = _session_name(request)
        session = self.open(name or request.rid, lasting=name is not None)
        wanted = wishes(request.sampling_params)
        session.request = request
        session.samples, session.resampling = 0, 0
        session.drawn = session.decoding = False
        session.stop = session.given = None
        if wanted:
            given = wanted.get("given")
            session.given = GivenAnswer(given) if given else None
            session.prompt = PromptPhases(**wanted["phases"])
            document = wanted.get("stop")
            text = None if document is None else self.matcher(document)
            session.stop = StopRule(frozenset(wanted.get("stop_ids", ())), text)
        session.used = next(self._clock)
        session.settled = None
        session.starting = int(wanted.get("new", len(request.origin_input_ids) - session.tokens))
        self.plan_prefix(session)
        return session

    def plan_prefix(self, session: SglangSession) -> None:
        """Note what a session may share as its request is computed from the beginning."""
        if session.lasting and not session.ledger.fed:
            session.ledger.opens_with(session.prompt.prompt, session.prompt.system)
            tokens = session.request.origin_input_ids + session.request.output_ids
            plan_prefix(session, self.method, tokens, self.page)

    def end_turn(self, session: SglangSession, tokens: int) -> None:
        """Let a session rest with `tokens` tokens."""
        session.request, session.stop, session.decoding = None, None, False
        self.prefixes.give_up(session)
        session.tokens = tokens
        session.used = next(self._clock)
        session.settled = session.ledger.snapshot()

    def forget(self, session: SglangSession) -> None:
        self.sessions.pop(session.name, None)

    def resting(self) -> Sequence[SglangSession]:
        """Return the sessions that hold rows and have no request, the longest at rest first."""
        every = self.sessions.values()
        idle = [each for each in every if not each.running and each.ledger.fed]
        return sorted(idle, key=lambda session: session.used)

    def forks_of(self, session: SglangSession) -> list[SglangSession]:
        return [other for other in self.sessions.values() if other.parent == session.name]


def wishes(sampling: Any) -> dict[str, Any]:
    """Return what the harness asked for besides SGLang's own parameters; empty for others."""
    found: dict[str, Any] = (sampling.custom_params or {}).get("kvbench", {})
    return found


def _session_name(request: Any) -> str | None:
    history = request.session
    return history.session_id if history is not None and history.streaming else None


def attach(request: Any, session: SglangSession | None) -> None:
    """Let the end of a request's answer carry its session's accounting.

    SGLang pairs what requests bring along by their order, so all of them must bring something.
    """
    request.customized_info = {ACCOUNT: _Account(session)}


class _Account:
    """Replaces SGLang's list with one entry per token, of which it takes those about to be sent."""

    def __init__(self, session: SglangSession | None) -> None:
        self._session = session

    def __getitem__(self, tokens: slice) -> dict[str, Any] | None:
        """Return the accounting once the turn is over, None before."""
        settled = None if self._session is None else self._session.settled
        return None if settled is None else settled.as_dict()
