"""The accounting of a session: added up over several caches, and as a JSON object."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from agentbench_kv.engines.base import KVStats

_SUMMED = (
    "evicted restored prefill_tokens decode_tokens decode_kv_sum bytes_read rows_moved recomputed"
)
_SHOWN = (
    "logical live peak_live evicted restored prefill_tokens longest_prefill decode_tokens "
    "bytes_read rows_moved recomputed budget"
)


def merge_stats(before: KVStats, now: KVStats) -> KVStats:
    """Return the accounting of a session that was closed with `before` and goes on as `now`."""
    summed = {name: getattr(before, name) + getattr(now, name) for name in _SUMMED.split()}
    restarts = [(len(before.events) + events, tokens) for events, tokens in now.restarts]
    return replace(
        now,
        **summed,
        peak_live=max(before.peak_live, now.peak_live),
        longest_prefill=max(before.longest_prefill, now.longest_prefill),
        events=[*before.events, *now.events],
        restarts=[*before.restarts, *restarts],
    )


def stats_dict(stats: KVStats) -> dict[str, Any]:
    """Return the accounting as a JSON object; events are counted, not listed."""
    shown = {name: getattr(stats, name) for name in _SHOWN.split()}
    return {**shown, "events": len(stats.events), "mean_decode_kv": stats.mean_decode_kv}
