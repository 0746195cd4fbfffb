"""One session of the embedded engine: pending tokens, cache, kept queries, RoPE positions."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from agentbench_kv.engines.base import KVStats, PhaseLabeller
from agentbench_kv.engines.core.kv_dtype import KVDtype
from agentbench_kv.engines.core.ledger import Eviction, SessionLedger, WindowBytes
from agentbench_kv.engines.core.memory import SessionMemory
from agentbench_kv.engines.core.rings import QueryBuffer, QueryStore
from agentbench_kv.engines.embedded.cache import SessionCache, SharedPrefix
from agentbench_kv.engines.embedded.observer import FedRows, Observer
from agentbench_kv.engines.embedded.quantization import settle
from agentbench_kv.engines.embedded.slots import CachePools
from agentbench_kv.engines.embedded.windows import WindowCache
from agentbench_kv.errors import KVBenchError
from agentbench_kv.methods.base import Method, Phase


@dataclass(frozen=True)
class WindowPools:
    """Pools of the layers that see a window."""

    pools: CachePools
    window: int
    frequencies: Tensor  # of these layers' RoPE, which may be another


@dataclass(frozen=True)
class SessionPools:
    """What the sessions of an engine live in."""

    full: CachePools
    windows: WindowPools | None
    queries: QueryBuffer
    frequencies: Tensor  # of RoPE in the layers with full attention
    kv_dtype: KVDtype | None = None  # that rows are simulated at

    def new_ledger(self, method: Method) -> SessionLedger:
        shape, form, windows = self.full.shape, self.kv_dtype, None
        heads, itemsize = shape.layers * shape.kv_heads, shape.dtype.itemsize
        if self.windows is not None:
            seen = self.windows.pools.shape
            per_token = seen.bytes_per_token
            if form is not None:
                per_token = form.row_bytes(seen.layers * seen.kv_heads, seen.head_dim)
            windows = WindowBytes(per_token, self.windows.window)
        held = None if form is None else form.held(heads, shape.head_dim, itemsize)
        return SessionLedger(method, shape.bytes_per_token, windows, held)

    @property
    def nbytes(self) -> int:
        return self.full.nbytes + (0 if self.windows is None else self.windows.pools.nbytes)

    @property
    def used(self) -> int | None:
        """Bytes in slots that are used; None where rows are simulated at another precision."""
        if self.kv_dtype is not None:
            return None
        return self.full.used + (0 if self.windows is None else self.windows.pools.used)


class EmbeddedSession:
    """State of one session; the newest generated token is pending until its own forward."""

    def __init__(
        self,
        name: str,
        labeller: PhaseLabeller,
        method: Method,
        pools: SessionPools,
        recorder: Observer | None,
    ) -> None:
        self.name = name
        self.labeller = labeller
        self.method = method
        self._pools = pools
        self.cache = SessionCache(pools.full)
        self.queries = QueryStore(pools.queries)
        self.window: WindowCache | None = None
        if pools.windows is not None:
            self.window = WindowCache(pools.windows.pools, pools.windows.window)
        self.ledger = pools.new_ledger(method)
        self.pending: deque[tuple[int, Phase]] = deque()
        self.prompt_pending = 0  # how many of them the next turn's prompt adds
        self.chunk: list[tuple[int, Phase]] = []  # what the next forward is fed
        self.drawn = 0  # of its rows those that an answer's tokens are, if several are given
        # Of the chunk's rows those whose queries are kept, and their slots.
        self.kept_queries: tuple[list[int], list[int]] = ([], [])
        self.generated: set[int] = set()  # positions of all the model wrote
        self.frequencies = pools.frequencies
        self.packed_frequencies = pools.frequencies if method.positions == "cache" else None
        self.rope: list[int] = []  # RoPE position of every token seen, where they are logical
        self.reserved = 0  # rows it may come to hold, for the scheduler
        self.sources: tuple[str, ...] = ()  # the session it was forked from, and that one's
        self.broken: BaseException | None = None
        self.memory: SessionMemory | None = None
        self.mark = object()  # tells its rows in a memory bank from others'
        self._to_look_at: list[tuple[int, Phase]] = []  # tokens that are read twice for it
        # Tokens and phases of the system message, until its rows are there; None: none is shared.
        self.prefix_key: bytes | None = None
        self.prefix_tokens = 0
        self.computes_prefix = False  # for the sessions that need it, too
        self._settled = (0, 0)  # rows whose keys, and values, KIVI has quantised
        self._next = 0
        self._phases: list[int] = []
        self._recorder = recorder

    @property
    def nbytes(self) -> int:
        """Bytes allocated for keys and values."""
        return self.cache.nbytes + (0 if self.window is None else self.window.nbytes)

    def longest_stretch(self, most: int) -> int:
        """Return how many tokens of an answer may be fed at once: KIVI quantises after each."""
        form = self._pools.kv_dtype
        return 1 if form is not None and form.residual else most

    @property
    def query_buffer(self) -> QueryBuffer:
        """Where its kept queries are, with those of all sessions of its method."""
        return self._pools.queries

    @property
    def fed(self) -> int:
        """Tokens the model has seen: the next logical position."""
        return self.ledger.fed

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

    def attach(self, memory: SessionMemory) -> None:
        """Make room before the session's own rows for what its prompts bring back."""
        self.memory = memory
        self.cache.reserve(memory.rows)
        self.cache.advance(-memory.rows, memory.rows)  # they are none of its own tokens
        self._next = memory.rows
        self.ledger.restore(memory.rows)

    def begin_turn(self) -> None:
        memory, passes = self.memory, 1
        if memory is not None and self.prompt_pending:
            memory.begin()
            passes = memory.passes
            if memory.looking:
                self._to_look_at = list(self.pending)
        self.ledger.begin_turn(self.prompt_pending, passes)
        self.prompt_pending = 0

    def put_off_prompt(self) -> None:
        """Leave what is still pending of the prompt to the next turn's."""
        self.ledger.uncount_unread()
        self.prompt_pending = len(self.pending)

    def name_prefix(self) -> None:
        """Say what a session that is about to begin has to share, if it begins so."""
        count, self.prefix_key = self.ledger.system, None
        if self.method.prefix == "own" or self.fed or not 0 < count < len(self.pending):
            return
        first = list(islice(self.pending, count))
        self.prefix_key = np.array(first, np.int64).tobytes()
        self.prefix_tokens = count

    @property
    def rows_elsewhere(self) -> int:
        """Rows that a prefix holds for it, or will, and that it will never have to copy."""
        rows = self.cache.shared
        if self.prefix_key is not None and not self.computes_prefix:
            rows = self.prefix_tokens
        return rows if self.leaves_prefix(rows) else 0

    def leaves_prefix(self, rows: int) -> bool:
        """Whether nothing that falls due will change so many first rows."""
        form, method = self._pools.kv_dtype, self.method
        if self.cache.shape.with_sums or method.positions == "cache" or (form and form.residual):
            return False
        return not method.compresses or self.ledger.protects(rows)

    def begin_with(self, stored: SessionPrefix) -> None:
        """Go on from a prefix that the session begins with, as if it had been fed."""
        first = [self.pending.popleft() for _ in range(stored.rows)]
        if self._recorder is not None:
            tokens, phases = ([int(part) for part in parts] for parts in zip(*first, strict=True))
            self._recorder.on_rows(FedRows(self.name, 0, tokens, phases, [False] * len(tokens)))
        self.free()
        self._follow(stored.state)
        if stored.prefix is not None:
            self.cache.stand_behind(stored.prefix)
        self.ledger.find(stored.rows, 0 if stored.prefix is None else stored.rows)
        self.prefix_key = None

    def leave_prefix(self) -> SessionPrefix:
        """Hand over what was fed, and go on behind it."""
        state = self.fork("", self.labeller)
        state.pending.clear()
        prefix = None
        if not self.cache.shape.with_sums:
            prefix = SharedPrefix(state.cache)
            self.cache.stand_behind(prefix)
            self.ledger.stats.shared = prefix.rows
        self.prefix_key, self.computes_prefix = None, False
        return SessionPrefix(state, prefix)

    @property
    def positions_taken(self) -> int:
        """RoPE positions before the session's own, which a memory's rows have."""
        return 0 if self.memory is None else self.memory.rows

    @property
    def rows_unseen(self) -> int:
        """First rows that the next forward does not see: it is to find what comes there."""
        return self.memory.rows if self.memory is not None and self.memory.looking else 0

    @property
    def all_taken(self) -> bool:
        """Whether the next forward is fed the last of what the session was given."""
        return not self.pending and not (self.memory is not None and self.memory.looking)

    def take(self, limit: int) -> None:
        """Make the next pending tokens the chunk, with room for their rows and queries."""
        rows = min(limit, len(self.pending))
        if self.computes_prefix:
            rows = min(rows, self.prefix_tokens - self.fed)
        if self.memory is not None and self.memory.due:
            self.cache.own()  # its first rows are written anew
        self.cache.reserve(rows)
        if self.window is not None:
            self.window.reserve(rows)
        self.chunk = [self.pending.popleft() for _ in range(rows)]
        self.kept_queries = self.queries.place([phase for _, phase in self.chunk], self.fed, 0)
        self._phases += [int(phase) for _, phase in self.chunk]

    def fed_rows(self, rows: int) -> None:
        self.cache.advance(self.fed, rows)
        if self.window is not None:
            self.window.advance(rows)
        form = self._pools.kv_dtype
        if form is not None and form.residual and self.all_taken:
            # A prompt's parts see each other as computed.
            self._settled = settle(self.cache, form, self._settled)
        self.count_fed(rows)
        if self.ledger.live != self.cache.length:
            raise KVBenchError(
                f"session {self.name}: the cache holds {self.cache.length} rows, the account says "
                f"{self.ledger.live}"
            )
        self.rope += range(self._next, self._next + rows)
        self._next += rows
        if self.memory is None:
            return
        if not self.memory.looking:
            self.memory.due = False
        elif not self.pending:
            self.memory.choose()
            self._read_again()

    def _read_again(self) -> None:
        """Go back to the beginning of what was fed to find what the session's memory has of it."""
        rows = len(self._to_look_at)
        self.cache.cut(self.cache.length - rows)
        self.ledger.read_again(rows)
        del self.rope[-rows:], self._phases[-rows:]
        self._next -= rows
        self.pending.extend(self._to_look_at)
        self._to_look_at = []

    def count_fed(self, rows: int) -> None:
        """Count the rows of a forward; tokens of an answer as decodes, one by one."""
        if self.drawn:
            self.ledger.forward_drawn(rows)
            self.drawn = 0
        else:
            self.ledger.forward(rows)

    def add_drawn(self, tokens: Iterable[tuple[int, Phase]]) -> None:
        """Add an answer's tokens behind the one that is pending, for one forward with it.

        No event may fall due with any of them.
        """
        for token in tokens:
            self.generated.add(self.logical)
            self.pending.append(token)
        self.drawn = len(self.pending)

    def accept(self, token: int) -> Eviction | None:
        """Add a generated token: labelled now, fed by the next forward. Return the event due."""
        self.generated.add(self.logical)
        self.pending.append((token, self.labeller.label(token)))
        return self.ledger.sampled()

    def compress(self, eviction: Eviction) -> None:
        layers = self.cache.shape.layers
        phases = torch.tensor(self._phases, device=self.cache.shape.device)
        selection = self.method.select(
            self.cache.layer_views(),
            self.queries.layer_queries(layers),
            eviction.logical,
            eviction.prompt,
            phases,
            **eviction.more,
        )
        kept = selection.kept.shape[-1]
        if kept != eviction.keep:
            raise KVBenchError(
                f"{self.method.label} kept {kept} rows, its budget is {eviction.keep}"
            )
        if self._recorder is not None:
            live = self.cache.row_positions()
            self._recorder.on_selection(self.name, eviction.logical, live, selection)
        self.ledger.moved(-1, self.cache.keep(selection.kept, self.packed_frequencies))
        self.rows_changed(eviction.live)

    def evict(self, kept: Tensor) -> None:
        """Keep rows [n] in all layers and heads, in their order; one event."""
        cache, before = self.cache, self.cache.length
        everywhere = kept.expand(cache.shape.layers, cache.shape.kv_heads, -1).contiguous()
        moved = cache.keep(everywhere, self.packed_frequencies, ordered=True)
        self.ledger.evict(cache.length)
        self.ledger.moved(-1, moved)
        self.rows_changed(before)

    def rows_changed(self, before: int) -> None:
        """Follow rows that left, or came back to, a cache of `before` tokens."""
        if self.packed_frequencies is not None:
            # The end of the cache is another position now: the kept queries turn along.
            by = self.cache.length - before
            self.queries.shift(by, self.packed_frequencies)
            self._turn_window(by)
        if self._recorder is not None:
            self._recorder.on_event(self.name, self.fed, self.cache.row_positions().clone())

    def _turn_window(self, by: int) -> None:
        """Turn the rows of a window along where the next RoPE position jumps by so many."""
        if by and self.window is not None and self._pools.windows is not None:
            self.window.turn(by, self._pools.windows.frequencies)

    def restored_at(self, start: int, targets: list[int]) -> None:
        """Remember at which RoPE positions the tokens from logical `start` on came back."""
        self.rope[start : start + len(targets)] = targets
        ahead = targets[-1] + 1 - self._next
        if ahead > 0:
            self._next += ahead
            if self.packed_frequencies is None:
                self._turn_window(ahead)

    def rewind(self, length: int) -> None:
        """Forget the tokens from logical position `length` on."""
        if length < self.fed:
            self._rewind_rows(length)
        # The first of what is pending may be the token that was generated last.
        drawn = len(self.pending) - self.prompt_pending
        left = max(0, length - self.fed)
        self.pending = deque(islice(self.pending, left))
        self.prompt_pending = max(0, left - drawn)
        self.generated = {position for position in self.generated if position < length}

    def _rewind_rows(self, length: int) -> None:
        cache, gone = self.cache, self.fed - length
        if self.window is not None:
            self.window.rewind(length)
        kept = (cache.row_positions()[0, 0] < length).nonzero()[:, 0]
        if not len(kept) or int(kept[-1]) == len(kept) - 1:
            cache.cut(len(kept))
        else:  # a block that came back lies behind rows that go
            everywhere = kept.expand(cache.shape.layers, cache.shape.kv_heads, -1).contiguous()
            cache.keep(everywhere, ordered=True)
        self._settled = (min(self._settled[0], length), min(self._settled[1], length))
        self.ledger.rewind(length, cache.length)
        del self.rope[length:], self._phases[length:]
        before, self._next = self._next, max(self.rope, default=self.positions_taken - 1) + 1
        self._turn_window(self._next - (before - gone))

    def fork(self, name: str, labeller: PhaseLabeller) -> EmbeddedSession:
        """Return a session that goes on from here. Rows are shared, kept queries are copied."""
        new = EmbeddedSession(name, labeller, self.method, self._pools, self._recorder)
        new._follow(self)
        new.ledger = self.ledger.fork()
        new.pending, new.prompt_pending = self.pending.copy(), self.prompt_pending
        new.reserved = new.cache.length
        new.sources = (self.name, *self.sources)
        new.memory = None if self.memory is None else self.memory.fork()
        return new

    def _follow(self, source: EmbeddedSession) -> None:
        """Take over what another session, at rest, has read: its rows are shared."""
        self.cache.share(source.cache)
        if self.window is not None and source.window is not None:
            self.window.share(source.window)
        self.queries = source.queries.fork()
        self.generated, self.rope = source.generated.copy(), source.rope.copy()
        self._next, self._phases = source._next, source._phases.copy()
        self._settled = source._settled

    def free(self) -> None:
        for cache in (self.cache, self.window):
            if cache is not None:
                cache.free(clear=self.broken is not None)
        self.queries.free()

    def stats(self) -> KVStats:
        snapshot = self.ledger.snapshot()
        snapshot.logical, snapshot.live = self.logical, self.cache.length
        return snapshot


@dataclass
class SessionPrefix:
    """A session that was fed a prefix and nothing else: the beginning of others."""

    state: EmbeddedSession
    # Its rows, if sessions can stand behind them; without, they are copied as a fork copies them.
    prefix: SharedPrefix | None

    def __post_init__(self) -> None:
        self.rows = self.state.fed

    @property
    def rows_in_use(self) -> bool:
        """Whether sessions read its rows."""
        return self.prefix is not None and self.prefix.readers > 0

    def free(self) -> None:
        """Give it up: its rows go with the last session that reads them."""
        if self.prefix is None:
            self.state.free()
            return
        self.prefix.give_up()
        if self.state.window is not None:
            self.state.window.free()
        self.state.queries.free()
