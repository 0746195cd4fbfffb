"""One session of the embedded engine: pending tokens, cache, kept queries, accounting."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from agentbench_kv.engines.base import KVEvent, KVStats, PhaseLabeller
from agentbench_kv.engines.core.rings import QueryBuffer, QueryStore
from agentbench_kv.engines.embedded.cache import CachePools, SessionCache
from agentbench_kv.engines.embedded.observer import Observer
from agentbench_kv.errors import UsageError
from agentbench_kv.methods.base import Method, Phase, Schedule


class Recorder(Protocol):
    """Watches an engine at work; used by conformance checks and captures."""

    def on_logits(self, session: str, logical: int, logits: Tensor) -> None:
        """See the logits [vocab] that predict logical position `logical`."""

    def on_event(self, session: str, logical: int, kept_positions: Tensor) -> None:
        """See what an event or a restored block left, as original positions [layers, kv_heads, n].

        Earlier rows that are not in it are invisible to later queries until a call has them again.
        """


class EmbeddedSession:
    """State of one session; the newest generated token is pending until its own forward."""

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
        self.fed = 0  # tokens the model has seen: the next logical position
        self.prompt = 0  # tokens of the first prefill
        self.prompt_pending = 0
        self.prefilling = False
        self.generated: set[int] = set()  # positions of all the model wrote
        self._phases: list[int] = []
        self.frequencies = frequencies  # None if the model's RoPE changes with the length
        self.packed_frequencies = frequencies if method.positions == "cache" else None
        self._rope: list[int] = []  # RoPE position of every token seen
        self._next = 0
        self.reserved = 0  # rows it may come to hold, for the scheduler
        self.broken: BaseException | None = None
        self._stats = KVStats()

    @property
    def logical(self) -> int:
        """Tokens of the session, fed and pending."""
        return self.fed + len(self.pending)

    @property
    def next_position(self) -> int:
        return self._next if self.packed_frequencies is None else self.cache.length

    def extend(self, tokens: Sequence[int], phases: Sequence[Phase]) -> None:
        self.pending.extend(zip(tokens, phases, strict=True))
        self.prompt_pending += len(tokens)

    def begin_turn(self) -> None:
        stats = self._stats
        stats.prefill_tokens += self.prompt_pending
        stats.longest_prefill = max(stats.longest_prefill, self.prompt_pending)
        self.prefilling = self.prompt_pending > 0
        self.prompt = self.prompt or self.prompt_pending
        self.prompt_pending = 0

    def take(self, limit: int) -> list[tuple[int, Phase]]:
        taken = [self.pending.popleft() for _ in range(min(limit, len(self.pending)))]
        self._phases += [int(phase) for _, phase in taken]
        return taken

    def fed_rows(self, rows: int, decoding: bool) -> None:
        self.cache.advance(self.fed, rows)
        self.fed += rows
        self._rope += range(self._next, self._next + rows)
        self._next += rows
        stats, live = self._stats, self.cache.length
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
        self.end_event(before, moved, recorder)

    def end_event(self, before: int, moved: int, recorder: Recorder | None) -> None:
        """Account for rows that left, or came back to, a cache of `before` tokens."""
        stats, live = self._stats, self.cache.length
        if self.packed_frequencies is not None:
            # The end of the cache is another position now: the kept queries turn along.
            self.queries.shift(live - before, self.packed_frequencies)
        stats.rows_moved += moved
        if live > before:
            stats.restored += live - before
            stats.peak_live = max(stats.peak_live, live)
        else:
            stats.evicted += before - live
            stats.events.append(KVEvent(stats.decode_tokens, self.fed, before, live, moved))
        if recorder is not None:
            recorder.on_event(self.name, self.fed, self.cache.positions[:, :, :live].clone())

    def rope_positions(self, start: int, rows: Tensor) -> list[int]:
        """RoPE positions of cached tokens: logical ones from `start`, in `rows`."""
        if self.packed_frequencies is not None:
            positions: list[int] = rows.tolist()
            return positions
        return self._rope[start : start + len(rows)]

    def restore_target(self, positions: list[int], at: int | None) -> tuple[list[int], int]:
        """RoPE positions and first row where tokens saved at RoPE `positions` may return.

        Raises UsageError if they cannot be there.
        """
        end, count = self.cache.length, len(positions)
        if self.packed_frequencies is not None:
            if at not in (None, end):
                raise UsageError("where positions are the cache's, blocks come back at its end")
            return list(range(end, end + count)), end
        targets = positions if at is None else list(range(at, at + count))
        if targets != positions and self.frequencies is None:
            raise UsageError("this model's RoPE changes with the length: its keys cannot be moved")
        taken = [self._rope[label] for label in self.cache.positions[0, 0, :end].tolist()]
        row = bisect_left(taken, targets[0])
        if targets[0] < 0 or (row < end and taken[row] <= targets[-1]):
            raise UsageError(f"RoPE positions {targets[0]} to {targets[-1]} are taken")
        return targets, row

    def restored_at(self, start: int, targets: list[int]) -> None:
        """Remember where the tokens from logical position `start` on came back to."""
        self._rope[start : start + len(targets)] = targets
        self._next = max(self._next, targets[-1] + 1)

    def free(self) -> None:
        self.cache.free()
        self.queries.free()

    def stats(self) -> KVStats:
        return replace(
            self._stats,
            events=list(self._stats.events),
            logical=self.logical,
            live=self.cache.length,
            budget=self.method.budget_at(self.fed) if self.method.compresses else None,
        )
