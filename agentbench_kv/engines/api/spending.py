"""What requests cost, and how much a command may spend."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Self

from agentbench_kv.errors import PrerequisiteError, UsageError

PRICES = "KVBENCH_API_PRICES"
_PER = 1_000_000


@dataclass(frozen=True)
class Prices:
    """Money per million tokens, in the user's currency."""

    prompt: float
    output: float
    cached: float

    @classmethod
    def from_environment(cls) -> Self | None:
        """Read `KVBENCH_API_PRICES=PROMPT,OUTPUT[,CACHED]`; None if it is not set.

        Cached prompt tokens cost what others do unless a price is given.
        """
        text = os.environ.get(PRICES, "").strip()
        if not text:
            return None
        try:
            numbers = [float(part) for part in text.split(",")]
        except ValueError:
            numbers = []
        if len(numbers) not in (2, 3) or not all(0 <= number < float("inf") for number in numbers):
            raise UsageError(
                f"{PRICES}={text!r}: expected PROMPT,OUTPUT or PROMPT,OUTPUT,CACHED, "
                "money per million tokens, e.g. 2.5,10"
            )
        return cls(numbers[0], numbers[1], numbers[2] if len(numbers) == 3 else numbers[0])

    def cost(self, prompt: int, output: int, cached: int) -> float:
        """Return the price of one request; `cached` tokens are part of `prompt`."""
        fresh = max(prompt - cached, 0)
        return (fresh * self.prompt + cached * self.cached + output * self.output) / _PER


class Spending:
    """Money spent by one command, requests under way at the limit included. Thread-safe."""

    def __init__(self, limit: float | None = None) -> None:
        self.limit = limit
        self.spent = 0.0
        self.requests = 0
        self._lock = threading.Lock()

    def add(self, cost: float | None) -> None:
        with self._lock:
            self.requests += 1
            self.spent += cost or 0.0

    def check(self) -> None:
        if self.limit is not None and self.spent >= self.limit:
            raise PrerequisiteError(
                f"--max-cost {self.limit:g} is reached: {self.spent:.6g} spent on {self.requests} "
                "requests; what is done stays, the same command goes on with the rest"
            )


_current: ContextVar[Spending | None] = ContextVar("spending", default=None)


@contextmanager
def spending_limit(limit: float | None) -> Iterator[Spending]:
    """Let every engine made inside share one account with this limit; None only counts."""
    spending = Spending(limit)
    token = _current.set(spending)
    try:
        yield spending
    finally:
        _current.reset(token)


def spending_of_this_command() -> Spending:
    return _current.get() or Spending()
