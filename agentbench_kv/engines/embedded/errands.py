"""Work on a session's cache between two of its turns."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from agentbench_kv.engines.embedded.session import EmbeddedSession


@dataclass(eq=False)
class Command:
    """Work on one session's cache that waits for the engine's thread."""

    session: EmbeddedSession
    work: Callable[[], Any]
    more: int  # rows it adds
    done: Future[Any] = field(default_factory=Future)

    def run(self) -> None:
        try:
            self.done.set_result(self.work())
        except Exception as error:  # noqa: BLE001  handed to the caller, who raises it
            self.done.set_exception(error)
