"""Sessions in vLLM's scheduler: which request holds a session's blocks, and what it has seen."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agentbench_kv.engines.core.control import SchedulerSession
from agentbench_kv.engines.core.ledger import Eviction, EvictionOrder, SessionLedger, WindowBytes
from agentbench_kv.engines.vllm.plugin.blocks import SessionBlocks
from agentbench_kv.methods.base import Method
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


class VllmSessions:
    """All sessions of the scheduler, the ones at rest in the order in which they came to it."""

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
        self.before: list[EvictionOrder] = []  # events of sessions at rest, for the next step
        self.rewound: dict[str, int] = {}  # session -> its length, for the next step
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
        same = prompt[: len(session.tokens)] == session.tokens and ledger.fed > 0
        ledger.opens_with(session.prompt.prompt, session.prompt.system)
        ledger.begin_turn(len(prompt) - (len(session.tokens) if same else ledger.fed))
        return session

    def rest(self, session: VllmSession, tokens: list[int]) -> None:
        session.running = False
        session.tokens = tokens
        del self.by_request[session.request]
        self.sessions.move_to_end(session.name)
        eviction = session.ledger.end_turn()
        if eviction is not None:
            self.before.append(self.order(session, eviction))

    def order(self, session: VllmSession, eviction: Eviction) -> EvictionOrder:
        """Free the blocks an event leaves empty and describe it for the worker."""
        before = self.blocks.shorten(session.request, eviction)
        self.blocks.deficits[session.request] = session.ledger.deficit
        return EvictionOrder(session.name, len(session.ledger.stats.events) - 1, eviction, before)

    def rewind(self, session: VllmSession, length: int) -> None:
        """Forget the tokens of a session at rest from position `length` on."""
        del session.tokens[length:]
        if length < session.ledger.fed:
            if length:
                self.blocks.cut(session.request, length)
            else:  # whoever comes next begins anew
                self.blocks.drop(session.request)
            self.rewound[session.name] = length
        session.ledger.rewind(length, min(session.ledger.live, length))

    def lose(self, session: VllmSession) -> None:
        """Forget a session's rows; it will be computed again."""
        if not session.running:
            self.blocks.drop(session.request)
        self.blocks.deficits.pop(session.request, None)
        session.ledger.lose()
        session.tokens = []
        session.workers_know = False
        self.dropped.append(session.name)
        self.before = [order for order in self.before if order.session != session.name]

    def lose_oldest(self) -> bool:
        """Free the rows of the session longest at rest; False if none holds any."""
        for session in self.sessions.values():
            if not session.running and session.ledger.fed:
                self.lose(session)
                self.drops += 1
                return True
        return False

    def end(self, session: VllmSession) -> None:
        if session.ledger.fed:
            self.lose(session)
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
    return getattr(request.sampling_params, "extra_args", None) or {}


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
