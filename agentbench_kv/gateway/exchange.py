"""One request of a session: what it wants, how it is ended early, what it gets."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from agentbench_kv.errors import UsageError
from agentbench_kv.gateway.grammar import JsonFormat, ToolChoice
from agentbench_kv.gateway.parsing import Delta, Logprob
from agentbench_kv.gateway.reports import SessionReport, TurnInfo, kvbench_usage
from agentbench_kv.methods.spans import Hints


class Cancellable(Protocol):
    """What can be ended from another thread: a generation, a request."""

    def cancel(self) -> None:
        """End it soon; harmless when it has ended."""


class Cancellation:
    """Lets another thread end a request; safe before, during and after its generation."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._generation: Cancellable | None = None
        self._asked = False

    def cancel(self) -> None:
        """End the generation after the token in flight."""
        with self._lock:
            self._asked = True
            generation = self._generation
        if generation is not None:
            generation.cancel()

    def attach(self, generation: Cancellable) -> None:
        """Name the generation that `cancel` ends."""
        with self._lock:
            self._generation = generation
            asked = self._asked
        if asked:
            generation.cancel()


@dataclass(frozen=True)
class Options:
    """How one request wants its tokens picked."""

    max_tokens: int | None = None  # None takes the gateway's default
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0  # of the session; every turn draws from a stream of its own
    stop: tuple[str, ...] = ()  # strings that end the text; they are cut off
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    answer: JsonFormat | None = None  # None: free text
    logprobs: int | None = None  # how many of the likeliest tokens to report with each; None: no
    hints: Hints = field(default_factory=Hints)  # for methods that manage whole spans
    ignore_eos: bool = False  # the model's turn end does not end the generation: fixed length

    def __post_init__(self) -> None:
        """Refuse what no engine can do."""
        if self.max_tokens is not None and self.max_tokens < 1:
            raise UsageError(f"max_tokens must be at least 1, not {self.max_tokens}")
        if not 0.0 <= self.temperature <= 100.0:
            raise UsageError(f"temperature must be between 0 and 100, not {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise UsageError(f"top_p must be above 0 and at most 1, not {self.top_p}")
        if self.top_k < 0:
            raise UsageError(f"top_k must be at least 0, not {self.top_k}")
        if not all(self.stop):
            raise UsageError("a stop string must not be empty")
        if not 0.0 < self.hints.priority < float("inf"):
            raise UsageError(f"a priority must be above 0, not {self.hints.priority}")


@dataclass(frozen=True)
class ChatResult:
    """One answered request; `turn` and `report` are the figures of the turn and of its session."""

    content: str  # visible text, markers removed
    reasoning: str  # think block, markers removed
    tool_calls: list[dict[str, Any]]  # OpenAI form, arguments as JSON text
    finish_reason: str  # stop, tool_calls, length, context_limit or cancelled
    unparsable: bool  # a tool-call marker was not followed by a call; the text is in `content`
    raw: str  # as generated, markers included, turn end and stop string removed
    token_ids: list[int]  # all generated ids
    turn: TurnInfo
    report: SessionReport
    thinking_tokens: int = 0  # of the generated ids
    logprobs: list[Logprob] | None = None  # per generated token but the turn end; None: not asked

    @property
    def message(self) -> dict[str, Any]:
        """The assistant message in OpenAI form."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = self.tool_calls
        return message

    @property
    def usage(self) -> dict[str, Any]:
        """The `usage` object of a response."""
        turn = self.turn
        return {
            "prompt_tokens": turn.prompt_tokens,
            "completion_tokens": turn.output_tokens,
            "total_tokens": turn.prompt_tokens + turn.output_tokens,
            "prompt_tokens_details": {"cached_tokens": turn.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.thinking_tokens},
            "kvbench": kvbench_usage(self.report, turn),
        }


Item = Delta | ChatResult
Answer = Iterator[Item]
