"""Who may start: a session that evicts grows to its budget and an interval, not to its end.

SGLang reserves room for what a request may still generate. With that, freed memory would never
become concurrency.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from agentbench_kv.engines.sglang.backend.book import Book, Held

Original = Callable[..., Any]


class Admission:
    """Replaces SGLang's estimates of growth."""

    def __init__(self, book: Book) -> None:
        self._book = book

    def add_one_req(self, original: Original, adder: Any, request: Any, **rest: Any) -> Any:
        """Admit as SGLang does for requests that may end early, with our bound on their growth.

        Its other path, for `ignore_eos`, counts logical lengths and cuts the chunks of a session's
        later turns in the wrong place.
        """
        sampling = request.sampling_params
        asked = sampling.ignore_eos, sampling.max_new_tokens
        held = self._book.of(request)
        sampling.ignore_eos = False
        if held is not None:
            done = len(request.output_ids)
            sampling.max_new_tokens = done + self._growth(held, request, request.extend_input_len)
        try:
            return original(adder, request, **rest)
        finally:
            sampling.ignore_eos, sampling.max_new_tokens = asked

    def running_growth(self, original: Original, adder: Any, request: Any) -> float:
        """Return the tokens a running request may still add."""
        held = self._book.of(request)
        estimate: float = original(adder, request)
        return estimate if held is None else min(estimate, self._growth(held, request, 0))

    def _growth(self, held: Held, request: Any, pending: int) -> int:
        """Return how many rows may come to those there are and `pending` ones."""
        method = self._book.method
        left: int = max(0, request.sampling_params.max_new_tokens - len(request.output_ids))
        if not method.compresses or method.trigger == "turn":
            return left
        start = held.ledger.live + pending
        budget = method.budget_at(held.ledger.fed + pending + left)
        return min(left, max(start, budget) + method.interval - start)
