"""How a serving engine is spoken to: what differs between them, behind one interface."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx

from agentbench_kv.engines.base import Sampling
from agentbench_kv.engines.options import EngineOptions
from agentbench_kv.engines.serving.backend.parent import ALLOW_UNTESTED
from agentbench_kv.engines.serving.backend.policy import VARIABLE, Policy
from agentbench_kv.engines.serving.links import link_packages
from agentbench_kv.engines.serving.model import ModelFacts
from agentbench_kv.engines.serving.process import Launch
from agentbench_kv.methods.base import Method
from agentbench_kv.phases.decoding import StopMatcher

LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=32)


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
        """Yield a generation's ids; closing the iterator ends it in the backend.

        Raises OSError or httpx.TransportError if the backend is gone.
        """

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
        """Close the connections."""
        return None

    @property
    @abstractmethod
    def control(self) -> Path:
        """The control channel's socket."""


@dataclass(frozen=True)
class ServerSetup:
    """What a server is started from."""

    options: EngineOptions
    facts: ModelFacts
    python: Path  # the environment's interpreter
    model: Path
    folder: Path  # private, for sockets and files
    gpu: bool
    stock: bool  # as shipped, without our plug-in


class PluginWire(Wire):
    """A server of another project that loads our plug-in, or runs as shipped.

    Its HTTP surface is locked with a key of its own.
    """

    def __init__(self, setup: ServerSetup, transport: httpx.BaseTransport | None = None) -> None:
        self.stock = setup.stock
        self._setup = setup
        self._options = setup.options
        self._key = secrets.token_hex(16)
        headers = {"Authorization": f"Bearer {self._key}"}
        self._client = httpx.Client(
            headers=headers, limits=LIMITS, timeout=10.0, transport=transport
        )

    @property
    def control(self) -> Path:
        """The control channel's socket; nobody listens on it in a stock server."""
        return self._setup.folder / "control"

    @property
    def context_limit(self) -> int:
        """Last position + 1."""
        return self._setup.facts.context_limit

    def use(self, method: Method) -> None:
        self._options = replace(self._options, method=method)

    def close(self) -> None:
        self._client.close()

    def _environment(self, group: str, plugins: Mapping[str, str]) -> dict[str, str]:
        """Return what any server needs: our package with its entry points, and the policy."""
        options, folder = self._options, self._setup.folder
        groups = {group: plugins} if plugins else {}
        links = link_packages(folder / "path", [type(options.method).__module__], groups)
        environment = {
            "PYTHONPATH": str(links),
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
        }
        if not self.stock:
            policy = Policy(options.method, self._setup.model, self.control, options.trace)
            environment[VARIABLE] = str(policy.save(folder))
        if options.allow_untested:
            environment[ALLOW_UNTESTED] = "1"
        return environment


def as_flags(arguments: Mapping[str, str | None]) -> list[str]:
    """Return options as words of a command line; without a value they are switches."""
    words = []
    for name, value in arguments.items():
        words += [f"--{name}", value] if value else [f"--{name}"]
    return words


def stop_document(sampling: Sampling) -> dict[str, Any] | None:
    """Return the texts that end a generation, for the backend to match; None without any.

    A stop the backend sees itself costs no token too many: what follows it never reaches the cache.
    """
    stop = sampling.stop
    return stop.document() if isinstance(stop, StopMatcher) else None
