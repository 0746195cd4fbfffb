"""Counters of the server in Prometheus' text format."""

from __future__ import annotations

import threading
from collections import Counter

from agentbench_kv.gateway.accounting import TurnInfo

_REQUESTS = "kvbench_requests_total"
# Each with its help text and the field of `TurnInfo` that it adds up.
_TURN_COUNTERS = {
    "kvbench_prompt_tokens_total": ("Logical prompt tokens of answered requests.", "prompt_tokens"),
    "kvbench_prefill_tokens_total": ("Tokens prefilled.", "prefill_tokens"),
    "kvbench_generated_tokens_total": ("Tokens generated.", "output_tokens"),
    "kvbench_evicted_tokens_total": ("Tokens evicted per (layer, KV head).", "evicted"),
    "kvbench_kv_bytes_read_total": ("Bytes of K and V read while decoding.", "kv_bytes_read"),
    "kvbench_session_resets_total": ("Requests that did not extend their session.", "reset"),
}
_HELP = {
    _REQUESTS: "HTTP requests by route and status.",
    **{name: text for name, (text, _) in _TURN_COUNTERS.items()},
}


class Metrics:
    """Counts; safe from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, str]] = Counter()  # by name and labels

    def request(self, route: str, status: int) -> None:
        with self._lock:
            self._counts[_REQUESTS, f'{{route="{route}",status="{status}"}}'] += 1

    def turn(self, turn: TurnInfo) -> None:
        with self._lock:
            for name, (_, field) in _TURN_COUNTERS.items():
                self._counts[name, ""] += int(getattr(turn, field))

    def text(self, gauges: dict[str, int]) -> str:
        lines: list[str] = []
        with self._lock:
            counts = sorted(self._counts.items())
        for name, help_text in _HELP.items():
            lines += [f"# HELP {name} {help_text}", f"# TYPE {name} counter"]
            lines += [f"{key}{labels} {value}" for (key, labels), value in counts if key == name]
        for name, value in gauges.items():
            lines += [f"# TYPE {name} gauge", f"{name} {value}"]
        return "\n".join(lines) + "\n"
