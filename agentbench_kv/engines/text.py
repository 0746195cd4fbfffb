"""Engines at text level: they are given messages and answer with a message.

Somebody else's endpoint shows neither tokens nor cache. Such an engine declares `Capability.TEXT`,
runs only methods that leave the cache alone, and is asked by `gateway.text.TextGateway`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from agentbench_kv.engines.base import (
    Capability,
    Engine,
    Generation,
    KVStats,
    PhaseLabeller,
    Sampling,
)
from agentbench_kv.errors import UsageError
from agentbench_kv.methods.base import Phase

_NO_TOKENS = "this engine works on messages, not on tokens; ask it by /v1/chat/completions"


@dataclass(frozen=True)
class TextSampling:
    """How one message is sampled: fields of `engines.base.Sampling`, the last four of a request.

    Those are in the form of a chat request, for the endpoint to honour; None is not sent.
    """

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop: tuple[str, ...] = ()
    response_format: Mapping[str, Any] | None = None
    tool_choice: str | Mapping[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    top_logprobs: int | None = None


@dataclass(frozen=True)
class TextReply:
    """One answer and what it was billed, by the endpoint's own count of tokens."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)  # in OpenAI form, not checked
    finish_reason: str = "stop"  # or `length`, `context_limit`, `cancelled`
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    cost: float | None = None  # at the prices the user gave
    thinking_tokens: int = 0  # of the output, as the endpoint counts them
    logprobs: list[dict[str, Any]] | None = None  # as in a chat response, not checked


class TextRequest(ABC):
    """A request under way."""

    @abstractmethod
    def result(self) -> TextReply:
        """Wait for the answer; after `cancel` an empty one with the reason `cancelled`.

        Raises EndpointError if there is no usable answer, however often it was asked for,
        ContextLimitError if the messages pass the model's context, and PrerequisiteError if
        nothing will be answered any more: a wrong key, a dead endpoint, money spent.
        """

    @abstractmethod
    def cancel(self) -> None:
        """Give the request up; from any thread, harmless when it has ended."""


class TextEngine(Engine):
    """An engine that is asked in messages. Its accounts are kept by the gateway."""

    capabilities: ClassVar[frozenset[Capability]] = frozenset({Capability.TEXT})

    @abstractmethod
    def ask(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        sampling: TextSampling,
    ) -> TextRequest:
        """Send the whole history; return at once."""

    def provenance(self) -> dict[str, Any]:
        """Return what belongs in a run's record: where, at which prices; never a key."""
        return {}

    def open(self, session: str, labeller: PhaseLabeller) -> None:  # noqa: ARG002
        return None

    def extend(self, session: str, tokens: Sequence[int], phases: Sequence[Phase]) -> None:  # noqa: ARG002
        raise UsageError(_NO_TOKENS)

    def generate(self, session: str, sampling: Sampling) -> Generation:  # noqa: ARG002
        raise UsageError(_NO_TOKENS)

    def stats(self, session: str) -> KVStats:  # noqa: ARG002
        return KVStats()

    def close(self, session: str) -> KVStats:  # noqa: ARG002
        return KVStats()
