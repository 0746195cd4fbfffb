"""Who may start: a session that evicts grows to its budget and an interval, not to its end.

SGLang reserves room for what a request may still generate. With that, freed memory would never
become concurrency; these functions replace its estimates of growth.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from agentbench_kv.engines.sglang.backend.book import Session, SessionTable

Original = Callable[..., Any]


def add_one_req(
    table: SessionTable, original: Original, adder: Any, request: Any, **rest: Any
) -> Any:
    """Admit as SGLang does for requests that may end early, with our bound on their growth.

    Its other path, for `ignore_eos`, counts logical lengths and cuts the chunks of a session's
    later turns in the wrong place.
    """
    sampling = request.sampling_params
    asked = sampling.ignore_eos, sampling.max_new_tokens
    session = table.of(request)
    sampling.ignore_eos = False
    if session is not None:
        growth = _growth(table, session, request, request.extend_input_len)
        sampling.max_new_tokens = len(request.output_ids) + growth
    try:
        return original(adder, request, **rest)
    finally:
        sampling.ignore_eos, sampling.max_new_tokens = asked


def running_growth(table: SessionTable, original: Original, adder: Any, request: Any) -> float:
    """Return the tokens a running request may still add."""
    session = table.of(request)
    estimate: float = original(adder, request)
    return estimate if session is None else min(estimate, _growth(table, session, request, 0))


def _growth(table: SessionTable, session: Session, request: Any, pending: int) -> int:
    """Return how many rows may be added to those there are and `pending` ones."""
    method = table.method
    left: int = max(0, request.sampling_params.max_new_tokens - len(request.output_ids))
    if not method.compresses or method.trigger == "turn":
        return left
    start = session.ledger.live + pending
    budget = method.budget_at(session.ledger.fed + pending + left)
    return min(left, max(start, budget) + method.interval - start)
