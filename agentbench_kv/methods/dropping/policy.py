"""What a drop policy sees and says, and the base of the methods that have one.

A policy names messages of a session, or parts of them, that are dropped before the next request is
answered. It knows what each message is and how long, never its text. How a drop is carried out
(`exec`) is the gateway's part, so that decision and execution are measured apart:

- `text`: the prompt is written anew without what was dropped, and read again from the first change
- `span`: the rows of the dropped tokens leave the cache, positions stay
- `span+move`: they leave, and the rows behind turn to the positions of the shortened text
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

from agentbench_kv.errors import UsageError
from agentbench_kv.methods.base import LayerView, Method, Queries, Selection
from agentbench_kv.methods.full import Full
from agentbench_kv.methods.spans import Resident
from agentbench_kv.params import param

EXECUTIONS = ("text", "span", "span+move")
CONTEXT_SHARE = 0.9  # of the model's context, where `trigger=context`


class Role(StrEnum):
    """Who wrote a message."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class What(StrEnum):
    """Which part of a message is dropped."""

    MESSAGE = "message"  # all of it
    RESULT = "result"  # what a tool returned; that it did stays
    INPUTS = "inputs"  # the arguments of the calls in it
    THOUGHTS = "thoughts"


@dataclass(frozen=True, order=True)
class Drop:
    """A part of a message, by its number in the client's history."""

    message: int
    what: What


@dataclass(frozen=True)
class Part:
    """A message of a session as a policy sees it. Token counts are of its text alone."""

    role: Role
    tokens: int  # content and calls
    thoughts: int = 0
    inputs: int = 0  # of `tokens`, those of the calls
    tools: tuple[str, ...] = ()  # tools it calls, or the one whose result it is
    dropped: frozenset[What] = frozenset()
    fixed: bool = False  # nothing of it can be dropped: the model has not read it yet
    placeholder: int = 0  # tokens that would stand for its result: a shorter one stays
    expired: bool = False  # nothing to come refers to this result; told to policies that foresee

    @property
    def clearable(self) -> bool:
        """Whether it is a result worth dropping, read or not."""
        gone = not self.dropped.isdisjoint({What.RESULT, What.MESSAGE})
        return self.role is Role.TOOL and self.tokens > self.placeholder and not gone

    def may_go(self, what: What) -> bool:
        """Return whether dropping this part changes anything: a whole message may be empty."""
        if what is What.MESSAGE:
            return not self.fixed and What.MESSAGE not in self.dropped
        return self.left(what) > 0

    def left(self, what: What) -> int:
        """Return the tokens that dropping this part would save."""
        if self.fixed or what in self.dropped or What.MESSAGE in self.dropped:
            return 0
        sizes = {
            What.MESSAGE: self.tokens + self.thoughts,
            What.RESULT: self.tokens if self.clearable else 0,
            What.INPUTS: self.inputs,
            What.THOUGHTS: self.thoughts,
        }
        return sizes[what]


@dataclass(frozen=True)
class History:
    """A session before a request is answered."""

    parts: Sequence[Part]  # of the client's whole history, in order
    tokens: int  # that the cache would hold with this request read
    context: int  # the model's
    logical: int = 0  # that it would hold with nothing dropped; 0: as many
    key: str = ""  # names the request: equal for equal sessions, for decisions drawn by lot


@dataclass(frozen=True, kw_only=True)
class DropMethod(Method):
    """Base of methods that drop messages. Subclasses are frozen keyword-only dataclasses."""

    messages: ClassVar[bool] = True
    asks: ClassVar[bool] = False  # the model, what leaves or what takes its place
    spans: ClassVar[bool] = True

    # Fields of the base that mean nothing here: no `param`, so `--set` does not take them.
    interval: int = 128
    kept_set: str = "shared"
    sinks: int = 0
    keep_recent: int = 0
    protect: str = "none"
    prefix: str = "own"
    chunk: int = 1
    positions: str = "logical"
    summary_tokens: int = (
        0  # most of a summary that takes the place of what leaves; 0: nothing does
    )

    exec: str = param("text", "how what is dropped leaves", choices=EXECUTIONS)
    trigger: str = param(
        "budget",
        "tokens above which something is dropped: the budget, nine tenths of the context, or "
        "so many",
        choices=("budget", "context"),
        counts=True,
    )

    @property
    def takes_budget(self) -> bool:
        return self.trigger == "budget"

    @property
    def needs(self) -> frozenset[str]:
        return frozenset() if self.exec == "text" else frozenset({"evict_spans"})

    def below(self) -> Method:
        """Return the method that the engine itself runs."""
        if self.exec == "text":
            return Full()
        return Resident(positions="cache" if self.exec == "span+move" else "logical")

    def validate(self) -> None:
        if not self.takes_budget:
            return
        if self.budget is None and self.share is None:
            raise UsageError(f"{self.name} needs a budget: add --budget TOKENS")
        if self.budget is not None and self.budget < 1:
            raise UsageError(f"budget {self.budget}: expected a number of tokens >= 1")

    def limit(self, history: History) -> int:
        """Return the tokens above which something is dropped."""
        if self.trigger == "budget":
            return self.budget_at(history.logical or history.tokens)
        if self.trigger == "context":
            return int(CONTEXT_SHARE * history.context)
        return int(self.trigger)

    def due(self, history: History) -> bool:
        return history.tokens > self.limit(history)

    @abstractmethod
    def decide(self, history: History) -> frozenset[Drop]:
        """Return what leaves before the request is answered; nothing while it is not `due`.

        What has left already, and what is fixed, may be named and does nothing.
        """

    def select(
        self,
        layers: Sequence[LayerView],
        queries: Sequence[Queries],
        now: int,
        prompt: int = 0,
        phases: Any = None,
        system: int = 0,
    ) -> Selection:
        del layers, queries, now, prompt, phases, system
        raise UsageError(f"method {self.label!r} drops whole messages, not cache rows")


def saved(history: History, drops: Iterable[Drop]) -> int:
    """Return the tokens that leave with these drops, each counted once."""
    whole = {drop.message for drop in drops if drop.what is What.MESSAGE}
    counted = {d for d in drops if d.what is What.MESSAGE or d.message not in whole}
    return sum(history.parts[drop.message].left(drop.what) for drop in counted)
