"""What a kind of endpoint must tell the client."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from agentbench_kv.loadgen.answers import Answer

__all__ = ["Call", "Wire", "failure"]


@dataclass(frozen=True)
class Call:
    """One HTTP request."""

    method: str
    path: str
    body: dict[str, Any] | None = None
    headers: dict[str, str] = field(default_factory=dict)


class Wire(ABC):
    """Requests and answers of one kind of endpoint. Greedy, and of fixed length.

    Parameters
    ----------
    model : str
        Name to ask for.
    keep : bool
        Whether a session has more than one turn, so that the server must know it again.
    """

    needs_ids: ClassVar[bool] = True
    """Whether a later turn sends the generated ids back."""

    def __init__(self, model: str, *, keep: bool) -> None:
        self.model = model
        self.keep = keep

    def opening(self, session: str) -> Call | None:  # noqa: ARG002
        """Return what starts a session; None where the first turn does."""
        return None

    @abstractmethod
    def turn(self, session: str, log: Sequence[int], new: int, output: int) -> Call:
        """Return one turn's request.

        Parameters
        ----------
        session : str
        log : sequence of int
            All ids of the session so far.
        new : int
            How many of them, at the end, the server has not seen.
        output : int
            Tokens to generate.
        """

    @abstractmethod
    def read(self, event: dict[str, Any], answer: Answer, at: float) -> None:
        """Take one event of the answer, which arrived at `at` seconds."""

    def closing(self, session: str) -> Call | None:  # noqa: ARG002
        """Return what ends a session; None where the server forgets it by itself."""
        return None


def failure(event: dict[str, Any]) -> str | None:
    """Return the message of an event that reports an error."""
    error = event.get("error")
    if not error:
        return None
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)
