"""The accounting of a session: added up over several caches, and as a JSON object."""

from __future__ import annotations

from typing import Any

from agentbench_kv.engines.base import KVStats

__all__ = ["merge_stats", "stats_dict"]

_SUMMED = (
    "evicted",
    "restored",
    "prefill_tokens",
    "decode_tokens",
    "decode_kv_sum",
    "bytes_read",
    "rows_moved",
    "recomputed",
)


def merge_stats(before: KVStats, now: KVStats) -> KVStats:
    """Return the accounting of a session that was closed with `before` and goes on as `now`."""
    merged = KVStats(
        logical=now.logical,
        live=now.live,
        budget=now.budget,
        figures=now.figures,
        peak_live=max(before.peak_live, now.peak_live),
        longest_prefill=max(before.longest_prefill, now.longest_prefill),
        events=[*before.events, *now.events],
        restarts=[
            *before.restarts,
            *((len(before.events) + events, tokens) for events, tokens in now.restarts),
        ],
    )
    for name in _SUMMED:
        setattr(merged, name, getattr(before, name) + getattr(now, name))
    return merged


def stats_dict(stats: KVStats) -> dict[str, Any]:
    """Return the accounting as a JSON object; events are counted, not listed."""
    names = ("logical", "live", "peak_live", "evicted", "restored", "prefill_tokens")
    more = ("longest_prefill", "decode_tokens", "bytes_read", "rows_moved", "recomputed", "budget")
    plain = {name: getattr(stats, name) for name in (*names, *more)}
    return {**plain, "events": len(stats.events), "mean_decode_kv": stats.mean_decode_kv}
