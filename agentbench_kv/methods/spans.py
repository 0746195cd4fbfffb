"""The base of span-level methods, and what they and engines say to each other.

A token-level method ranks rows inside an engine (`methods.base`). A span-level one is outside:
between two generations it decides which logical spans to evict, save and restore, for all layers
and heads alike. It sees token ids, who wrote them, embeddings and attention; never text.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentbench_kv.errors import UsageError
from agentbench_kv.methods.base import LayerView, Method, Queries, QueryKind, QueryPlan, Selection

SpanRange = tuple[int, int]  # logical positions `[start, end)` of a session


class Source(StrEnum):
    """Who wrote a span: tool results and system prompts are documents."""

    DOCUMENT = "document"
    USER = "user"
    ASSISTANT = "assistant"


@dataclass(frozen=True)
class Block:
    """Saved rows of a span, over all layers and heads."""

    start: int  # logical positions of the session it was saved from
    end: int
    at: int  # RoPE position of its first token when it was saved
    # Keys and values [bytes] in the engine's own layout; only the engine that saved it reads it.
    data: NDArray[np.uint8] = field(repr=False)

    @property
    def tokens(self) -> int:
        return self.end - self.start

    @property
    def nbytes(self) -> int:
        return int(self.data.nbytes)


@dataclass(frozen=True)
class Hints:
    """What a client says about one request; true if it says anything."""

    priority: float = 1.0  # multiplies the scores of what the request adds
    pinned: bool = False  # what the request adds never leaves the cache
    task_boundary: bool = False  # a new task begins: what the last one was about no longer counts

    def __bool__(self) -> bool:
        return self != Hints()


@dataclass(frozen=True)
class TurnNotes:
    """What the gateway knows about prompt tokens that are about to be added."""

    # Tokens of each message and who wrote it, in order; together all new tokens.
    parts: Sequence[tuple[int, Source]]
    hints: Hints = Hints()
    # Of a session's first tokens, those of the system message with its tools.
    system: int = 0


class SpanCache(Protocol):
    """One session's cache as a span-level method may use it; positions are logical."""

    @property
    def name(self) -> str:
        """Name of the session, unique while it is open."""

    @property
    def live(self) -> int:
        """Tokens in the cache."""

    @property
    def fed(self) -> int:
        """Tokens that were ever in the cache; those added later have no rows yet."""

    @property
    def losses(self) -> int:
        """How often the engine lost the rows and computed all of them again."""

    def save(self, start: int, end: int) -> Block:
        """Copy a span's rows to the host; the span must be in the cache as a whole."""

    def evict(self, spans: Sequence[SpanRange]) -> int:
        """Remove spans; return the tokens removed."""

    def restore(self, block: Block) -> None:
        """Put a saved block back without a forward pass."""

    def attention(
        self, spans: Sequence[SpanRange], layers: Sequence[int], decay: float
    ) -> list[float]:
        """Return the attention each span gets from the kept queries, newest weighing most."""

    def embed(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Return the model's input embeddings [tokens, hidden], less their mean over all ids."""

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of ids, for encoders that read text and hand back a vector."""


class SpanSession(ABC):
    """What a span-level method does to one session.

    A turn is `check` and `admit`, then `before_prefill`, then decoding, with `at_watermark`
    whenever the `room` is used up, then `after_turn`. The cache changes only inside
    `before_prefill`, `at_watermark` and `after_turn`.
    """

    @abstractmethod
    def check(self, tokens: Sequence[int], notes: TurnNotes) -> None:
        """Refuse prompt tokens that cannot be taken as hinted, with a UsageError."""

    @abstractmethod
    def recalls(self, tokens: Sequence[int], notes: TurnNotes) -> list[SpanRange]:
        """Return the evicted spans of which prompt tokens should bring a reminder in words.

        Asked before the reminders are written into the prompt, so before `check` and `admit`.
        """

    @abstractmethod
    def admit(self, tokens: Sequence[int], notes: TurnNotes) -> None:
        """Record prompt tokens added behind the last one; they are not in the cache yet."""

    @abstractmethod
    def before_prefill(self) -> None:
        """Bring back what the new message needs and make room for it."""

    @abstractmethod
    def room(self) -> int:
        """Return how many tokens may be decoded before `at_watermark`, at least 1."""

    @abstractmethod
    def at_watermark(self, generated: Sequence[int]) -> None:
        """Make room while the answer, `generated` so far, is being decoded."""

    @abstractmethod
    def after_turn(self, generated: Sequence[int]) -> None:
        """Take in the whole answer and bring the cache within the budget."""

    @abstractmethod
    def figures(self) -> dict[str, int]:
        """Return what the method counts of the session, for `usage.kvbench`."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything kept for the session."""


class SpanSessions(Protocol):
    """All sessions of one engine under a span-level method, and what they share."""

    def open(self, cache: SpanCache) -> SpanSession:
        """Return what manages a new session."""

    def close(self) -> None:
        """Let go of what the sessions share, such as a host store."""


def within(labels: Tensor, spans: Sequence[SpanRange]) -> Tensor:
    """Return which logical positions lie in any of the spans, bool."""
    inside = torch.zeros_like(labels, dtype=torch.bool)
    for start, end in spans:
        inside |= (labels >= start) & (labels < end)
    return inside


def check_whole_tokens(method: Method) -> None:
    """Refuse spans under a method whose heads keep different tokens."""
    if method.compresses:
        raise UsageError(
            f"method {method.label!r} keeps other tokens in every head; spans can be evicted "
            "or saved under methods that keep whole tokens only"
        )


@dataclass(frozen=True, kw_only=True)
class Resident(Method):
    """What an engine runs below a span-level method: it keeps all rows until it is told."""

    name: ClassVar[str] = "resident"
    compresses: ClassVar[bool] = False

    recent_queries: int = 0

    def query_plan(self) -> QueryPlan:
        if not self.recent_queries:
            return QueryPlan()
        return QueryPlan(QueryKind.RECENT, self.recent_queries)


@dataclass(frozen=True, kw_only=True)
class SpanMethod(Method):
    """Base of span-level methods. Subclasses are frozen keyword-only dataclasses."""

    spans: ClassVar[bool] = True

    # Fields of the base that mean nothing here: no `param`, so `--set` does not take them.
    interval: int = 128
    trigger: str = "turn"
    kept_set: str = "shared"
    keep_recent: int = 0
    protect: str = "none"
    prefix: str = "own"
    chunk: int = 1

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"evict_spans"})

    def below(self) -> Method:
        """Return the method that the engine itself runs."""
        return Resident()

    def sessions(self) -> SpanSessions:
        """Return what opens the sessions of one engine."""
        raise NotImplementedError(f"{type(self).__name__} does not implement sessions")

    def select(
        self,
        layers: Sequence[LayerView],
        queries: Sequence[Queries],
        now: int,
        prompt: int = 0,
        phases: Tensor | None = None,
        system: int = 0,
    ) -> Selection:
        del layers, queries, now, prompt, phases, system
        raise UsageError(f"method {self.label!r} works on spans of a session, not on cache rows")
