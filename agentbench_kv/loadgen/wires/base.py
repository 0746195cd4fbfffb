"""What a kind of endpoint must tell the client."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from agentbench_kv.loadgen.answers import Answer


@dataclass(frozen=True)
class Call:
    """One HTTP request."""

    method: str
    path: str
    body: dict[str, Any] | None = None
    headers: dict[str, str] = field(default_factory=dict)


class Wire(ABC):
    """Requests and answers of one kind of endpoint. Greedy, and of fixed length."""

    needs_ids: ClassVar[bool] = True  # whether a later turn sends the generated ids back

    def __init__(self, model: str, *, keep: bool) -> None:
        self.model = model
        self.keep = keep  # sessions have more than one turn: the server must know them again

    def opening(self, session: str) -> Call | None:  # noqa: ARG002
        """Return what starts a session; None where the first turn does."""
        return None

    @abstractmethod
    def turn(self, session: str, log: Sequence[int], new: int, output: int) -> Call:
        """Return a request for `output` tokens.

        `log` holds all ids of the session; the server has not seen the last `new` of them.
        """

    @abstractmethod
    def read(self, event: dict[str, Any], answer: Answer, at: float) -> None:
        """Take one event of the answer, which arrived at `at` seconds."""

    def closing(self, session: str) -> Call | None:  # noqa: ARG002
        """Return what ends a session; None where the server forgets it by itself."""
        return None


def failure(event: dict[str, Any]) -> str | None:
    error = event.get("error")
    if not error:
        return None
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)
