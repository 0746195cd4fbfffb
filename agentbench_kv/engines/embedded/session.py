"""One session of the embedded engine: pending tokens, cache, kept queries, accounting."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from agentbench_kv.engines.base import KVEvent, KVStats, PhaseLabeller
from agentbench_kv.engines.embedded.cache import SessionCache
from agentbench_kv.engines.embedded.observer import Observer
from agentbench_kv.engines.embedded.pool import CachePools
from agentbench_kv.engines.queries import QueryBuffer, QueryStore
from agentbench_kv.errors import UsageError
from agentbench_kv.methods.base import Method
from agentbench_kv.methods.phases import Phase
from agentbench_kv.methods.schedule import Schedule


class Recorder(Protocol):
    """Watches an engine at work; used by conformance checks and captures."""

    def on_logits(self, session: str, logical: int, logits: Tensor) -> None:
        """See the logits [vocab] that predict logical position `logical`."""
        ...

    def on_event(self, session: str, logical: int, kept_positions: Tensor) -> None:
        """See what an event or a restored block left, as original positions [layers, kv_heads, n].

        Rows before `logical` that are not in it are invisible to every later query, until a later
        call has them again.
        """
        ...


class EmbeddedSession:
    """State of one session.

    `fed` counts tokens the model has seen: the next logical position. The newest generated token is
    pending until its own forward, so `logical` may exceed `fed`. `generated` holds the positions of
    all the model wrote. `frequencies` are None if the model's RoPE changes with the length.
    """

    def __init__(
        self,
        name: str,
        labeller: PhaseLabeller,
        method: Method,
        pools: CachePools,
        queries: QueryBuffer,
        frequencies: Tensor | None,
    ) -> None:
        self.name = name
        self.labeller = labeller
        self.method = method
        self.cache = SessionCache(pools)
        self.queries = QueryStore(queries)
        self.schedule = Schedule(method)
        self.pending: deque[tuple[int, Phase]] = deque()
        self.fed = 0
        self.prompt = 0
        self.prompt_pending = 0
        self.prefilling = False
        self.generated: set[int] = set()
        self._phases: list[int] = []
        self.frequencies = frequencies
        self.packed_frequencies = frequencies if method.positions == "cache" else None
        self._rope: list[int] = []
        self._next = 0
        self.reserved = 0
        self.broken: BaseException | None = None
        self._stats = KVStats()

    @property
    def logical(self) -> int:
        """Tokens of the session, fed and pending."""
        return self.fed + len(self.pending)

    @property
    def next_position(self) -> int:
        """RoPE position of the next token to feed."""
        return self._next if self.packed_frequencies is None else self.cache.length

    @property
    def decoded(self) -> int:
        """Tokens generated so far."""
        return self._stats.decode_tokens

    def extend(self, tokens: Sequence[int], phases: Sequence[Phase]) -> None:
        """Queue prompt tokens."""
        self.pending.extend(zip(tokens, phases, strict=True))
        self.prompt_pending += len(tokens)

    def begin_turn(self) -> None:
        """Count the queued prompt tokens as one prefill."""
        stats = self._stats
        stats.prefill_tokens += self.prompt_pending
        stats.longest_prefill = max(stats.longest_prefill, self.prompt_pending)
        self.prefilling = self.prompt_pending > 0
        self.prompt = self.prompt or self.prompt_pending
        self.prompt_pending = 0

    def take(self, limit: int) -> list[tuple[int, Phase]]:
        """Take up to `limit` pending tokens for a forward."""
        taken = [self.pending.popleft() for _ in range(min(limit, len(self.pending)))]
        self._phases += [int(phase) for _, phase in taken]
        return taken

    def fed_rows(self, rows: int, decoding: bool) -> None:
        """Account for a forward that wrote `rows` rows into the cache."""
        self.cache.advance(self.fed, rows)
        self.fed += rows
        self._rope += range(self._next, self._next + rows)
        self._next += rows
        live = self.cache.length
        stats = self._stats
        stats.peak_live = max(stats.peak_live, live)
        if decoding:
            stats.bytes_read += live * self.cache.shape.bytes_per_token

    def accept(self, token: int) -> None:
        """Add a generated token: labelled now, fed by the next forward."""
        self.generated.add(self.logical)
        self.pending.append((token, self.labeller.label(token)))
        self._stats.decode_tokens += 1
        self._stats.decode_kv_sum += self.cache.length

    def compress(self, recorder: Recorder | None = None, observer: Observer | None = None) -> None:
        """Run one event: select, compact, account."""
        before = self.cache.length
        selection = self.method.select(
            self.cache.layer_views(),
            self.queries.layer_queries(self.cache.shape.layers),
            self.fed,
            self.prompt,
            torch.tensor(self._phases, device=self.cache.shape.device),
        )
        if observer is not None:
            live = self.cache.positions[:, :, :before]
            observer.on_selection(self.name, self.fed, live, selection)
        moved = self.cache.keep(selection.kept, self.packed_frequencies)
        self.end_moved(before)
        self.count_event(before, moved)
        if recorder is not None:
            kept = self.cache.positions[:, :, : self.cache.length].clone()
            recorder.on_event(self.name, self.fed, kept)

    def end_moved(self, before: int) -> None:
        """Turn the kept queries along if the end of the cache is another position now."""
        if self.packed_frequencies is not None:
            self.queries.shift(self.cache.length - before, self.packed_frequencies)

    def count_event(self, before: int, moved: int) -> None:
        """Account for rows that left a cache of `before` tokens."""
        stats, live = self._stats, self.cache.length
        stats.evicted += before - live
        stats.rows_moved += moved
        stats.events.append(KVEvent(stats.decode_tokens, self.fed, before, live, moved))

    def count_restored(self, tokens: int, moved: int) -> None:
        """Account for tokens that came back."""
        stats = self._stats
        stats.restored += tokens
        stats.rows_moved += moved
        stats.peak_live = max(stats.peak_live, self.cache.length)

    def rope_positions(self, start: int, rows: Tensor) -> list[int]:
        """Return the RoPE positions of cached tokens: logical ones from `start`, in `rows`."""
        if self.packed_frequencies is not None:
            places: list[int] = rows.tolist()
            return places
        return self._rope[start : start + len(rows)]

    def spot_for(self, places: list[int], at: int | None) -> tuple[list[int], int]:
        """Return RoPE positions and first row where tokens of some positions may come back.

        Raises
        ------
        UsageError
            If they cannot be there.
        """
        end, count = self.cache.length, len(places)
        if self.packed_frequencies is not None:
            if at not in (None, end):
                raise UsageError("where positions are the cache's, blocks come back at its end")
            return list(range(end, end + count)), end
        targets = places if at is None else list(range(at, at + count))
        if targets != places and self.frequencies is None:
            raise UsageError("this model's RoPE changes with the length: its keys cannot be moved")
        taken = [self._rope[label] for label in self.cache.positions[0, 0, :end].tolist()]
        row = bisect_left(taken, targets[0])
        if targets[0] < 0 or (row < end and taken[row] <= targets[-1]):
            raise UsageError(f"RoPE positions {targets[0]} to {targets[-1]} are taken")
        return targets, row

    def settle(self, start: int, targets: list[int]) -> None:
        """Take note of where the tokens from a logical position on came back to."""
        self._rope[start : start + len(targets)] = targets
        self._next = max(self._next, targets[-1] + 1)

    def free(self) -> None:
        """Give cache and rings back; the session is unusable afterwards."""
        self.cache.free()
        self.queries.free()

    def stats(self) -> KVStats:
        """Return a snapshot of the accounting."""
        snapshot = KVStats(**vars(self._stats))
        snapshot.events = list(self._stats.events)
        snapshot.logical = self.logical
        snapshot.live = self.cache.length
        if self.method.compresses:
            snapshot.budget = self.method.budget_at(self.fed)
        return snapshot
