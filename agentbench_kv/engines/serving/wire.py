"""How a serving engine is spoken to: what differs between them, behind one interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentbench_kv.engines.base import Sampling
from agentbench_kv.engines.serving.process import Launch
from agentbench_kv.methods.base import Method
from agentbench_kv.phases.decoding import StopMatcher


@dataclass(frozen=True)
class Request:
    """One generation."""

    session: str  # the backend's name of the session
    recipe: str  # how the backend labels its tokens
    tokens: Sequence[int]  # all tokens of the session
    known: int  # how many of them the backend was given, or gave, before
    sampling: Sampling
    max_tokens: int  # what is left of `sampling.max_tokens`, which a restart may have interrupted
    # The wire puts `cached_tokens` here, where a stock engine says how many it had cached.
    usage: dict[str, int] = field(default_factory=dict)


class Wire(ABC):
    """The part of a serving engine that knows its command line and its HTTP surface."""

    # The engine as shipped, without our plug-in: nobody answers on the control channel.
    stock: bool = False

    @abstractmethod
    def launch(self) -> Launch:
        """Return how to start the backend."""

    @abstractmethod
    def stream(self, request: Request) -> Generator[int]:
        """Yield a generation's ids; closing the iterator ends it in the backend."""

    @abstractmethod
    def use(self, method: Method) -> None:
        """Start backends with another method from now on."""

    def opened(self, session: str) -> None:  # noqa: ARG002
        """Prepare for a session that is new to the backend."""
        return None

    def details(self) -> dict[str, str]:
        """Return what a run's record says of the backend: version, set-up, flags."""
        return {"setup": "as shipped" if self.stock else "plug-in"}

    def close(self) -> None:
        """Hang up."""
        return None

    @property
    @abstractmethod
    def control(self) -> Path:
        """The control channel's socket."""


def stop_document(sampling: Sampling) -> dict[str, Any] | None:
    """Return the texts that end a generation, for the backend to match; None without any.

    A stop the backend sees itself costs no token too many: what follows it never reaches the cache.
    """
    stop = sampling.stop
    return stop.document() if isinstance(stop, StopMatcher) else None
