"""One session as a scheduler sees it, without tensors: lengths, events that fall due, accounting.

And what a scheduler in another process tells its workers about a step: plain data, pickled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, SupportsInt

from agentbench_kv.engines.base import KVEvent, KVStats
from agentbench_kv.errors import KVBenchError
from agentbench_kv.methods.base import Method, Schedule
from agentbench_kv.methods.spans import SpanRange
from agentbench_kv.phases.machine import PromptPhases


@dataclass(frozen=True)
class Eviction:
    """An event that is due: from how many rows to how many."""

    live: int  # rows per (layer, KV head) before
    keep: int  # and after
    logical: int  # tokens the model has seen
    prompt: int  # tokens of the session's first prefill
    system: int = 0  # and of its system message, where the method asks for it

    @property
    def more(self) -> dict[str, int]:
        """Arguments of `Method.select` that a plug-in of 0.1 may not take."""
        return {"system": self.system} if self.system else {}


@dataclass(frozen=True)
class WindowBytes:
    """Rows that a session holds besides, in layers that see a window: no method reaches them."""

    per_token: int  # keys and values, over those layers and their heads
    window: int


class SessionLedger:
    """Counts what a session holds and says when an event falls due.

    Lengths after an event follow from the method alone, so a scheduler can free blocks before the
    worker has moved a row. Calls follow the tokens: `begin_turn`, `forward` for every forward,
    `sampled` after each that samples, `end_turn`.
    """

    def __init__(
        self,
        method: Method,
        bytes_per_token: int,
        windows: WindowBytes | None = None,
        held_bytes: Callable[[int], int] | None = None,
    ) -> None:
        self.stats = KVStats()
        self.fed = 0  # tokens the model has seen
        self.live = 0  # rows per (layer, KV head)
        self._method = method
        # Keys and values, over all layers with full attention and their heads.
        self._bytes = bytes_per_token
        # Of so many rows, where they do not all take the same.
        self._held_bytes = held_bytes or (lambda rows: rows * bytes_per_token)
        self._windows = windows
        self._schedule = Schedule(method)
        self._prefilling = False
        self._unread = 0  # tokens of the prefill that are counted, and no forward has brought yet
        self.unfed = 0  # tokens that were sampled and not fed: the last one, or none
        self._evicted_last = False  # an event fell due with it
        self._lost = 0  # tokens whose rows were lost since the last turn began
        self._prompt = 0  # tokens of the first prefill
        self._system = 0  # and of the system message
        self._moves: list[tuple[int, SupportsInt]] = []  # event, and the rows it moved

    @property
    def deficit(self) -> int:
        """Logical minus physical length."""
        return self.fed - self.live

    def opens_with(self, prompt: int = 0, system: int = 0) -> None:
        """Take how the session began: tokens of its first prefill, and of its system message.

        0 is not known. Without it the first turn's tokens are the first prefill, also after a loss.
        """
        self._prompt, self._system = prompt or self._prompt, system or self._system

    @property
    def system(self) -> int:
        """Tokens of the system message with its tools; 0 is not known."""
        return self._system

    def protects(self, rows: int) -> bool:
        """Whether no event may evict any of the first rows, whenever it falls due."""
        method, protected = self._method, self._method.protected(self._prompt, self._system)
        # The smallest budget of an event that finds them: a share is one of more tokens later.
        budget = method.budget_at(rows)
        cuts = budget < rows and method.has_room(budget, protected)
        return protected >= rows and not cuts

    def find(self, tokens: int, shared: int) -> None:
        """Count a turn's first tokens as fed, whose rows were there; `shared` rows stay there."""
        self.fed += tokens
        self.live += tokens
        self._unread = max(0, self._unread - tokens)
        self.stats.cached_tokens += tokens
        self.stats.shared = shared
        self._peak()

    def begin_turn(self, tokens: int, passes: int = 1) -> None:
        """Count a prompt's tokens, which are read so many times."""
        if self._lost:
            self.stats.recomputed += self._lost
            self._lost = 0
            self.stats.restarts.append((len(self.stats.events), tokens))
        self.stats.prefill_tokens += passes * tokens
        self._unread += passes * tokens
        self.stats.recomputed += (passes - 1) * tokens
        self.stats.longest_prefill = max(self.stats.longest_prefill, tokens)
        self._prefilling = tokens > 0
        self._prompt = self._prompt or tokens
        self._schedule.protected = self._method.protected(self._prompt, self._system)

    def rows_needed(self, pending: int, left: int) -> int:
        """Return the rows the session may hold before it ends or an event frees some.

        It has `pending` tokens to feed and generates at most `left`.
        """
        start, method = self.live + pending, self._method
        if not method.compresses or method.trigger == "turn":
            return start + left
        protected = method.protected(self._prompt or pending, self._system)
        if not method.has_room(method.budget_at(self.fed + pending), protected):
            return start + left
        budget = method.budget_at(self.fed + pending + left)
        return min(start + left, max(start, budget) + method.interval)

    def forward(self, rows: int) -> None:
        self.fed += rows
        self.live += rows
        self._unread = max(0, self._unread - rows + self.unfed)
        self.unfed = 0
        self._peak()
        if not self._prefilling:
            in_windows = self._window_bytes()
            self.stats.bytes_read += self._held_bytes(self.live) + in_windows
            self.stats.window_bytes_read += in_windows

    def read_again(self, rows: int) -> None:
        """Go back before the last rows fed, which the next forwards bring again."""
        self.fed -= rows
        self.live -= rows

    def _window_bytes(self) -> int:
        if self._windows is None:
            return 0
        return min(self.fed, self._windows.window) * self._windows.per_token

    def _peak(self) -> None:
        held = self._held_bytes(self.live) + self._window_bytes()
        self.stats.peak_live = max(self.stats.peak_live, self.live)
        self.stats.peak_bytes = max(self.stats.peak_bytes, held)

    def forward_drawn(self, rows: int) -> None:
        """Count a forward of sampled tokens, one after the other; each but the first behind it."""
        for row in range(rows):
            self.forward(1)
            if row + 1 < rows and self.sampled() is not None:
                raise KVBenchError("an event fell due inside a stretch of given tokens")

    def quiet(self, most: int) -> int:
        """Return after how many sampled tokens, each fed in turn, an event falls due.

        That is with the token behind so many; `most` if there is none among so many.
        """
        twin = copy(self)
        twin.stats, twin._schedule = KVStats(), copy(self._schedule)
        for number in range(most):
            twin.forward(1)
            if twin.sampled() is not None:
                return number
        return most

    def sampled(self) -> Eviction | None:
        """Count a sampled token; return the event that falls due with it."""
        eviction = None
        self.unfed, self._evicted_last = 1, False
        self._unread = 0
        if self._prefilling:
            self._prefilling = False
            if self._schedule.after_prefill(self.live, self.fed):
                eviction = self.evict()
        self.stats.decode_tokens += 1
        self.stats.decode_kv_sum += self.live
        if self._schedule.after_decode(self.live, self.fed):
            eviction = self.evict()
        return eviction

    def take_back(self) -> bool:
        """Uncount the last sampled token, which its client did not want and nothing has fed.

        False if an event fell due with it: rows are gone that should be there. After a rewind there
        is none, and nothing to uncount.
        """
        if not self.unfed:
            return True
        if self._evicted_last:
            return False
        self.unfed = 0
        self.stats.decode_tokens -= 1
        self.stats.decode_kv_sum -= self.live
        self._schedule.take_back()
        return True

    def end_turn(self) -> Eviction | None:
        return self.evict() if self._schedule.after_turn(self.live, self.fed) else None

    def evict(self, keep: int | None = None) -> Eviction:
        """Count an event that leaves `keep` rows; if not given, the method's budget."""
        keep = self._method.budget_at(self.fed) if keep is None else keep
        eviction = Eviction(self.live, keep, self.fed, self._prompt, self._system)
        self.stats.evicted += eviction.live - keep
        event = KVEvent(self.stats.decode_tokens, self.fed, eviction.live, keep, rows_moved=0)
        self.stats.events.append(event)
        self.live = keep
        self._evicted_last = True
        return eviction

    def restore(self, rows: int, moved: int = 0) -> None:
        """Count rows that came back to the cache, and how many others moved for them."""
        self.live += rows
        self.stats.restored += rows
        self.stats.rows_moved += moved
        self._peak()

    def rewind(self, length: int, live: int) -> None:
        """Forget tokens from position `length` on; `live` rows stay, and what was done counts."""
        self.unfed = max(0, min(self.unfed, length - self.fed))
        self.fed, self.live = min(self.fed, length), live
        self._lost = min(self._lost, length)
        self._prompt, self._system = min(self._prompt, length), min(self._system, length)

    def fork(self) -> SessionLedger:
        """Return the ledger of a session that goes on from here; it has done nothing yet."""
        twin = SessionLedger(self._method, self._bytes, self._windows, self._held_bytes)
        twin.fed, twin.live = self.fed, self.live
        twin._peak()
        twin._prompt, twin._system, twin.unfed = self._prompt, self._system, self.unfed
        twin._schedule = copy(self._schedule)
        twin._schedule.refused = 0
        return twin

    def lose(self) -> None:
        """Count the loss of all rows; they count as recomputed once a turn begins again."""
        self.uncount_unread()
        self._lost += self.fed
        self.fed = self.live = self.unfed = self.stats.shared = 0
        self._prompt = self._system = 0
        self._schedule.restart()

    def uncount_unread(self) -> None:
        """Uncount what a prefill has not brought: it comes again, and is counted again."""
        self.stats.prefill_tokens -= self._unread
        self._unread = 0

    def moved(self, number: int, rows: SupportsInt) -> None:
        """Take the rows that event `number` moved, which only the worker knows; -1 is the last.

        They are read for the next snapshot: a number on a GPU would have to be waited for.
        """
        self._moves.append((number % len(self.stats.events), rows))

    def snapshot(self) -> KVStats:
        for number, rows in self._moves:
            events = self.stats.events
            events[number] = replace(events[number], rows_moved=int(rows))
            self.stats.rows_moved += int(rows)
        self._moves.clear()
        snapshot = KVStats(**vars(self.stats))
        snapshot.events = list(self.stats.events)
        snapshot.restarts = list(self.stats.restarts)
        snapshot.logical, snapshot.live = self.fed, self.live
        if self._method.compresses:
            snapshot.budget = self._method.budget_at(self.fed)
            schedule = self._schedule
            snapshot.protected, snapshot.refused = schedule.protected, schedule.refused
            snapshot.refused_budget = schedule.refused_budget
            if schedule.refused_budget is not None:
                snapshot.refused_recent = self._method.recent_kept(schedule.refused_budget)
        return snapshot


@dataclass(frozen=True)
class EvictionOrder:
    """An event for the worker: which rows there are, in which blocks."""

    session: str
    number: int  # of the session's events, from 0
    eviction: Eviction
    blocks: list[int]  # the session's blocks before, in order; the first ones stay its own
    spans: Sequence[SpanRange] = ()  # what leaves; the method chooses if there are none


@dataclass(frozen=True)
class Rewind:
    """A session at rest that forgets its tokens from position `length` on."""

    session: str
    length: int


@dataclass(frozen=True)
class PrefixEnd:
    """A shared prefix that a session comes to the end of: what others will begin with."""

    name: str  # no session is called so
    tokens: int


@dataclass
class StepPlan:
    """What a worker does around one forward, in this order."""

    method: dict[str, Any] | None = None  # a document: go on with this one, no session is open
    dropped: list[str] = field(default_factory=list)  # sessions whose rows are gone
    begun: dict[str, str] = field(default_factory=dict)  # session -> prefix that it begins with
    # What happened to sessions at rest, in order; the step's forward may reuse their blocks.
    before: list[EvictionOrder | Rewind] = field(default_factory=list)
    sessions: dict[str, str] = field(default_factory=dict)  # request -> session, for all of a step
    # Session -> phases of its tokens, where a generation begins or its rows are computed again.
    prompts: dict[str, PromptPhases] = field(default_factory=dict)
    # Request -> logical minus physical length during the forward, where it is not 0.
    deficits: dict[str, int] = field(default_factory=dict)
    left: dict[str, PrefixEnd] = field(default_factory=dict)  # by session, within the forward
    after: dict[str, EvictionOrder] = field(default_factory=dict)  # request -> its event
    given_up: list[str] = field(default_factory=list)  # prefixes that nobody will begin with
    given: dict[str, int] = field(default_factory=dict)  # request -> the token it is to draw


@dataclass(frozen=True)
class OwnBest:
    """What a worker drew of a request that was given another token to draw."""

    request: str
    token: int


@dataclass(frozen=True)
class RowsMoved:
    """How many rows a session's event moved, which only a worker knows."""

    session: str
    number: int
    moved: int
