"""What an answer of SGLang's own endpoint says of its session: `meta_info.kvbench`."""

from __future__ import annotations

from typing import Any

from agentbench_kv.engines.accounting import stats_dict
from agentbench_kv.engines.sglang.backend.book import Held

_KEY = "kvbench"


def attach(request: Any, held: Held | None) -> None:
    """Let the end of a request's answer carry its session's accounting.

    SGLang pairs what requests bring along by their order, so all of them must bring something.
    """
    request.customized_info = {_KEY: _Account(held)}


class _Account:
    """Stands where SGLang expects one entry per token and takes those about to be sent."""

    def __init__(self, held: Held | None) -> None:
        self._held = held

    def __getitem__(self, tokens: slice) -> dict[str, Any] | None:
        """Return the accounting once the turn is over, None before."""
        settled = None if self._held is None else self._held.settled
        return None if settled is None else stats_dict(settled)
