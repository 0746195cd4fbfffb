"""Sessions in vLLM's scheduler: which request holds a session's blocks, and what it has seen."""

from __future__ import annotations

import itertools
import json
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentbench_kv.engines.core.control import SchedulerSession
from agentbench_kv.engines.core.ledger import (
    Eviction,
    EvictionOrder,
    PrefixEnd,
    Rewind,
    SessionLedger,
    StepPlan,
    WindowBytes,
)
from agentbench_kv.engines.core.prefixes import PrefixTable, plan_prefix
from agentbench_kv.engines.vllm.plugin.blocks import BlockPrefix, SessionBlocks
from agentbench_kv.methods.base import Method
from agentbench_kv.methods.spans import SpanRange
from agentbench_kv.phases.machine import PromptPhases
from agentbench_kv.phases.tokens import StopMatcher


@dataclass
class VllmSession(SchedulerSession):
    """One session, or one request without a session."""

    request: str  # the request that runs, or the one it rested with
    running: bool = True
    workers_know: bool = False  # whether the workers have its prompt's phases
    tokens: list[int] = field(default_factory=list)  # at rest: all of them, the last not fed yet
    stop: StopMatcher | None = None
    gone: set[int] = field(default_factory=set)  # positions of tokens that were told to leave


@dataclass(frozen=True)
class Forward:
    """What a step feeds of a session: `rows` tokens, behind so many that are computed or found."""

    session: VllmSession
    computed: int
    rows: int


class VllmSessions:
    """All sessions of the scheduler, the ones at rest in the order in which they came to it.

    Sessions with one system message share its full blocks, if their method asks for that: vLLM is
    told of them as if its own prefix cache had found them.
    """

    def __init__(
        self,
        method: Method,
        bytes_per_token: int,
        blocks: SessionBlocks,
        windows: WindowBytes | None = None,
    ) -> None:
        self.method = method
        self.blocks = blocks
        self.sessions: OrderedDict[str, VllmSession] = OrderedDict()
        self.by_request: dict[str, VllmSession] = {}
        self.dropped: list[str] = []  # sessions whose rows are gone since the last step
        # What happened to sessions at rest, for the next step.
        self.before: list[EvictionOrder | Rewind] = []
        self.prefixes: PrefixTable[VllmSession, BlockPrefix] = PrefixTable()
        self.given_up: list[str] = []  # prefixes that nobody will begin with any more
        self._numbers = itertools.count(1)  # of prefixes
        self.drops = 0
        self.adoptions = 0
        self.mismatches = 0
        self._bytes = bytes_per_token
        self._windows = windows

    def find(self, request: Any) -> VllmSession | None:
        """Return the lasting session that a new request belongs to, if it is there."""
        name = _session_name(request)
        return self.sessions.get(name) if name else None

    def begin(self, request: Any) -> VllmSession:
        """Connect a new request with its session; set what is computed of it already."""
        name = _session_name(request)
        session = self.sessions.get(name or request.request_id)
        if session is None:
            number = request.request_id
            ledger = SessionLedger(self.method, self._bytes, self._windows)
            session = VllmSession(name or number, ledger, name is not None, number)
            self.sessions[session.name] = session
        labels = extra_arguments(request).get("kvbench_phases")
        if labels:
            session.prompt = PromptPhases(**json.loads(labels))
            session.workers_know = False
        prompt, ledger = request.prompt_token_ids, session.ledger
        if ledger.fed and not _goes_on(session, prompt):
            self.mismatches += 1
            self.lose(session)
        elif ledger.fed:
            self._adopt(session, request)
        session.running = True
        session.request = request.request_id
        self.by_request[session.request] = session
        self._open_turn(session, prompt, ledger.fed + ledger.unfed)
        if request.skip_reading_prefix_cache:
            session.prefix_key = None
        return session

    def begin_again(self, session: VllmSession, tokens: list[int]) -> None:
        """Let a request that was put back, and lost its rows, compute all of its tokens."""
        self._open_turn(session, tokens, 0)

    def _open_turn(self, session: VllmSession, prompt: list[int], known: int) -> None:
        session.ledger.opens_with(session.prompt.prompt, session.prompt.system)
        session.ledger.begin_turn(len(prompt) - known)
        plan_prefix(session, self.method, prompt, self.blocks.size)

    def rest(self, session: VllmSession, tokens: list[int]) -> None:
        session.running = False
        session.tokens = tokens
        self.prefixes.give_up(session)
        del self.by_request[session.request]
        self.sessions.move_to_end(session.name)
        session.ledger.uncount_unread()  # of a request that was aborted; the next one brings it
        eviction = session.ledger.end_turn()
        if eviction is not None:
            self.before.append(self.order(session, eviction))

    def order(
        self, session: VllmSession, eviction: Eviction, spans: Sequence[SpanRange] = ()
    ) -> EvictionOrder:
        """Free the blocks an event leaves empty and describe it for the worker."""
        before = self.blocks.shorten(session.request, eviction)
        self.blocks.deficits[session.request] = session.ledger.deficit
        number = len(session.ledger.stats.events) - 1
        return EvictionOrder(session.name, number, eviction, before, spans)

    def may_begin(self, session: VllmSession) -> bool:
        """Whether a session may be fed; not while another one computes what it begins with."""
        key = session.prefix_key
        return key is None or bool(self.found(session) or self.prefixes.computed_by(key, session))

    def found(self, session: VllmSession) -> BlockPrefix | None:
        """Return the blocks that a session which has fed nothing can begin with."""
        return None if session.prefix_key is None else self.prefixes.find(session.prefix_key)

    def plan_prefixes(self, forwards: Sequence[Forward], plan: StepPlan) -> None:
        """Tell the workers which prefixes a step's sessions begin with, and which they leave."""
        # First who begins: a full table drops prefixes for those that others leave.
        for each in forwards:
            if prefix := self.found(each.session):
                if each.computed != prefix.rows:
                    raise RuntimeError(f"{each.computed} tokens found of {prefix.rows}")
                plan.begun[each.session.name] = prefix.name
                each.session.ledger.find(prefix.rows, prefix.rows)
                each.session.prefix_key = None
        for each in forwards:
            session, end = each.session, each.session.prefix_tokens
            if session.prefix_key is not None and each.computed + each.rows >= end:
                name = f"prefix {next(self._numbers)}"
                shared = self.blocks.share(session.request, name, end, self.given_up)
                self.prefixes.store(session.prefix_key, shared)
                plan.left[session.name] = PrefixEnd(name, end)
                session.ledger.stats.shared = end
                session.prefix_key = None

    def rewind(self, session: VllmSession, length: int) -> None:
        """Forget the tokens of a session at rest from position `length` on."""
        if length < session.ledger.stats.shared:
            self.lose(session)  # what comes next would be written into others' blocks
        del session.tokens[length:]
        session.gone = {position for position in session.gone if position < length}
        rows = min(session.ledger.live, length - len(session.gone))
        if length < session.ledger.fed:
            if length:
                self.blocks.cut(session.request, length, rows)
            else:  # whoever comes next begins anew
                self.blocks.drop(session.request)
            self.before.append(Rewind(session.name, length))
        session.ledger.rewind(length, rows)

    def evict_spans(self, session: VllmSession, spans: Sequence[SpanRange]) -> int:
        """Have whole tokens of a session at rest leave before the next step; return how many.

        ValueError where heads keep others, and for a prefix that others read.
        """
        if self.method.compresses:
            raise ValueError(f"{self.method.label} keeps other tokens in every head")
        fed, first = session.ledger.fed, session.ledger.stats.shared
        wanted = {at for start, end in spans for at in range(max(0, start), min(end, fed))}
        leaving = wanted - session.gone
        if not leaving:
            return 0
        if min(leaving) < first:
            raise ValueError(f"the first {first} tokens of session {session.name} are shared")
        session.gone |= leaving
        eviction = session.ledger.evict(session.ledger.live - len(leaving))
        self.before.append(self.order(session, eviction, spans))
        return len(leaving)

    def lose(self, session: VllmSession) -> None:
        """Forget a session's rows; it will be computed again."""
        if not session.running:
            self.blocks.drop(session.request)
        self.blocks.deficits.pop(session.request, None)
        session.ledger.lose()
        self.prefixes.give_up(session)
        session.tokens = []
        session.gone.clear()
        session.workers_know = False
        self.dropped.append(session.name)
        self.before = [each for each in self.before if each.session != session.name]

    def make_room(self, request: str) -> bool:
        """Free a prefix that nobody reads, or the session longest at rest; False if none holds any.

        The prefix that the request is about to begin with stays.
        """
        return self.prefixes.make_room(self.by_request[request].prefix_key) or self.lose_oldest()

    def lose_oldest(self) -> bool:
        """Free the rows of the session longest at rest; False if none holds any."""
        for session in self.sessions.values():
            if not session.running and session.ledger.fed:
                self.lose(session)
                self.drops += 1
                return True
        return False

    def put_back(self, session: VllmSession, tokens: list[int]) -> None:
        """Free the rows of a session whose request waits; it will compute all of its tokens."""
        self.blocks.drop(session.request)
        self.lose(session)
        self.drops += 1
        self.begin_again(session, tokens)

    def could_free(self, request: str) -> int:
        """Return how many blocks come free if all that `make_room` frees for a request goes.

        Blocks of a prefix do if no session reads them but those at rest.
        """
        kept = self.found(self.by_request[request])
        parts = [prefix.blocks for prefix in self.prefixes.held if prefix is not kept]
        own = 0
        for session in self.sessions.values():
            if not session.running and session.ledger.fed:
                shared = self.blocks.first(session.request, session.ledger.stats.shared)
                own += self.blocks.held(session.request) - len(shared)
                parts.append(shared)
        first = {part[0].block_id: part for part in parts if part}
        readers = Counter(part[0].block_id for part in parts if part)
        unread = (part for number, part in first.items() if part[0].ref_cnt == readers[number])
        return own + sum(map(len, unread))

    def end(self, session: VllmSession) -> None:
        if session.ledger.fed:
            self.lose(session)
        self.prefixes.give_up(session)
        self.by_request.pop(session.request, None)
        self.blocks.deficits.pop(session.request, None)
        self.sessions.pop(session.name, None)

    def _adopt(self, session: VllmSession, request: Any) -> None:
        """Let a request start where its session is."""
        self.blocks.rename(session.request, request.request_id)
        self.blocks.deficits.pop(session.request, None)
        session.request = request.request_id
        self.blocks.deficits[session.request] = session.ledger.deficit
        request.num_computed_tokens = session.ledger.fed
        self.adoptions += 1


def extra_arguments(request: Any) -> Mapping[str, Any]:
    pooling = request.sampling_params is None
    return {} if pooling else request.sampling_params.extra_args or {}


def _session_name(request: Any) -> str | None:
    name: str | None = extra_arguments(request).get("kvbench_session") or request.session_id
    return name


def _goes_on(session: VllmSession, prompt: list[int]) -> bool:
    """Return whether a prompt goes on from a session's rows.

    The last token it sampled was never fed: a client that stopped a step too late for the engine
    leaves it out, and vLLM forgets it when a request is aborted while it runs. Then it does not
    count.
    """
    fed, tokens = session.ledger.fed, session.tokens
    if prompt[:fed] != tokens[:fed] or len(prompt) <= fed:
        return False
    unwanted = len(tokens) <= fed or prompt[fed] != tokens[fed]
    return not unwanted or session.ledger.take_back()
