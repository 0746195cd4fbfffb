"""EVOKE: blocks leave the cache under pressure and come back without a forward pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, ClassVar

import numpy as np

from agentbench_kv.errors import UsageError
from agentbench_kv.methods.base import Method
from agentbench_kv.methods.evoke.scoring import (
    FLOOR_MODES,
    HASH,
    NO_COSINE,
    TOKENS,
    Encoder,
    Focus,
    Scorer,
    Vector,
    cosine,
    make_encoder,
)
from agentbench_kv.methods.evoke.store import HostStore
from agentbench_kv.methods.spans import (
    Hints,
    Resident,
    Source,
    SpanCache,
    SpanMethod,
    SpanRange,
    SpanSession,
    TurnNotes,
)
from agentbench_kv.params import param

RECOVERIES = ("discard", "breadcrumb", "kv_restore")
MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Evoke(SpanMethod):
    """Evict the least relevant blocks above a watermark, bring back what a new message needs.

    When live > `high`·budget the lowest-scored blocks go until live ≤ `low`·budget. Before a new
    message is read, the `topk` evicted blocks most like it come back (`kv_restore`), are mentioned
    in a line each (`breadcrumb`), or stay away (`discard`). `@code` scores by recency and coherence
    as the authors' code does, `@readme` gives attention the most weight and takes floors as a
    lower bound, as their description does.
    """

    name: ClassVar[str] = "evoke"
    summary: ClassVar[str] = "evicts whole blocks by relevance, restores them without recompute"
    source: ClassVar[str] = "EVOKE, OS-like memory management for the LLM KV cache (Anyesh/EVOKE)"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "code": {},
        "readme": {"w_attention": 1.0, "floor": "clamp"},
    }
    default_preset: ClassVar[str] = "code"

    sinks: int = param(4, "first tokens whose block is always kept", low=0)
    positions: str = param(
        "sparse",
        "sparse: positions keep their holes; compact: they close, blocks come back at the end",
        choices=("sparse", "compact"),
    )
    block: int = param(128, "most tokens of a block; no block crosses a message", low=1)
    high: float = param(0.95, "share of the budget above which blocks leave", low=0.01, high=1.0)
    low: float = param(0.75, "share of the budget down to which they leave", low=0.01, high=1.0)
    w_recency: float = param(0.4, "weight of recency in a score", low=0.0)
    w_coherence: float = param(0.6, "weight of likeness to the task in a score", low=0.0)
    w_attention: float = param(0.0, "weight of measured attention in a score; 0: none", low=0.0)
    decay: float = param(0.01, "recency falls by this power of e per token of age", low=0.0)
    window: int = param(64, "last tokens whose attention counts", low=1)
    ewma: float = param(0.95, "weight of a token's attention per next newer one", low=0.0, high=1.0)
    layers: str = param("all", "whose attention counts: all, or numbers such as 2,-1")
    floor: str = param("rescale", "how floors lift a score", choices=FLOOR_MODES)
    floor_user: float = param(0.6, "floor of the user's blocks", low=0.0, high=1.0)
    floor_assistant: float = param(0.5, "floor of the assistant's blocks", low=0.0, high=1.0)
    focus_keep: float = param(0.7, "weight of the old task focus in the new", low=0.0, high=1.0)
    focus_snap: float = param(0.3, "cosine below which a message is a new task", low=-1.0, high=1.0)
    recovery: str = param("kv_restore", "what becomes of evicted blocks", choices=RECOVERIES)
    topk: int = param(4, "most blocks recovered for a message", low=0)
    margin: float = param(
        0.1, "by how much a block's cosine must be above that of those that leave for it", low=0.0
    )
    stub: int = param(16, "tokens of a block that a breadcrumb tells", low=1)
    encoder: str = param(TOKENS, f"{TOKENS}, {HASH}, wordllama, or an encoder's folder")
    store_mb: int = param(1024, "MiB of host memory for evicted blocks of all sessions", low=0)
    spill_mb: int = param(0, "MiB of files for blocks that leave host memory", low=0)

    @property
    def least(self) -> int:
        """Smallest budget whose lower watermark holds the first block and the newest."""
        return math.ceil(2 * self.block / self.low)

    @property
    def needs(self) -> frozenset[str]:
        restores = {"save_block", "restore_block"} if self.recovery == "kv_restore" else set()
        attends = {"span_attention"} if self.w_attention else set()
        embeds = {"embed_tokens"} if self.encoder == TOKENS else set()
        return frozenset({"evict_spans"} | restores | attends | embeds)

    @property
    def scorer(self) -> Scorer:
        weights = (self.w_recency, self.w_coherence, self.w_attention, self.decay)
        return Scorer(*weights, self.floor, self.floor_user, self.floor_assistant)

    @property
    def chosen_layers(self) -> tuple[int, ...]:
        """Layers whose attention counts; none named: all."""
        return () if self.layers == "all" else tuple(map(int, self.layers.split(",")))

    def validate(self) -> None:
        super().validate()
        if self.low > self.high:
            raise UsageError(f"low={self.low} is above high={self.high}")
        if self.w_recency + self.w_coherence <= 0:
            raise UsageError("w_recency and w_coherence are both 0; give one of them a weight")
        if self.sinks > self.block:
            raise UsageError(f"sinks={self.sinks} do not fit into a block of {self.block}")
        if self.budget is not None and self.budget < self.least:
            raise UsageError(
                f"budget {self.budget} is too small for blocks of {self.block} tokens; raise "
                f"--budget to {self.least} or lower --set block"
            )
        try:
            _ = self.chosen_layers
        except ValueError:
            raise UsageError(f"layers={self.layers}: expected all, or numbers: 2,-1") from None

    def budget_at(self, now: int) -> int:
        return max(super().budget_at(now), self.least)

    def below(self) -> Method:
        return Resident(
            positions="cache" if self.positions == "compact" else "logical",
            recent_queries=self.window if self.w_attention else 0,
        )

    def sessions(self) -> EvokeSessions:
        return EvokeSessions(self)


class EvokeSessions:
    """The sessions of one engine under EVOKE, and the host store and the encoder they share."""

    def __init__(self, method: Evoke) -> None:
        self.store = HostStore(method.store_mb * MIB, method.spill_mb * MIB)
        self._method = method
        self._encoder = make_encoder(method.encoder)

    def open(self, cache: SpanCache) -> EvokeSession:
        return EvokeSession(self._method, cache, self.store, self._encoder)

    def close(self) -> None:
        self.store.close()


@dataclass(eq=False)
class EvokeSpan:
    """A block of a session: at most `block` tokens of one message."""

    start: int  # logical positions
    end: int
    source: Source
    hints: Hints
    turn: int  # the request it was added in
    resident: bool = True  # in the cache, or on its way there with the next prefill
    vector: Vector | None = None  # embedding of its first `embedded` tokens
    embedded: int = 0
    mentioned: bool = False  # a breadcrumb told of it since it left

    def __len__(self) -> int:
        return self.end - self.start


class EvokeSession(SpanSession):
    """Blocks of one session under the watermarks; all sessions share the store of evicted ones."""

    def __init__(self, method: Evoke, cache: SpanCache, store: HostStore, encoder: Encoder) -> None:
        self.spans: list[EvokeSpan] = []
        self.tokens: list[int] = []
        self._method = method
        self._cache = cache
        self._store = store
        self._encoder = encoder
        self._focus = Focus(method.focus_keep, method.focus_snap)
        self._query: Vector | None = None
        self._turn = -1
        self._answered = 0
        self._losses = 0
        self._counts = dict.fromkeys(("evicted_blocks", "recovered_blocks", "breadcrumbs"), 0)

    @property
    def low(self) -> int:
        return int(self._method.low * self._method.budget_at(len(self.tokens)))

    @property
    def high(self) -> int:
        return int(self._method.high * self._method.budget_at(len(self.tokens)))

    def check(self, tokens: Sequence[int], notes: TurnNotes) -> None:
        if not notes.hints.pinned:
            return
        fixed = sum(len(span) for span in self.spans if self._is_fixed(span))
        needed = fixed + len(tokens) + self._method.block
        if needed > self.low:
            raise UsageError(
                f"evoke_pinned: with these {len(tokens)} tokens, {needed} could not be evicted, "
                f"the lower watermark is {self.low}; raise --budget or pin less"
            )

    def recalls(self, tokens: Sequence[int], notes: TurnNotes) -> list[SpanRange]:
        if self._method.recovery != "breadcrumb" or not _by_user(notes):
            return []
        query = self._message_vector(tokens, notes)
        if query is None:
            return []
        chosen = self._most_like(query, lambda span: not span.mentioned)
        for span in chosen:
            span.mentioned = True
        self._counts["breadcrumbs"] += len(chosen)
        stub = self._method.stub
        return sorted((span.start, min(span.end, span.start + stub)) for span in chosen)

    def admit(self, tokens: Sequence[int], notes: TurnNotes) -> None:
        self._turn += 1
        self._answered = 0
        self._query = self._message_vector(tokens, notes)
        if self._query is not None and _by_user(notes):
            self._focus.follow(self._query, notes.hints.task_boundary)
        at = len(self.tokens)
        self.tokens += tokens
        for size, source in notes.parts:
            self._cut(at, at + size, source, notes.hints)
            at += size

    def before_prefill(self) -> None:
        self._make_room(self._unfed)
        if self._method.recovery == "kv_restore" and self._query is not None:
            self._bring_back(self._query)

    def room(self) -> int:
        return max(1, self.high - self._cache.live - self._unfed)

    def at_watermark(self, generated: Sequence[int]) -> None:
        self._take_answer(generated)
        self._make_room(self._unfed)

    def after_turn(self, generated: Sequence[int]) -> None:
        self.at_watermark(generated)

    def figures(self) -> dict[str, int]:
        away = [span for span in self.spans if not span.resident]
        held = sum(self._key(span) in self._store for span in away)
        return {**self._counts, "blocks": len(self.spans), "away": len(away), "held": held}

    def close(self) -> None:
        self._store.drop(self._cache.name)

    @property
    def _unfed(self) -> int:
        """Tokens whose rows the next forward passes will add."""
        return len(self.tokens) - self._cache.fed

    def _key(self, span: EvokeSpan) -> tuple[str, int]:
        return self._cache.name, span.start

    def _cut(self, start: int, end: int, source: Source, hints: Hints) -> None:
        """Cut a message into as few blocks as possible, as equal as possible."""
        count = -(-(end - start) // self._method.block)
        ends = [start + (end - start) * i // count for i in range(1, count + 1)]
        for first, last in pairwise([start, *ends]):
            self.spans.append(EvokeSpan(first, last, source, hints, self._turn))

    def _take_answer(self, generated: Sequence[int]) -> None:
        """Append what is new of the answer, filling its last block first.

        The prompt's own last block, the answer's header, is filled too unless it carries hints:
        those are for what the request adds, not for the answer.
        """
        new = list(generated[self._answered :])
        self._answered = len(generated)
        tail = self.spans[-1] if self.spans else None
        start = len(self.tokens)
        self.tokens += new
        if tail is not None and self._is_soft(tail) and not tail.hints:
            grown = min(len(new), self._method.block - len(tail))
            tail.end += grown
            start += grown
        self._cut(start, len(self.tokens), Source.ASSISTANT, Hints())

    def _make_room(self, more: int) -> None:
        """Evict the lowest scores so that `more` rows fit; this turn's answer only if it must."""
        self._notice_losses()
        needed = self._cache.live + more
        if needed <= self.high:
            return
        fed = self._cache.fed
        free = [span for span in self.spans if self._may_leave(span, fed)]
        leaving = _first(self._ranked([s for s in free if not self._is_soft(s)]), needed - self.low)
        needed -= sum(map(len, leaving))
        if needed > self.high:
            leaving += _first([s for s in free if self._is_soft(s)], needed - self.high)
        self._evict(leaving)

    def _notice_losses(self) -> None:
        """Count every block as resident again if the engine had to compute the session anew."""
        losses = self._cache.losses
        if losses != self._losses:
            self._losses = losses
            self._store.drop(self._cache.name)
            for span in self.spans:
                span.resident = True

    def _evict(self, leaving: Sequence[EvokeSpan]) -> None:
        if not leaving:
            return
        for span in leaving:
            if self._method.recovery == "kv_restore":
                self._store.put(self._key(span), self._cache.save(span.start, span.end))
            self._embed(span)
            span.resident = False
        self._counts["evicted_blocks"] += len(leaving)
        self._cache.evict([(span.start, span.end) for span in leaving])

    def _bring_back(self, query: Vector) -> None:
        """Restore the blocks most like a query, up to the lower watermark.

        Without room below it, a block comes back only if blocks leave for it that are clearly less
        like the query; else junk would push out junk with every message, and what is needed.
        """
        gap = self.low - self._cache.live - self._unfed
        wanted = self._most_like(query, lambda span: self._key(span) in self._store)
        for span in wanted:
            if len(span) > gap:
                leaving = self._less_like(query, span, wanted, len(span) - gap)
                gap += sum(map(len, leaving))
                self._evict(leaving)
            if len(span) <= gap and self._restore(span):
                gap -= len(span)

    def _less_like(
        self, query: Vector, span: EvokeSpan, wanted: Sequence[EvokeSpan], excess: int
    ) -> list[EvokeSpan]:
        """Return the lowest-scored blocks that may leave for `span`; none if they are too few."""
        fed = self._cache.fed
        most = cosine(self._embed(span), query) - self._method.margin
        free = [
            other
            for other in self.spans
            if self._may_leave(other, fed)
            and not self._is_soft(other)
            and other not in wanted
            and cosine(self._embed(other), query) < most
        ]
        leaving = _first(self._ranked(free), excess)
        return leaving if sum(map(len, leaving)) >= excess else []

    def _restore(self, span: EvokeSpan) -> bool:
        block = self._store.take(self._key(span))
        if block is None:
            return False
        self._cache.restore(block)
        span.resident = True
        self._counts["recovered_blocks"] += 1
        return True

    def _most_like(self, query: Vector, eligible: Callable[[EvokeSpan], bool]) -> list[EvokeSpan]:
        away = [span for span in self.spans if not span.resident and eligible(span)]
        ranked = sorted(away, key=lambda span: -cosine(self._embed(span), query))
        return ranked[: self._method.topk]

    def _message_vector(self, tokens: Sequence[int], notes: TurnNotes) -> Vector | None:
        """Return the embedding of what the user says, or the task focus if the user is silent."""
        wanted: list[int] = []
        at = 0
        for size, source in notes.parts:
            if source is Source.USER:
                wanted += tokens[at : at + size]
            at += size
        return self._encoder(wanted, self._cache) if wanted else self._focus.vector

    def _embed(self, span: EvokeSpan) -> Vector:
        """Return a block's embedding, made anew if it has grown."""
        if span.vector is None or span.embedded != len(span):
            span.vector = self._encoder(self.tokens[span.start : span.end], self._cache)
            span.embedded = len(span)
        return span.vector

    def _may_leave(self, span: EvokeSpan, fed: int) -> bool:
        """Whether it is resident and not fixed; an engine may go on from the newest only."""
        newest = span.end == len(self.tokens)
        return span.resident and span.end <= fed and not newest and not self._is_fixed(span)

    def _is_fixed(self, span: EvokeSpan) -> bool:
        return span.resident and (span.hints.pinned or span.start < self._method.sinks)

    def _is_soft(self, span: EvokeSpan) -> bool:
        """Whether it leaves only if nothing else is left: this turn's answer."""
        return span.source is Source.ASSISTANT and span.turn == self._turn

    def _ranked(self, spans: Sequence[EvokeSpan]) -> list[EvokeSpan]:
        """Return blocks by ascending score, older first among equals."""
        if not spans:
            return []
        now, focus, method = len(self.tokens), self._focus.vector, self._method
        attention = None
        if method.w_attention:
            ranges = [(span.start, span.end) for span in spans]
            attention = np.array(self._cache.attention(ranges, method.chosen_layers, method.ewma))
        ages = np.array([now - span.end for span in spans], dtype=np.float64)
        cosines = [NO_COSINE if focus is None else cosine(self._embed(s), focus) for s in spans]
        priorities = np.array([span.hints.priority for span in spans])
        sources = [span.source for span in spans]
        scores = method.scorer.score(ages, np.array(cosines), attention, priorities, sources)
        return [spans[index] for index in np.argsort(scores, kind="stable")]


def _first(ranked: Sequence[EvokeSpan], excess: int) -> list[EvokeSpan]:
    """Return the first blocks that together have at least `excess` tokens, or all."""
    ends = accumulate(map(len, ranked), initial=0)
    return [span for span, before in zip(ranked, ends, strict=False) if before < excess]


def _by_user(notes: TurnNotes) -> bool:
    return any(source is Source.USER for _, source in notes.parts)
