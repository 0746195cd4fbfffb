"""What an answer of SGLang's own endpoint says of its session: `meta_info.kvbench`."""

from __future__ import annotations

from typing import Any

from agentbench_kv.engines.accounting import stats_dict
from agentbench_kv.engines.sglang.backend.book import Session


def attach(request: Any, session: Session | None) -> None:
    """Let the end of a request's answer carry its session's accounting.

    SGLang pairs what requests bring along by their order, so all of them must bring something.
    """
    request.customized_info = {"kvbench": _Account(session)}


class _Account:
    """Replaces SGLang's list with one entry per token, of which it takes those about to be sent."""

    def __init__(self, session: Session | None) -> None:
        self._session = session

    def __getitem__(self, tokens: slice) -> dict[str, Any] | None:
        """Return the accounting once the turn is over, None before."""
        settled = None if self._session is None else self._session.settled
        return None if settled is None else stats_dict(settled)
