"""Sessions as SGLang's scheduler knows them: who runs, how far it is, what it held last."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentbench_kv.engines.base import KVStats
from agentbench_kv.engines.serving.backend.ledger import SessionLedger
from agentbench_kv.methods.base import Method
from agentbench_kv.phases.decoding import StopMatcher
from agentbench_kv.phases.labellers import MARKERS

MatcherSource = Callable[[dict[str, Any]], StopMatcher]


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
class Held:
    """One session, or one request without a session."""

    name: str
    ledger: SessionLedger
    lasting: bool  # whether it outlives its request
    recipe: str = MARKERS
    request: Any = None  # the SGLang request in flight
    tokens: int = 0  # tokens of the session after its last completed turn
    starting: int | None = None  # new tokens of a turn whose prefill has not begun
    samples: int = 0  # sampled tokens of the turn that are accounted for
    decoding: bool = False  # A decode forward is on its way or done that is not accounted for
    resampling: int = 0  # samples that are counted already and will be drawn again
    stop: StopRule | None = None
    used: int = 0  # when it was last at work, in no unit
    settled: KVStats | None = None  # the accounting after its last turn; None while one runs
    parent: str | None = None  # the session whose first `shared` rows it reads
    shared: int = 0


@dataclass
class Book:
    """All sessions."""

    method: Method  # for ledgers of new sessions
    bytes_per_token: int
    matcher: MatcherSource  # makes a matcher of a stop document
    sessions: dict[str, Held] = field(default_factory=dict)
    _clock: itertools.count[int] = field(default_factory=itertools.count)

    def open(self, name: str, *, lasting: bool, recipe: str = MARKERS) -> Held:
        """Return the session of a name, new if there is none."""
        held = self.sessions.get(name)
        if held is None:
            ledger = SessionLedger(self.method, self.bytes_per_token)
            held = self.sessions[name] = Held(name, ledger, lasting, recipe)
        return held

    def of(self, request: Any) -> Held | None:
        """Return the session whose turn a request is; None for requests that were refused."""
        held = self.sessions.get(session_name(request) or request.rid)
        return held if held is not None and held.request is request else None

    def begin(self, request: Any) -> Held:
        """Start the turn of a request that enters the queue."""
        session = session_name(request)
        held = self.open(session or request.rid, lasting=session is not None)
        wanted = wishes(request.sampling_params)
        held.request = request
        held.samples, held.decoding, held.resampling = 0, False, 0
        held.stop = self._stop_rule(wanted) if wanted else None
        held.used = next(self._clock)
        held.settled = None
        held.starting = int(wanted.get("new", len(request.origin_input_ids) - held.tokens))
        return held

    def end_turn(self, held: Held, tokens: int) -> None:
        """Let a session rest with so many tokens."""
        held.request, held.stop, held.decoding = None, None, False
        held.tokens = tokens
        held.used = next(self._clock)
        held.settled = held.ledger.snapshot()

    def forget(self, held: Held) -> None:
        """Drop a session from the book."""
        self.sessions.pop(held.name, None)

    def resting(self) -> Sequence[Held]:
        """Return the sessions that hold rows and have no request, the longest at rest first."""
        idle = [h for h in self.sessions.values() if h.request is None and h.ledger.fed]
        return sorted(idle, key=lambda held: held.used)

    def forks_of(self, held: Held) -> list[Held]:
        """Return the sessions that read a session's rows."""
        return [other for other in self.sessions.values() if other.parent == held.name]

    def _stop_rule(self, wanted: Mapping[str, Any]) -> StopRule:
        document = wanted.get("stop")
        text = None if document is None else self.matcher(document)
        return StopRule(frozenset(wanted.get("stop_ids", ())), text)


def session_name(request: Any) -> str | None:
    """Return the streaming session of a request."""
    session = request.session
    return session.session_id if session is not None and session.streaming else None


def wishes(sampling: Any) -> dict[str, Any]:
    """Return what the harness asked for beside SGLang's own parameters; empty for others."""
    found: dict[str, Any] = (sampling.custom_params or {}).get("kvbench", {})
    return found
