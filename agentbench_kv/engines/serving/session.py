"""One session of a serving engine as the harness keeps it, and its accounting."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentbench_kv.engines.base import FinishReason, KVEvent, KVStats, Sampling
from agentbench_kv.engines.core.ledger import SessionLedger, WindowBytes
from agentbench_kv.engines.sampling import StreamedGeneration
from agentbench_kv.methods.full import Full
from agentbench_kv.phases.machine import Labeller, PromptPhases, add_run, cut_runs

# Tokens the stream may be ahead of its reader, so that a cancel takes effect where it was meant.
_AHEAD = 4


class ServingGeneration(StreamedGeneration):
    """Tokens on their way from a backend; `play` runs to the end and calls `push` per token."""

    def __init__(
        self,
        sampling: Sampling,
        play: Callable[[ServingGeneration], FinishReason],
        given: Sequence[int] = (),
        predicted: list[int] | None = None,
    ) -> None:
        super().__init__(sampling, ahead=_AHEAD)
        self.predicted = predicted  # where the wire puts what would have been drawn, if asked to
        self.best = () if predicted is None else predicted
        self.given = given  # tokens to be taken as drawn; none: the backend draws
        self.running = True  # the backend may still change the session
        self._play = play
        self._lock = threading.Lock()
        self._end: Callable[[], None] | None = None  # ends it before its next token
        threading.Thread(target=self._run, daemon=True).start()

    def on_cancel(self, end: Callable[[], None]) -> None:
        """Name what ends it before its next token; called at once if it is cancelled."""
        with self._lock:
            self._end = end
            cancelled = self.cancelled
        if cancelled:
            end()

    def cancel(self) -> None:
        with self._lock:
            super().cancel()
            end = self._end
        if end is not None:
            end()

    def _run(self) -> None:
        try:
            reason = self._play(self)
        except BaseException as error:  # noqa: BLE001  the reader is told, on its own thread
            self.running = False
            self.fail(error)
        else:
            self.running = False
            self.finish(reason)


class ObservedLedger(SessionLedger):
    """One session of a server that evicts nothing within a request.

    A prefix cache may have dropped what the session had before; the server says how many tokens it
    found, and the others count as recomputed.
    """

    def __init__(self, bytes_per_token: int, windows: WindowBytes | None) -> None:
        super().__init__(Full(), bytes_per_token, windows)
        self._expected = 0  # rows the next forward writes
        self._before = 0  # rows the session had when the generation began

    def begin(self, tokens: int) -> None:
        # The last token it generated was never fed; it is part of no prompt.
        self.begin_turn(tokens - self.fed - self.unfed)
        self._before = self.fed
        self._expected = tokens - self.fed

    def token(self) -> None:
        """Count a generated token and the forward it came from."""
        self.forward(self._expected)
        self.sampled()
        self._expected = 1

    def end(self, cached_tokens: int | None) -> None:
        """Take in how many of the prompt's tokens the server had cached, where it says so.

        A prefill that brought no token is not known to have been; it comes again.
        """
        self.uncount_unread()
        if cached_tokens is not None:
            self.stats.recomputed += max(0, self._before - cached_tokens)


_numbers = itertools.count(1)


@dataclass
class ServingSession:
    """One session as the harness keeps it, so that a backend may die without its being lost."""

    name: str
    labeller: Labeller
    # What the backend calls it; new after every loss, so that nothing old is taken for it.
    backend_name: str = field(init=False)
    tokens: list[int] = field(default_factory=list)  # everything it was given or generated
    phases: list[list[int]] = field(default_factory=list)  # of the tokens, as runs
    known: int = 0  # how many of them this backend was given, or gave
    held: int = 0  # how many of them it is known to have computed
    epoch: int = 0  # which start of the backend it lives in; 0: none yet
    carried: KVStats = field(default_factory=KVStats)  # accounting of backends that died
    last: KVStats = field(default_factory=KVStats)  # the living backend's, when it was last asked
    observed: ObservedLedger | None = None  # the accounting, where the backend keeps none
    generation: ServingGeneration | None = None  # the last one
    opening: int = 0  # tokens of the first prefill, once a generation began
    system: int = 0  # and of the system message, where the method asks for it
    drawn: int = 0  # how many of them were generated
    bank: str = ""  # of the memory that its prompts bring back
    taken: int = 0  # positions before its own, which that has
    _asked: int = 0  # how many were held when the backend last gave its account
    _lost: int | None = None  # tokens whose rows went with a backend, until they are computed again

    def __post_init__(self) -> None:
        self._rename()

    def prompt(self) -> PromptPhases:
        """Return the phases of all tokens, from which the backend goes on labelling."""
        runs = [run.copy() for run in self.phases]
        labeller = self.labeller.labeller_name, self.labeller.document()
        return PromptPhases(*labeller, runs, self.opening, self.system)

    def fork(self, name: str, labeller: Labeller) -> ServingSession:
        """Return a session of the same tokens, which no backend has yet."""
        twin = ServingSession(name, labeller, self.tokens.copy())
        twin.phases = [run.copy() for run in self.phases]
        twin.opening, twin.system = self.opening, self.system
        return twin

    def accept(self, token: int) -> None:
        add_run(self.phases, [self.labeller.label(token)])
        self.held = len(self.tokens)
        self.tokens.append(token)
        self.known += 1
        self.drawn += 1
        if self.observed is not None:
            self.observed.token()

    @property
    def generating(self) -> bool:
        """Whether a generation of it has not ended."""
        return self.generation is not None and self.generation.running

    @property
    def lost(self) -> bool:
        """Whether the backend that had its rows is gone, and no other one has them yet."""
        return self._lost is not None

    def lose(self) -> None:
        """Note that its backend is gone; the next generation computes everything again."""
        self._count_drawn()
        self.carried = self.carried.followed_by(self.last)
        self.carried.restarts.append((len(self.carried.events), len(self.tokens)))
        self._lost = self.held
        self._rename()
        self.last = KVStats()
        self.observed = None
        self.known = self.held = self.epoch = self._asked = 0

    def rewind(self, length: int) -> None:
        """Forget the tokens from logical position `length` on."""
        del self.tokens[length:]
        self.phases = cut_runs(self.phases, length)
        self.known, self.held = min(self.known, length), min(self.held, length)
        self.opening, self.system = min(self.opening, length), min(self.system, length)
        self._asked = min(self._asked, length)
        if self._lost is not None:
            self._lost = min(self._lost, length)
        if self.observed is not None:
            self.observed.rewind(length, min(self.observed.live, length))
            self.account(self.observed.snapshot())

    def account(self, stats: KVStats) -> None:
        """Take in what its backend has counted so far."""
        self.last, self._asked = stats, self.held

    def _count_drawn(self) -> None:
        """Count the tokens that a backend which is gone gave since it was last asked.

        The rows each was drawn from are those of its last account and all that was fed since.
        """
        drawn = max(0, self.drawn - self.carried.decode_tokens - self.last.decode_tokens)
        rows = self.last.live + self.held - self._asked
        self.last.decode_tokens += drawn
        self.last.decode_kv_sum += sum(rows - back for back in range(drawn))

    def enter(self, epoch: int) -> None:
        """Move to another start of the backend; what an old one held is computed again."""
        if self.epoch:
            self.lose()
        if self._lost is not None:
            self.carried.restarts[-1] = (len(self.carried.events), len(self.tokens))
            self.carried.recomputed += self._lost
            self._lost = None
        self.epoch = epoch

    def total(self) -> KVStats:
        merged = self.carried.followed_by(self.last)
        merged.logical = len(self.tokens)
        return merged

    def _rename(self) -> None:
        self.backend_name = f"{self.name}~{next(_numbers)}"


def stats_from(document: dict[str, Any]) -> KVStats:
    events = [KVEvent(**event) for event in document["events"]]
    restarts = [(before, tokens) for before, tokens in document["restarts"]]
    return KVStats(**{**document, "events": events, "restarts": restarts})
