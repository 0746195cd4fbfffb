"""Adding up the accounting of a session that went through several caches."""

from __future__ import annotations

from agentbench_kv.engines.base import KVStats

__all__ = ["merge_stats"]

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
