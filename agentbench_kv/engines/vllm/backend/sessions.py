"""Sessions in vLLM's scheduler: which request holds a session's blocks, and what it has seen."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from agentbench_kv.engines.serving.backend.ledger import Cut, SessionLedger
from agentbench_kv.engines.serving.backend.orders import Removal
from agentbench_kv.engines.vllm.backend.blocks import SessionBlocks
from agentbench_kv.methods.base import Method
from agentbench_kv.phases.decoding import StopMatcher
from agentbench_kv.phases.labellers import MARKERS


@dataclass
class Held:
    """One session."""

    name: str
    recipe: str
    ledger: SessionLedger
    request: str  # the request that runs, or the one it rested with
    lasting: bool  # whether it outlives its request; a request without a session id does not
    running: bool = True
    # At rest: all its tokens, the last one not fed yet.
    tokens: list[int] = field(default_factory=list)
    stop: StopMatcher | None = None


class SessionBook:
    """All sessions of the scheduler, the ones at rest in the order in which they came to it."""

    def __init__(self, method: Method, bytes_per_token: int) -> None:
        self.method = method
        self.sessions: OrderedDict[str, Held] = OrderedDict()
        self.by_request: dict[str, Held] = {}
        self.deficits: dict[str, int] = {}
        self.dropped: list[str] = []
        self.before: list[Removal] = []
        self.drops = 0
        self.adoptions = 0
        self.mismatches = 0
        self._bytes = bytes_per_token
        self._blocks: SessionBlocks | None = None

    def attach(self, blocks: SessionBlocks) -> None:
        """Name the blocks to work with; they need `deficits` to be made."""
        self._blocks = blocks

    @property
    def blocks(self) -> SessionBlocks:
        """The blocks of all requests."""
        if self._blocks is None:
            raise RuntimeError("no blocks are attached")
        return self._blocks

    def begin(self, request: Any) -> None:
        """Connect a new request with its session; set what is computed of it already."""
        name, recipe = _identity(request)
        held = self.sessions.get(name or request.request_id)
        if held is None:
            held = self._open(name, recipe, request.request_id)
        prompt = request.prompt_token_ids
        if held.ledger.fed and not _goes_on(held, prompt):
            self.mismatches += 1
            self.lose(held)
        elif held.ledger.fed:
            self._adopt(held, request)
        held.running = True
        held.request = request.request_id
        self.by_request[held.request] = held
        same = prompt[: len(held.tokens)] == held.tokens and held.ledger.fed > 0
        held.ledger.begin_turn(len(prompt) - (len(held.tokens) if same else held.ledger.fed))

    def rest(self, held: Held, tokens: list[int]) -> None:
        """Keep a session whose request has ended."""
        held.running = False
        held.tokens = tokens
        del self.by_request[held.request]
        self.sessions.move_to_end(held.name)
        cut = held.ledger.end_turn()
        if cut is not None:
            self.before.append(self.removal(held, cut))

    def removal(self, held: Held, cut: Cut) -> Removal:
        """Free the blocks an event leaves empty and write the worker's order."""
        before = self.blocks.shorten(held.request, cut)
        self.note(held)
        return Removal(held.name, len(held.ledger.stats.events) - 1, cut, before)

    def note(self, held: Held) -> None:
        """Keep the request's deficit up to date."""
        self.deficits[held.request] = held.ledger.deficit

    def lose(self, held: Held) -> None:
        """Forget a session's rows; it will be computed again."""
        if not held.running:
            self.blocks.drop(held.request)
        self.deficits.pop(held.request, None)
        held.ledger.lose()
        held.tokens = []
        self._forget_rows(held.name)

    def lose_oldest(self) -> bool:
        """Free the rows of the session longest at rest; False if none holds any."""
        for held in self.sessions.values():
            if not held.running and held.ledger.fed:
                self.lose(held)
                self.drops += 1
                return True
        return False

    def end(self, held: Held) -> None:
        """Forget a session altogether."""
        if held.ledger.fed:
            self.lose(held)
        self.by_request.pop(held.request, None)
        self.deficits.pop(held.request, None)
        self.sessions.pop(held.name, None)

    def _open(self, name: str | None, recipe: str, request: str) -> Held:
        ledger = SessionLedger(self.method, self._bytes)
        held = Held(name or request, recipe, ledger, request, lasting=name is not None)
        self.sessions[held.name] = held
        return held

    def _adopt(self, held: Held, request: Any) -> None:
        self.blocks.rename(held.request, request.request_id)
        self.deficits.pop(held.request, None)
        held.request = request.request_id
        self.note(held)
        request.num_computed_tokens = held.ledger.fed
        self.adoptions += 1

    def _forget_rows(self, name: str) -> None:
        self.dropped.append(name)
        self.before = [removal for removal in self.before if removal.session != name]


def _goes_on(held: Held, prompt: list[int]) -> bool:
    """Return whether a prompt goes on from a session's rows.

    The last token it sampled was never fed: a client that stopped a step too late for the engine
    leaves it out, and vLLM forgets it when a request is aborted while it runs. Then it does not
    count.
    """
    fed = held.ledger.fed
    if prompt[:fed] != held.tokens[:fed] or len(prompt) <= fed:
        return False
    unwanted = len(held.tokens) <= fed or prompt[fed] != held.tokens[fed]
    return not unwanted or held.ledger.take_back()


def _identity(request: Any) -> tuple[str | None, str]:
    """Return a request's session and how its tokens are labelled."""
    extra = getattr(request.sampling_params, "extra_args", None) or {}
    name = extra.get("kvbench_session") or request.session_id
    return name, str(extra.get("kvbench_labels") or MARKERS)
