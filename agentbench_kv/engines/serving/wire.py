"""What differs between serving engines: how one is started and spoken to over HTTP."""

from __future__ import annotations

import os
import re
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import httpx

from agentbench_kv.accounting import LayerReach
from agentbench_kv.engines.base import EngineOptions, Sampling
from agentbench_kv.engines.core.grammar import holds_grammars
from agentbench_kv.engines.core.host import ALLOW_UNTESTED
from agentbench_kv.engines.core.policy import VARIABLE, BackendPolicy
from agentbench_kv.engines.serving.model_facts import ModelFacts
from agentbench_kv.engines.serving.process import ControlClient, Launch, link_packages, listens
from agentbench_kv.engines.serving.transport import LIMITS, RequestFailedError
from agentbench_kv.environments import process_env, version_there
from agentbench_kv.errors import KVBenchError, UsageError
from agentbench_kv.methods.base import Method
from agentbench_kv.phases.machine import PromptPhases
from agentbench_kv.phases.tokens import StopMatcher

# llguidance before it fails in a server's own loop where a grammar leads nowhere.
GRAMMARS_SINCE = (1, 7)
_ANSWER_S = 60.0  # from a plug-in in a server that is starting
_EMPTY_S, _EMPTY_POLL_S = 5.0, 0.1  # for a server to let go of what the last request held


@dataclass(frozen=True)
class GenerationRequest:
    """One generation."""

    session: str  # the backend's name of the session
    prompt: PromptPhases  # of all `tokens`
    tokens: Sequence[int]  # all tokens of the session
    known: int  # how many of them the backend was given, or gave, before
    sampling: Sampling
    max_tokens: int  # what is left of `sampling.max_tokens`, which a restart may have interrupted
    # A wire that can end a generation before its next token says here how.
    on_cancel: Callable[[Callable[[], None]], None]
    given: Sequence[int] = ()  # tokens to be taken as drawn
    best: list[int] | None = None  # where the wire puts the model's own best in each one's place
    # The wire puts `cached_tokens` here, where a stock engine says how many it had cached.
    usage: dict[str, int] = field(default_factory=dict)


@dataclass(eq=False)
class EngineWire(ABC):
    """How a server is started and spoken to over HTTP, locked with a key of its own."""

    full_as_shipped: ClassVar[bool] = True  # whether `full` runs without a plug-in
    # What decides on a CPU how many threads compute, and how they wait for one another.
    threads: ClassVar[tuple[str, ...]] = ("OMP_NUM_THREADS", "GOMP_SPINCOUNT", "OMP_WAIT_POLICY")

    options: EngineOptions
    facts: ModelFacts
    python: Path  # the environment's interpreter
    model: Path
    folder: Path  # private, for sockets and files
    gpu: bool
    stock: bool  # as shipped, without our plug-in: nobody answers on the control channel

    def __post_init__(self) -> None:
        self._key = secrets.token_hex(16)
        key = {"Authorization": f"Bearer {self._key}"}
        self._client = httpx.Client(
            headers=key, limits=LIMITS, timeout=10.0, transport=self._transport()
        )

    def _transport(self) -> httpx.BaseTransport | None:
        """Return how the server is reached, if not by a port."""
        return None

    @property
    def control(self) -> Path:
        return self.folder / "control"

    @property
    def context_limit(self) -> int:
        """Last position + 1."""
        return self.facts.context_limit

    @cached_property
    def holds_grammars(self) -> bool:
        """Whether its environment, and the model's tokenizer, have what grammars need."""
        found = re.match(r"(\d+)\.(\d+)", version_there(self.python, "llguidance"))
        if found is None or (int(found[1]), int(found[2])) < GRAMMARS_SINCE:
            return False
        return holds_grammars(self.model / "tokenizer.json", self.facts.eos_token_ids)

    @abstractmethod
    def launch(self) -> Launch:
        """Return how to start the backend."""

    @abstractmethod
    def stream(self, request: GenerationRequest) -> Generator[int]:
        """Yield a generation's ids; closing the iterator ends it in the backend.

        Raises OSError or httpx.TransportError if the connection breaks, RequestError if the backend
        says that it failed.
        """

    def stream_given(self, request: GenerationRequest) -> Generator[int]:
        """Have a server as shipped read given tokens as a prompt, and yield them.

        Where the model's own best are wanted, every token is asked for anew, behind those before
        it: its prefix cache has them.
        """
        given = list(request.given)
        places = range(len(given)) if request.best is not None else [len(given) - 1]
        for place in places:
            ask = replace(
                request,
                tokens=[*request.tokens, *given[:place]],
                given=(),
                best=None,
                max_tokens=1,
                usage=request.usage if place == places[0] else {},
            )
            with closing(self.stream(ask)) as stream:
                drawn = next(stream, None)
            if drawn is None:
                raise RequestFailedError("the backend drew no token")
            if request.best is not None:
                request.best.append(drawn)
                yield given[place]
        if request.best is None:
            yield from given

    def empty_cache(self) -> None:
        """Empty a stock server's prefix cache, between requests; KVBenchError if it keeps it."""
        raise KVBenchError("nothing empties this server's prefix cache")

    def _empty(self, path: str) -> None:
        """Ask for that; what the last request held may be let go of a moment later."""
        end = time.monotonic() + _EMPTY_S
        while True:
            try:
                answer = self._client.post(path)
            except httpx.TransportError as error:
                raise ConnectionError(f"the backend does not answer: {error}") from error
            said = answer.text.strip()
            if answer.status_code == httpx.codes.OK and '"success":false' not in said:
                return
            if time.monotonic() >= end:
                raise KVBenchError(f"it was kept ({answer.status_code}: {said})")
            time.sleep(_EMPTY_POLL_S)

    def lost(self) -> bool:
        """Return whether a backend that was ready says, or shows, that it will not answer again.

        Its front end may outlive what computes. One that is only busy is not lost.
        """
        return not self.stock and not listens(self.control)

    def use(self, method: Method) -> None:
        self.options = replace(self.options, method=method)

    def _up(self, path: str) -> bool:
        try:
            return self._client.get(path).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    def _down(self, path: str) -> bool:
        """Return whether nobody takes a request, or the answer is that the server failed."""
        try:
            return self._client.get(path).status_code >= httpx.codes.INTERNAL_SERVER_ERROR
        except httpx.ConnectError:
            return True
        except httpx.TransportError:
            return False

    def _answers(self) -> bool:
        """Return whether our plug-in answers."""
        with closing(ControlClient(self.control, _ANSWER_S)) as control:
            return control.answers()

    def opened(self, session: str) -> None:  # noqa: ARG002
        """Prepare for a session that is new to the backend."""
        return None

    def details(self) -> dict[str, str]:
        """Return what a run's record says of the backend: version, set-up, flags."""
        set_up = {"setup": "as shipped" if self.stock else "plug-in"} | self._threads()
        facts = self.facts
        windowed = facts.layers - facts.full_layers
        return set_up | LayerReach(facts.full_layers, windowed, facts.window).document()

    def told(self, log: str) -> dict[str, str]:  # noqa: ARG002
        """Return what the backend's log, up to where it answers, says that nothing else does."""
        return {}

    def _threads(self) -> dict[str, str]:
        """Return what the user has said of threads, which changes every figure of speed."""
        said = "" if self.gpu else process_env.said(self.threads, os.environ)
        return {"environment": said} if said else {}

    def stock_tokens(self) -> int | None:
        """Return the cached tokens whose places a server as shipped says are taken; None if not."""
        return None

    def close(self) -> None:
        self._client.close()

    def _environment(self, group: str, plugins: Mapping[str, str]) -> dict[str, str]:
        """Return what any server needs: our package with its entry points, and the policy."""
        options, folder = self.options, self.folder
        groups = {group: plugins} if plugins else {}
        links = link_packages(folder / "path", [type(options.method).__module__], groups)
        environment = {"PYTHONPATH": str(links), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        if not self.stock:
            policy = BackendPolicy(options.method, self.model, self.control, options.trace)
            environment[VARIABLE] = str(policy.save(folder))
        if options.allow_untested:
            environment[ALLOW_UNTESTED] = "1"
        return environment


def asked_context(options: EngineOptions, argument: str) -> int | None:
    """Read the context that an engine's own argument asks for; UsageError if it is no number."""
    text = options.engine_args.get(argument)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and int(text)):
        raise UsageError(f"--engine-arg {argument}={text}: expected a number of tokens above 0")
    return int(text)


def as_flags(arguments: Mapping[str, str | None]) -> list[str]:
    """Return options as words of a command line; without a value they are switches."""
    words = []
    for name, value in arguments.items():
        words += [f"--{name}", value] if value else [f"--{name}"]
    return words


def stop_document(sampling: Sampling) -> dict[str, Any] | None:
    """Return the stop texts for the backend to match, so that nothing behind them is cached."""
    stop = sampling.stop
    return stop.document() if isinstance(stop, StopMatcher) else None
