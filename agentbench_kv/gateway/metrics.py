"""Counters of the server in Prometheus' text format."""

from __future__ import annotations

import threading
from collections import Counter

from agentbench_kv.gateway.accounting import TurnInfo

__all__ = ["Metrics"]

_HELP = {
    "kvbench_requests_total": "HTTP requests by route and status.",
    "kvbench_prompt_tokens_total": "Logical prompt tokens of answered requests.",
    "kvbench_prefill_tokens_total": "Tokens prefilled.",
    "kvbench_generated_tokens_total": "Tokens generated.",
    "kvbench_evicted_tokens_total": "Tokens evicted per (layer, KV head).",
    "kvbench_kv_bytes_read_total": "Bytes of K and V read while decoding.",
    "kvbench_session_resets_total": "Requests that did not extend their session.",
}


class Metrics:
    """Counts; safe from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, str]] = Counter()

    def request(self, route: str, status: int) -> None:
        """Count one response."""
        self._add("kvbench_requests_total", 1, f'{{route="{route}",status="{status}"}}')

    def turn(self, turn: TurnInfo) -> None:
        """Count one answered turn."""
        self._add("kvbench_prompt_tokens_total", turn.prompt_tokens)
        self._add("kvbench_prefill_tokens_total", turn.prefill_tokens)
        self._add("kvbench_generated_tokens_total", turn.output_tokens)
        self._add("kvbench_evicted_tokens_total", turn.evicted)
        self._add("kvbench_kv_bytes_read_total", turn.kv_bytes_read)
        self._add("kvbench_session_resets_total", int(turn.reset))

    def text(self, gauges: dict[str, int]) -> str:
        """Return all counters and the given gauges."""
        lines: list[str] = []
        with self._lock:
            counts = sorted(self._counts.items())
        for name, help_text in _HELP.items():
            lines += [f"# HELP {name} {help_text}", f"# TYPE {name} counter"]
            lines += [f"{key}{labels} {value}" for (key, labels), value in counts if key == name]
        for name, value in gauges.items():
            lines += [f"# TYPE {name} gauge", f"{name} {value}"]
        return "\n".join(lines) + "\n"

    def _add(self, name: str, value: int, labels: str = "") -> None:
        with self._lock:
            self._counts[name, labels] += value
