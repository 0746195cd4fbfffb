"""The task contract: samples, an episode loop, and the benchmark's own checker.

A task talks to an agent through `AgentClient` in messages or text; it never sees tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, ClassVar, Literal, Protocol, Self, runtime_checkable

from agentbench_kv.params import ParamSpec, param_specs, parse_settings
from agentbench_kv.results.records import Metric, TrialStatus

Message = dict[str, Any]
ScriptedAgent = Literal["gold", "corrupt", "null"]
# For each turn of the user, and each tool result in it: the last answer that refers to the result,
# by its turn and its number there, all from 0; the answer that asked for it if none does.
LastUses = Sequence[Sequence[tuple[int, int]]]
SCRIPTED_AGENTS: tuple[ScriptedAgent, ...] = ("gold", "corrupt", "null")


@dataclass(frozen=True)
class Recalled:
    """What a memory put before the model for one answer, in the order the model read it."""

    texts: tuple[str, ...]
    # The messages they come from, by their numbers in the history that was told, and how much of
    # each came back: 1 for all of it. None if the memory does not know. One that writes what it
    # keeps anew should, as its texts are no evidence.
    messages: Mapping[int, float] | None = None
    # The same for each layer, where each brings back its own.
    layers: Mapping[int, Sequence[float]] | None = None
    seconds: float = 0.0  # that finding them took before this answer; 0 if they were there


@dataclass(frozen=True)
class PastSession:
    """A session that is over, as it is told to a memory."""

    messages: Sequence[Message]
    # Of each message in the whole history, as `Recalled` names them; None for a system message.
    numbers: Sequence[int | None]
    when: datetime | None = None  # it took place; without a time zone


@dataclass(frozen=True)
class Reply:
    """One assistant message."""

    content: str  # visible text, markers removed
    reasoning: str  # think block, markers removed
    # OpenAI form: {"id", "type": "function", "function": {"name", "arguments": <JSON text>}}
    tool_calls: list[dict[str, Any]]
    finish_reason: str  # `stop`, `tool_calls`, `length` or `context_limit`
    unparsable: bool  # the text held a tool-call marker whose payload is not a JSON call
    raw: str  # as generated, markers included
    message: Message  # to append to the history for the next request
    recalled: Recalled | None = None  # None: no memory is in the way, or it does not say


class AgentClient(Protocol):
    """One trial's line to the agent: one session, whose cache lives until the trial ends."""

    def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> Reply:
        """Send the whole history, get the next assistant message."""
        ...


@runtime_checkable
class SteeredClient(AgentClient, Protocol):
    """A line whose answers can be given, and whose session can be asked aside.

    Sessions beside it have lines of their own; all end with the trial at the latest.
    """

    @property
    def forks(self) -> bool:
        """Whether `fork` works."""
        ...

    def tokens(self) -> int:
        """Return how many tokens the session has so far."""
        ...

    def force(
        self,
        messages: Sequence[Message],
        said: Message,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """Send the whole history and give the answer, as if the agent had written it.

        Raises ContextLimitError where the model's context ends.
        """
        ...

    def fork(self) -> SteeredClient:
        """Return a line to a new session that goes on from where this one is."""
        ...

    def another(self) -> SteeredClient:
        """Return a line to a new, empty session."""
        ...

    def places(self, texts: Sequence[str]) -> list[list[int]]:
        """Return, for each text, where in the session's tokens it stands."""
        ...

    def close(self) -> object:
        """End the session."""
        ...


@runtime_checkable
class RememberingClient(SteeredClient, Protocol):
    """A line whose session, and others beside it, may bring back past sessions."""

    @property
    def remembers(self) -> bool:
        """Whether `remember` works: whether the run's method has a memory."""
        ...

    def remember(self, past: PastSession) -> None:
        """Have a past session taken in, before this line's first request."""
        ...

    def fork(self) -> RememberingClient:
        """Return a line to a new session that goes on from where this one is."""
        ...

    def another(self) -> RememberingClient:
        """Return a line to a new, empty session that brings back the same past."""
        ...


@dataclass(frozen=True)
class Sample:
    """One item of a task. `cluster` groups dependent samples (questions of one conversation)."""

    id: str
    cluster: str | None = None


@dataclass(frozen=True)
class Fact:
    """Something that had to be remembered, from tasks that know what an answer needs."""

    text: str  # as the session first stated it
    source: str  # phase of that text: think, act, tool or others
    kind: str  # `recurring` (needed again and again) or `one_shot`
    right: bool  # whether the agent knew it


@dataclass(frozen=True)
class Reading:
    """What taking in what is asked about cost, before the first question."""

    turns: int = 0  # first turns of the session whose prompts are that, and hardly anything else
    # What a memory spent beside the session: requests, tokens that they read and wrote, seconds.
    calls: int = 0
    tokens: int = 0
    seconds: float = 0.0
    failed: int = 0  # parts of the past that a memory could not take in
    # Past sessions that came from files. What they took is what it took to make these.
    files: int = 0
    files_s: float = 0.0  # seconds that this took instead
    # What finished turns added, with no request of their own: tokens, and seconds beside the agent.
    appended: int = 0
    append_s: float = 0.0


@dataclass
class Outcome:
    """The result of one trial; `score` is set only when `status` is `scored`."""

    status: TrialStatus
    score: float | None = None
    metrics: dict[str, Metric] = field(default_factory=dict)
    transcript: Any = None
    error: str | None = None
    facts: tuple[Fact, ...] = ()
    reading: Reading | None = None  # from tasks that read first and ask then


@dataclass(frozen=True)
class MarkedAnswers:
    """What the answers in a trial's transcript say of it."""

    score: float | None  # None: something was not answered, so the trial is not scored
    metrics: Mapping[str, Metric | None]  # those that follow from answers; None: nobody knows it
    transcript: Mapping[str, Any] | None  # what of it follows from the sample and the answers
    # What it says nothing of, though it had to if the session was kept as the task told it.
    missing: tuple[str, ...] = ()


@dataclass(frozen=True)
class TrialContext:
    """Everything a trial gets in addition to its sample."""

    trial: int  # index of the attempt
    seed: int  # the same for every method
    client: AgentClient  # in-process line to the agent
    # Base URL of the OpenAI-compatible server, for benchmarks that run in a worker process, and
    # the session id to send to it; such workers also send the sampling themselves.
    endpoint: str | None
    session: str
    temperature: float = 0.0
    max_tokens: int = 1024  # of every assistant message
    timeout_s: float = 3600.0  # for the whole trial; a task past it raises TimeoutError
    # How the model writes calls and messages, for tasks that write whole prompts.
    tool_syntax: str | None = None
    chat_format: str | None = None


class Task(ABC):
    """A benchmark slice. Subclasses are registered under `agentbench_kv.tasks`.

    A task with settings is a keyword-only dataclass whose fields are declared with
    `agentbench_kv.params.param`; `--set` takes them along with the method's.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    # Capabilities that the engine must have, by the values of `engines.base.Capability`. With
    # `force` the trial's client is a `SteeredClient`.
    needs: ClassVar[frozenset[str]] = frozenset()
    # It tells a method with a memory of past sessions, through a `RememberingClient`.
    remembers: ClassVar[bool] = False
    # Trials talk to an HTTP server, because the benchmark runs in a worker process.
    needs_endpoint: ClassVar[bool] = False
    # Settings that name encoders of figures beside the score. Who marks answers again opens none of
    # them: `mark` works where they are not, and what they give is as reported.
    figures_by: ClassVar[frozenset[str]] = frozenset()
    # Score of the corrupt agent in every sample; None if it depends on the sample: then its mean
    # must be below gold's.
    corrupt_score: ClassVar[float | None] = 0.0

    @classmethod
    def parameters(cls) -> dict[str, ParamSpec]:
        """Return the settings that `--set` takes, by name."""
        return param_specs(cls)

    @classmethod
    def create(cls, settings: Mapping[str, Any]) -> Self:
        """Build the task from settings, typed or as text; UsageError if one is not allowed."""
        return cls(**parse_settings(cls.name, cls, settings))

    @classmethod
    def stand_in(cls, settings: Mapping[str, str]) -> str | None:  # noqa: ARG003
        """Return a task that proves the same plumbing without what only users have; None if none.

        `kvbench selftest task` runs that one instead if `settings` do not say where it is.
        """
        return None

    @property
    def sends_messages(self) -> bool:
        """Whether the agent sends chat messages, not one text that only the task can take apart."""
        return True

    def settings(self) -> dict[str, Any]:
        """Return every setting with its value, for the run record; rare ones only where set."""
        known = {key: (spec, getattr(self, key)) for key, spec in self.parameters().items()}
        return {
            key: value
            for key, (spec, value) in known.items()
            if not spec.rare or value != spec.default
        }

    @abstractmethod
    def samples(self, limit: int | None, seed: int) -> list[Sample]:
        """Return the samples in a fixed order, the first `limit` of them."""

    @abstractmethod
    def run_trial(self, sample: Sample, context: TrialContext) -> Outcome:
        """Play one episode and check it with the benchmark's own checker."""

    @abstractmethod
    def script(self, sample: Sample, agent: ScriptedAgent) -> list[str]:
        """Return the raw assistant texts of an agent whose score is known in advance."""

    def last_uses(self, sample: Sample) -> LastUses | None:  # noqa: ARG002
        """Return when the golden agent last needs each tool result, where any agent's are like its.

        For policies that know the future, as controls of those that do not. None: nobody knows.
        """
        return None

    def nothing_right(self, sample: Sample) -> Mapping[str, Metric]:  # noqa: ARG002
        """Return a failed trial's metrics: `x_right` 0 of all that `x_asked` counts.

        As it counts 0 in the score, it does in the parts of the score. Empty if there are none, or
        if what is asked depends on the agent.
        """
        return {}

    def nothing_recalled(self, sample: Sample) -> Mapping[str, Metric]:  # noqa: ARG002
        """Return the same of what a memory brings back, for failed trials of runs with one."""
        return {}

    def mark(self, sample: Sample, transcript: Any) -> MarkedAnswers | None:  # noqa: ARG002
        """Mark the answers in a trial's transcript once more; without one nothing was answered.

        For those who check a record whose tokens are no session's that can be played again. None:
        the task's transcripts do not say all that its score is made of. Transcripts may be a
        stranger's: whatever is raised is a finding.
        """
        return None

    def score_of(self, sample: Sample, metrics: Mapping[str, Metric]) -> float | None:  # noqa: ARG002
        """Return the score that a trial's metrics come to; None if it is no part of them.

        Metrics may be a stranger's: a number that is missing counts 0.
        """
        return None

    def provenance(self) -> dict[str, Any]:
        """Return data hashes and versions for the run record."""
        return {}

    def close(self) -> None:  # noqa: B027
        """Stop workers and free what the task holds."""
