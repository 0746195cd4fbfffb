"""A trial's line to the agent inside the process: one session of a gateway."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

from agentbench_kv.adapters.base import Message, PastSession, Reading, Reply
from agentbench_kv.engines.base import Capability, KVStats
from agentbench_kv.errors import ContextLimitError, KVBenchError, UsageError
from agentbench_kv.gateway.base import AnyGateway
from agentbench_kv.gateway.exchange import Options
from agentbench_kv.gateway.memory import Appended
from agentbench_kv.gateway.reports import SessionReport, Spent
from agentbench_kv.gateway.session import UnknownSessionError

# What a method asked by itself, also in sessions beside a trial's own.
_ASKED = ("auxiliary_calls", "auxiliary_tokens", "auxiliary_s", "auxiliary_bytes_read")


class InProcessClient:
    """An `adapters.base.AgentClient` over a gateway. Closes its session; use it in a `with`.

    `sampling` are fields of `Options`, for every request that does not say otherwise.
    """

    def __init__(self, gateway: AnyGateway, session: str, **sampling: Any) -> None:
        self.session = session
        self._gateway = gateway
        self._options = Options(**sampling)
        self._final: SessionReport | None = None
        self._sides: list[InProcessClient] = []
        self._reading: Reading | None = None  # what past sessions took
        self.answers: list[Spent] = []  # of this session and those beside it

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> Reply:
        """Send the whole history, get the next assistant message."""
        limit = max_tokens if max_tokens is not None else self._options.max_tokens
        options = replace(self._options, max_tokens=limit, stop=tuple(stop))
        found = self._gateway.chat(self.session, messages, tools, options)
        said = (found.content, found.reasoning, found.tool_calls, found.finish_reason)
        memories, turn = self._gateway.memories, found.turn
        recalled = memories.recalled(self.session) if memories is not None else None
        searched = 0.0 if recalled is None else 1000 * recalled.seconds
        ttft = None if turn.ttft_ms is None else turn.ttft_ms + searched
        took = (turn.output_tokens, turn.tpot_ms)
        spent = Spent(turn.prefill_tokens, turn.live_after, ttft, *took)
        self.answers.append(spent)
        return Reply(*said, found.unparsable, found.raw, found.message, recalled)

    @property
    def forks(self) -> bool:
        """Whether `fork` works."""
        return Capability.FORK in self._gateway.engine.info.capabilities

    def tokens(self) -> int:
        """Return how many tokens the session has so far."""
        return self._gateway.stats(self.session).logical

    def force(
        self,
        messages: Sequence[Message],
        said: Message,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """Send the whole history and give the answer, as if the agent had written it."""
        found = self._gateway.force(self.session, messages, said, tools)
        if found.finish_reason == "context_limit":
            raise ContextLimitError(f"session {self.session} reached the model's last position")

    @property
    def remembers(self) -> bool:
        """Whether `remember` works: whether the run's method has a memory."""
        return self._gateway.memories is not None

    def remember(self, past: PastSession) -> None:
        """Have a past session taken in, which this line's session and others bring back."""
        if self._gateway.memories is None:
            raise UsageError("this run's method has no memory; kvbench ls methods shows who has")
        read = self._gateway.memories.remember(self.session, past)
        before = self._reading or Reading()
        self._reading = Reading(
            calls=before.calls + read.calls,
            tokens=before.tokens + read.tokens,
            seconds=before.seconds + read.seconds,
            failed=before.failed + read.failed,
            files=before.files + read.files,
            files_s=before.files_s + read.files_s,
        )

    @property
    def reading(self) -> Reading | None:
        """What past sessions took, and what finished turns added to them; None without any."""
        memories = self._gateway.memories
        added = Appended() if memories is None else memories.appended(self.session)
        if not added.tokens:
            return self._reading
        reading = self._reading or Reading()
        return replace(reading, appended=added.tokens, append_s=added.seconds)

    def fork(self) -> InProcessClient:
        """Return a line to a new session that goes on from where this one is."""
        side = self.another()
        self._gateway.fork(self.session, side.session)
        return side

    def another(self) -> InProcessClient:
        """Return a line to a new, empty session; it ends with this one at the latest."""
        name = f"{len(self._sides) + 1}|{self.session}"
        self._sides.append(InProcessClient(self._gateway, name, **vars(self._options)))
        self._sides[-1].answers = self.answers
        if self._gateway.memories is not None:
            self._gateway.memories.share(self.session, name)
        return self._sides[-1]

    def places(self, texts: Sequence[str]) -> list[list[int]]:
        """Return, for each text, where in the session's tokens it stands."""
        found: list[list[int]] = self._gateway.places(self.session, texts)
        return found

    def cancel(self) -> None:
        """End what the session, and those beside it, answer now and later."""
        for line in (self, *self._sides):
            self._gateway.cancel(line.session)
        if self._gateway.memories is not None:
            self._gateway.memories.cancel(self.session)

    def close(self) -> SessionReport:
        """Close the session if it is open; return its final report, every time.

        The first time it waits for what finished turns add to a memory: KVBenchError if that fails,
        once the session is closed.
        """
        problem = self._settled() if self._final is None else None
        final = self._closed()
        if problem is not None:
            raise problem
        return final

    def _settled(self) -> KVBenchError | None:
        """Wait for what is being added to a memory; return what went wrong."""
        if self._gateway.memories is not None:
            try:
                self._gateway.memories.settle(self.session)
            except KVBenchError as error:
                return error
        return None

    def _closed(self) -> SessionReport:
        beside = [side._closed().stats for side in self._sides]
        if self._final is None:
            try:
                self._final = self._gateway.close_report(self.session)
            except UnknownSessionError:
                # Closed over HTTP, or never opened.
                self._final = self.report
            stats = self._final.stats
            asked = {name: getattr(stats, name) for name in _ASKED}
            for name, each in itertools.product(_ASKED, beside):
                asked[name] += getattr(each, name)
            self._final = replace(self._final, stats=replace(stats, **asked))
            if self._gateway.memories is not None:
                self._gateway.memories.forget(self.session)
        return self._final

    @property
    def report(self) -> SessionReport:
        """Accounting of the session so far, or its final one."""
        if self._final is not None:
            return self._final
        try:
            return self._gateway.report(self.session)
        except UnknownSessionError:
            return SessionReport(self.session, (), 0, None, KVStats())
