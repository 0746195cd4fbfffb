"""A trial's line to the agent inside the process: one session of a gateway."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

from agentbench_kv.adapters.base import Message, Reply
from agentbench_kv.engines.base import KVStats
from agentbench_kv.gateway.gateway import AnyGateway
from agentbench_kv.gateway.session import Options, SessionReport, UnknownSessionError


class InProcessClient:
    """An `adapters.base.AgentClient` over a gateway. Closes its session; use it in a `with`.

    `sampling` are fields of `Options`, for every request that does not say otherwise.
    """

    def __init__(self, gateway: AnyGateway, session: str, **sampling: Any) -> None:
        self.session = session
        self._gateway = gateway
        self._options = Options(**sampling)
        self._final: SessionReport | None = None

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
        return Reply(*said, found.unparsable, found.raw, found.message)

    def close(self) -> SessionReport:
        """Close the session if it is open; return its final report, every time."""
        if self._final is None:
            try:
                self._final = self._gateway.close_report(self.session)
            except UnknownSessionError:
                # Closed over HTTP, or never opened.
                self._final = self.report
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
