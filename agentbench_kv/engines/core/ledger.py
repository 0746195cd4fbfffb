"""One session as a scheduler sees it, without tensors: lengths, events that fall due, accounting.

And what a scheduler in another process tells its workers about a step: plain data, pickled.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from agentbench_kv.engines.base import KVEvent, KVStats
from agentbench_kv.methods.base import Method, Schedule
from agentbench_kv.phases.machine import PromptPhases


@dataclass(frozen=True)
class Eviction:
    """An event that is due: from how many rows to how many."""

    live: int  # rows per (layer, KV head) before
    keep: int  # and after
    logical: int  # tokens the model has seen
    prompt: int  # tokens of the session's first prefill


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
        self, method: Method, bytes_per_token: int, windows: WindowBytes | None = None
    ) -> None:
        self.stats = KVStats()
        self.fed = 0  # tokens the model has seen
        self.live = 0  # rows per (layer, KV head)
        self._method = method
        # Keys and values, over all layers with full attention and their heads.
        self._bytes = bytes_per_token
        self._windows = windows
        self._schedule = Schedule(method)
        self._prefilling = False
        self._evicted_last = False  # an event fell due with the last sampled token
        self._lost = 0  # tokens whose rows were lost since the last turn began
        self._prompt = 0  # tokens of the first prefill

    @property
    def deficit(self) -> int:
        """Logical minus physical length."""
        return self.fed - self.live

    def begin_turn(self, tokens: int) -> None:
        if self._lost:
            self.stats.recomputed += self._lost
            self._lost = 0
            self.stats.restarts.append((len(self.stats.events), tokens))
        self.stats.prefill_tokens += tokens
        self.stats.longest_prefill = max(self.stats.longest_prefill, tokens)
        self._prefilling = tokens > 0
        self._prompt = self._prompt or tokens

    def rows_needed(self, pending: int, left: int) -> int:
        """Return the rows the session may hold before it ends or an event frees some.

        It has `pending` tokens to feed and generates at most `left`.
        """
        start, method = self.live + pending, self._method
        if not method.compresses or method.trigger == "turn":
            return start + left
        budget = method.budget_at(self.fed + pending + left)
        return min(start + left, max(start, budget) + method.interval)

    def forward(self, rows: int) -> None:
        self.fed += rows
        self.live += rows
        self.stats.peak_live = max(self.stats.peak_live, self.live)
        if not self._prefilling:
            self.stats.bytes_read += self.live * self._bytes
            if self._windows is not None:
                read = min(self.fed, self._windows.window) * self._windows.per_token
                self.stats.bytes_read += read
                self.stats.window_bytes_read += read

    def sampled(self) -> Eviction | None:
        """Count a sampled token; return the event that falls due with it."""
        eviction = None
        self._evicted_last = False
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

        False if an event fell due with it: rows are gone that should be there.
        """
        if self._evicted_last:
            return False
        self.stats.decode_tokens -= 1
        self.stats.decode_kv_sum -= self.live
        self._schedule.take_back()
        return True

    def end_turn(self) -> Eviction | None:
        return self.evict() if self._schedule.after_turn(self.live, self.fed) else None

    def evict(self, keep: int | None = None) -> Eviction:
        """Count an event that leaves `keep` rows; if not given, the method's budget."""
        keep = self._method.budget_at(self.fed) if keep is None else keep
        eviction = Eviction(self.live, keep, self.fed, self._prompt)
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
        self.stats.peak_live = max(self.stats.peak_live, self.live)

    def fork(self) -> SessionLedger:
        """Return the ledger of a session that starts from this one's rows; it has done nothing."""
        twin = SessionLedger(self._method, self._bytes, self._windows)
        twin.fed, twin.live = self.fed, self.live
        twin._prompt = self._prompt
        return twin

    def lose(self) -> None:
        """Count the loss of all rows; they count as recomputed once a turn begins again."""
        self._lost += self.fed
        self.fed = self.live = 0
        self._prompt = 0
        self._schedule = Schedule(self._method)

    def moved(self, number: int, rows: int) -> None:
        """Add the rows that event `number` moved, which only the worker knows; -1 is the last."""
        events = self.stats.events
        events[number] = replace(events[number], rows_moved=rows)
        self.stats.rows_moved += rows

    def snapshot(self) -> KVStats:
        snapshot = KVStats(**vars(self.stats))
        snapshot.events = list(self.stats.events)
        snapshot.restarts = list(self.stats.restarts)
        snapshot.logical, snapshot.live = self.fed, self.live
        if self._method.compresses:
            snapshot.budget = self._method.budget_at(self.fed)
        return snapshot


@dataclass(frozen=True)
class EvictionOrder:
    """An event for the worker: which rows there are, in which blocks."""

    session: str
    number: int  # of the session's events, from 0
    eviction: Eviction
    blocks: list[int]  # the session's blocks before, in order; the first ones stay its own


@dataclass
class StepPlan:
    """What a worker does around one forward, in this order."""

    method: dict[str, Any] | None = None  # a document: go on with this one, no session is open
    dropped: list[str] = field(default_factory=list)  # sessions whose rows are gone
    # Events of sessions at rest; the step's forward may reuse their blocks.
    before: list[EvictionOrder] = field(default_factory=list)
    sessions: dict[str, str] = field(default_factory=dict)  # request -> session, for all of a step
    # Session -> phases of its tokens, where a generation begins or its rows are computed again.
    prompts: dict[str, PromptPhases] = field(default_factory=dict)
    # Request -> logical minus physical length during the forward, where it is not 0.
    deficits: dict[str, int] = field(default_factory=dict)
    after: dict[str, EvictionOrder] = field(default_factory=dict)  # request -> its event


@dataclass(frozen=True)
class RowsMoved:
    """How many rows a session's event moved, which only a worker knows."""

    session: str
    number: int
    moved: int
