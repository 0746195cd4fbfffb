"""From answers to figures, under the names `vllm bench serve` and `sglang.bench_serving` use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from agentbench_kv.loadgen.answers import Turn
from agentbench_kv.loadgen.load import Outcome

_MEDIANS = ("peak_live", "live", "logical")
_SUMMED = ("events", "evicted", "restored", "prefill_tokens", "recomputed", "session_resets")


def figures(outcome: Outcome) -> dict[str, int | float]:
    """Return every figure of a measurement; failed requests only count as failed.

    `total_input_tokens` are new tokens, each counted once; `total_prompt_tokens` count a session's
    history again in every turn, as an API would bill it. Latencies are absent if nothing completed.
    """
    done = [turn for turn in outcome.turns if turn.error is None]
    seconds = outcome.duration_s

    def per_second(count: float) -> float:
        return count / seconds if seconds > 0 else 0.0

    new, out = sum(t.new_tokens for t in done), sum(t.output_tokens for t in done)
    starts, ends = [t.start for t in done], [t.end for t in done]
    firsts = [t.start + t.ttft_s for t in done]
    found: dict[str, int | float] = {
        "duration": seconds,
        "completed": len(done),
        "failed": len(outcome.turns) - len(done),
        "sessions": len({turn.session for turn in outcome.turns}),
        "total_input_tokens": new,
        "total_prompt_tokens": sum(t.prompt_tokens for t in done),
        "total_output_tokens": out,
        "request_throughput": per_second(len(done)),
        "output_throughput": per_second(out),
        "total_token_throughput": per_second(new + out),
        "max_concurrent_requests": most_at_once(starts, ends),
        "max_concurrent_decodes": most_at_once(firsts, ends),
        "concurrency": per_second(sum(t.latency_s for t in done)),
    }
    for name, values in _latencies(done).items():
        found |= _described(name, values)
    return found


def kv_figures(turns: Sequence[Turn]) -> dict[str, Any] | None:
    """Sum up the KV accounting of sessions: the last that each sent; None if none did.

    Token counts are per (layer, KV head). `max_over_budget` is the most that a session's peak was
    above budget and longest single prefill; what is left over may be at most the method's interval.
    """
    last = {turn.session: turn.kv for turn in turns if turn.kv}
    if not last:
        return None
    accounts = list(last.values())
    phases = Counter[str]()
    for turn in turns:
        phases.update((turn.kv or {}).get("phases") or {})
    budgets = {account.get("budget") for account in accounts}

    def column(name: str) -> list[Any]:
        return [account.get(name, 0) for account in accounts]

    return {
        "sessions": len(accounts),
        "budget": budgets.pop() if len(budgets) == 1 else None,
        **{f"median_{name}": float(np.median(column(name))) for name in _MEDIANS},
        "max_peak_live": max(column("peak_live")),
        "longest_prefill": max(column("longest_prefill")),
        "mean_decode_kv": _mean_decode_kv(accounts),
        "max_over_budget": _over_budget(accounts),
        "compressed_sessions": sum(account.get("events", 0) > 0 for account in accounts),
        **{name: sum(column(name)) for name in _SUMMED},
        "phases": dict(phases),
    }


def most_at_once(starts: Sequence[float], ends: Sequence[float]) -> int:
    """Return how many intervals overlap at most; one that ends as another starts does not."""
    steps = sorted([*((end, -1) for end in ends), *((start, 1) for start in starts)])
    return max(np.cumsum([step for _, step in steps], dtype=int).tolist(), default=0)


def _latencies(done: Sequence[Turn]) -> dict[str, list[float]]:
    """Return seconds to the first token, per later token, between tokens and to the last."""
    return {
        "ttft": [turn.ttft_s for turn in done],
        "tpot": [
            (turn.latency_s - turn.ttft_s) / (turn.output_tokens - 1)
            for turn in done
            if turn.output_tokens > 1
        ],
        "itl": [gap for turn in done for gap in turn.itls_s],
        "e2el": [turn.latency_s for turn in done],
    }


def _described(name: str, seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {}
    ms = np.array(seconds) * 1e3
    p90, p99 = np.percentile(ms, (90, 99))
    of = {"mean": ms.mean(), "median": np.median(ms), "std": ms.std(), "p90": p90, "p99": p99}
    return {f"{figure}_{name}_ms": float(value) for figure, value in of.items()}


def _mean_decode_kv(accounts: Sequence[Mapping[str, Any]]) -> float:
    steps = [account.get("decode_tokens", 0) for account in accounts]
    held = [account.get("mean_decode_kv", 0.0) for account in accounts]
    return float(np.average(held, weights=steps)) if sum(steps) else 0.0


def _over_budget(accounts: Sequence[Mapping[str, Any]]) -> int | None:
    over = [
        account["peak_live"] - account["budget"] - account.get("longest_prefill", 0)
        for account in accounts
        if account.get("budget") is not None
    ]
    return max(over, default=None)
