"""EVOKE in one session: what is a block, which leave, which come back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np

from agentbench_kv.errors import UsageError
from agentbench_kv.methods.evoke_encoders import Encoder, Vector
from agentbench_kv.methods.evoke_scorer import NO_COSINE, Focus, cosine
from agentbench_kv.methods.evoke_store import HostStore
from agentbench_kv.methods.spans import Hints, Source, SpanCache, SpanRange, SpanSession, TurnNotes

if TYPE_CHECKING:
    from agentbench_kv.methods.evoke import Evoke


@dataclass(eq=False)
class Span:
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
        self.spans: list[Span] = []
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
        """Tokens in the cache after an eviction, at the most."""
        return int(self._method.low * self._method.budget_at(len(self.tokens)))

    @property
    def high(self) -> int:
        """Tokens in the cache above which blocks leave."""
        return int(self._method.high * self._method.budget_at(len(self.tokens)))

    def check(self, tokens: Sequence[int], notes: TurnNotes) -> None:
        """Refuse pins that would leave the newest block no room."""
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
        """Return the evicted blocks to mention, in the order they were said."""
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
        """Make room for the new message, then bring back the blocks most like it."""
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
        """Return counts of blocks over the session and the bytes the host store holds."""
        away = [span for span in self.spans if not span.resident]
        held = sum(self._key(span) in self._store for span in away)
        return {**self._counts, "blocks": len(self.spans), "away": len(away), "held": held}

    def close(self) -> None:
        self._store.drop(self._cache.name)

    @property
    def _unfed(self) -> int:
        """Tokens whose rows the next forward passes will add."""
        return len(self.tokens) - self._cache.fed

    def _key(self, span: Span) -> tuple[str, int]:
        return self._cache.name, span.start

    def _cut(self, start: int, end: int, source: Source, hints: Hints) -> None:
        """Cut a message into as few blocks as possible, as equal as possible."""
        count = -(-(end - start) // self._method.block)
        ends = [start + (end - start) * i // count for i in range(1, count + 1)]
        for first, last in pairwise([start, *ends]):
            self.spans.append(Span(first, last, source, hints, self._turn))

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

    def _evict(self, leaving: Sequence[Span]) -> None:
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
        self, query: Vector, span: Span, wanted: Sequence[Span], excess: int
    ) -> list[Span]:
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

    def _restore(self, span: Span) -> bool:
        block = self._store.take(self._key(span))
        if block is None:
            return False
        self._cache.restore(block)
        span.resident = True
        self._counts["recovered_blocks"] += 1
        return True

    def _most_like(self, query: Vector, eligible: Callable[[Span], bool]) -> list[Span]:
        """Return the `topk` evicted blocks whose embeddings are most like a query."""
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
        if wanted:
            return self._encoder(wanted, self._cache)
        return self._focus.vector

    def _embed(self, span: Span) -> Vector:
        """Return a block's embedding, made anew if it has grown."""
        if span.vector is None or span.embedded != len(span):
            span.vector = self._encoder(self.tokens[span.start : span.end], self._cache)
            span.embedded = len(span)
        return span.vector

    def _may_leave(self, span: Span, fed: int) -> bool:
        """Whether all its rows are in the cache and nothing forbids to evict them.

        The newest token's block stays: an engine may go on from resident positions only.
        """
        newest = span.end == len(self.tokens)
        return span.resident and span.end <= fed and not newest and not self._is_fixed(span)

    def _is_fixed(self, span: Span) -> bool:
        return span.resident and (span.hints.pinned or span.start < self._method.sinks)

    def _is_soft(self, span: Span) -> bool:
        """Whether it leaves only if nothing else is left: this turn's answer."""
        return span.source is Source.ASSISTANT and span.turn == self._turn

    def _ranked(self, spans: Sequence[Span]) -> list[Span]:
        """Return blocks by ascending score, older first among equals."""
        if not spans:
            return []
        now, focus, method = len(self.tokens), self._focus.vector, self._method
        attention = None
        if method.w_attention:
            ranges = [(span.start, span.end) for span in spans]
            found = self._cache.attention(ranges, method.chosen_layers, method.ewma)
            attention = np.array(found)
        ages = np.array([now - span.end for span in spans], dtype=np.float64)
        cosines = [NO_COSINE if focus is None else cosine(self._embed(s), focus) for s in spans]
        priorities = np.array([span.hints.priority for span in spans])
        sources = [span.source for span in spans]
        scores = method.scorer.score(ages, np.array(cosines), attention, priorities, sources)
        return [spans[index] for index in np.argsort(scores, kind="stable")]


def _first(ranked: Sequence[Span], excess: int) -> list[Span]:
    """Return the first blocks that together have at least `excess` tokens, or all."""
    ends = accumulate(map(len, ranked), initial=0)
    return [span for span, before in zip(ranked, ends, strict=False) if before < excess]


def _by_user(notes: TurnNotes) -> bool:
    return any(source is Source.USER for _, source in notes.parts)
