"""Figures from made event lists, against numpy and by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentbench_kv.serving_bench.endpoints import TimedTurn
from agentbench_kv.serving_bench.figures import figures, kv_figures, most_at_once
from agentbench_kv.serving_bench.jobs import TraceCall, TraceSession


def turn(session: int, number: int, start: float, gaps: list[float], **more: Any) -> TimedTurn:
    """Return a turn whose tokens came `gaps` after another, the first after `start`."""
    fields: dict[str, Any] = {"new_tokens": 10, "prompt_tokens": 10 + 20 * number}
    return TimedTurn(
        session=session,
        turn=number,
        start=start,
        output_tokens=len(gaps),
        ttft_s=gaps[0],
        latency_s=sum(gaps),
        itls_s=gaps[1:],
        **{**fields, **more},
    )


def made() -> list[TimedTurn]:
    return [
        turn(0, 0, 0.0, [0.5, 0.1, 0.2]),
        turn(0, 1, 1.0, [0.25, 0.15]),
        turn(1, 0, 0.5, [0.75]),
        turn(1, 1, 1.5, [0.5, 0.5, 0.5, 0.5]),
        TimedTurn(2, 0, 0.25, 10, 10, latency_s=9.0, error="HTTP 500: no"),
    ]


def test_counts_and_rates_leave_failed_requests_out() -> None:
    found = figures(made(), 4.0)
    assert (found["completed"], found["failed"], found["sessions"]) == (4, 1, 3)
    assert found["total_input_tokens"] == 40
    assert found["total_prompt_tokens"] == 10 + 30 + 10 + 30
    assert found["total_output_tokens"] == 3 + 2 + 1 + 4
    assert found["duration"] == 4.0
    assert found["request_throughput"] == 1.0
    assert found["output_throughput"] == 2.5
    assert found["total_token_throughput"] == 12.5
    assert found["concurrency"] == pytest.approx((0.8 + 0.4 + 0.75 + 2.0) / 4)


def test_latencies_are_numpys() -> None:
    found = figures(made(), 4.0)
    values = {
        "ttft": [500, 250, 750, 500],
        # The answer of one token has none.
        "tpot": [150, 150, 500],
        "itl": [100, 200, 150, 500, 500, 500],
        "e2el": [800, 400, 750, 2000],
    }
    assert tuple(values) == ("ttft", "tpot", "itl", "e2el")
    for name, ms in values.items():
        assert found[f"mean_{name}_ms"] == pytest.approx(np.mean(ms))
        assert found[f"median_{name}_ms"] == pytest.approx(np.median(ms))
        assert found[f"std_{name}_ms"] == pytest.approx(np.std(ms))
        assert found[f"p90_{name}_ms"] == pytest.approx(np.percentile(ms, 90))
        assert found[f"p99_{name}_ms"] == pytest.approx(np.percentile(ms, 99))


def test_decodes_are_counted_while_anything_decodes() -> None:
    # From 1 to 3 and from 2 to 4, and a long wait of one that generates a single token.
    turns = [turn(0, 0, 0.0, [1.0, 1.0, 1.0]), turn(1, 0, 1.0, [1.0, 2.0]), turn(2, 0, 0.0, [9.0])]
    assert figures(turns, 10.0)["mean_concurrent_decodes"] == pytest.approx(4 / 3)
    assert "mean_concurrent_decodes" not in figures([turns[2]], 10.0)


def test_concurrency_is_counted_over_requests_and_over_decodes() -> None:
    found = figures(made(), 4.0)
    # At 0.5 to 0.8 two requests run, but the second has no token before the first is done.
    assert found["max_concurrent_requests"] == 2
    assert found["max_concurrent_decodes"] == 1


def test_nothing_completed_leaves_no_latency() -> None:
    found = figures([TimedTurn(0, 0, 0.0, 10, 10, error="no")], 0.0)
    assert (found["completed"], found["failed"]) == (0, 1)
    assert found["output_throughput"] == 0.0
    assert found["max_concurrent_requests"] == 0
    assert not [name for name in found if name.endswith("_ms")]


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 10)), max_size=30))
def test_most_at_once_is_the_busiest_moment(spans: list[tuple[int, int]]) -> None:
    starts, ends = [at for at, _ in spans], [at + size for at, size in spans]
    busiest = max(sum(s <= t < e for s, e in zip(starts, ends, strict=True)) for t in range(31))
    assert most_at_once(starts, ends) == busiest


def test_tokens_that_arrive_together_share_their_gap() -> None:
    answer = TimedTurn(0, 0, 10.0, 1, 1)
    for at, count in ((11.0, 2), (12.0, 1), (15.0, 3)):
        answer.arrive(at, count)
    assert answer.ttft_s == 1.0
    assert answer.latency_s == 5.0
    assert answer.itls_s == [1.0, 1.0, 1.0, 1.0]


def test_an_answer_without_text_has_its_end_as_first_token() -> None:
    answer = TimedTurn(0, 0, 10.0, 1, 1)
    answer.finish(13.0)
    assert (answer.ttft_s, answer.latency_s, answer.itls_s) == (3.0, 3.0, [])


def account(**more: Any) -> dict[str, Any]:
    plain = {"budget": 100, "peak_live": 150, "live": 100, "logical": 400, "longest_prefill": 30}
    totals = {"events": 2, "evicted": 300, "session_resets": 0, "decode_tokens": 10}
    return {**plain, **totals, "mean_decode_kv": 120.0, "phases": {"think": 5}, **more}


def test_kv_counts_the_last_account_of_each_session() -> None:
    turns = [
        turn(0, 0, 0.0, [0.1], kv=account(events=1, peak_live=40)),
        turn(0, 1, 1.0, [0.1], kv=account(phases={"think": 2, "tool": 4})),
        turn(1, 0, 0.0, [0.1], kv=account(peak_live=250, decode_tokens=30, mean_decode_kv=200.0)),
        turn(2, 0, 0.0, [0.1], kv=account(peak_live=90, events=0, decode_tokens=0)),
    ]
    found = kv_figures(turns)
    assert found is not None
    assert (found["sessions"], found["compressed_sessions"], found["budget"]) == (3, 2, 100)
    assert (found["median_peak_live"], found["max_peak_live"]) == (150, 250)
    assert found["events"] == 4
    assert found["mean_decode_kv"] == pytest.approx((10 * 120 + 30 * 200) / 40)
    assert found["max_over_budget"] == 250 - 100 - 30
    assert (found["bytes_read"], found["decode_tokens"]) == (0, 40)
    # Phases are those of each turn's own tokens.
    assert found["phases"] == {"think": 17, "tool": 4}


def test_without_accounting_there_are_no_kv_figures() -> None:
    assert kv_figures([turn(0, 0, 0.0, [0.1])]) is None
    no_budget = kv_figures([turn(0, 0, 0.0, [0.1], kv=account(budget=None))])
    assert no_budget is not None
    assert no_budget["max_over_budget"] is None


def test_goodput_is_what_keeps_to_every_target() -> None:
    # Session 0: TTFT 500 and 250 ms, TPOT 150 both; session 1: 750 and 500 ms, none and 500.
    sessions = [
        TraceSession("0", [TraceCall(1, 3), TraceCall(1, 2)]),
        TraceSession("1", [TraceCall(1, 1), TraceCall(1, 4)]),
        TraceSession("2", [TraceCall(1, 1)]),
    ]

    def good(**targets: float) -> tuple[float, float]:
        found = figures(made(), 4.0, targets, sessions)
        return found["request_goodput"] * 4, found["session_goodput"] * 4

    assert good(ttft=1000) == (4, 2)
    assert good(ttft=500) == (3, 1)
    assert good(ttft=499) == (1, 0)
    assert good(tpot=150.1) == (3, 1)
    assert good(ttft=600, tpot=400) == (2, 1)
    assert good(e2el=100) == (0, 0)
    # A session whose second call was never sent is not good.
    assert figures(made()[:1], 4.0, {"ttft": 1000}, sessions[:1])["session_goodput"] == 0
    assert "request_goodput" not in figures(made(), 4.0)


def test_a_request_that_was_sent_late_has_less_time_left() -> None:
    """A slow server got its next request when it was ready, and every one of them was good."""
    turns = made()
    assert "p99_late_ms" not in figures(turns, 4.0)
    turns[1].late_s = 2.0  # its TTFT is 250 ms
    found = figures(turns, 4.0, {"ttft": 1000})
    assert found["request_goodput"] * 4 == pytest.approx(3)
    assert found["mean_late_ms"] == pytest.approx(500)
    assert figures(turns, 4.0, {"ttft": 2251})["request_goodput"] == pytest.approx(1)
    assert figures(turns, 4.0, {"tpot": 1000})["request_goodput"] == pytest.approx(1)


def test_prefix_hits_are_those_that_the_server_reports() -> None:
    turns = made()
    assert "prefix_hit_rate" not in figures(turns, 4.0)
    turns[1].cached_tokens, turns[3].cached_tokens = 20, 10
    found = figures(turns, 4.0)
    assert found["cached_prompt_tokens"] == 30
    assert found["prefix_hit_rate"] == pytest.approx(30 / 60)  # of the prompts that say
    assert found["median_ttft_first_ms"] == pytest.approx(625)
    assert found["median_ttft_later_ms"] == pytest.approx(375)


def test_bytes_read_are_those_of_all_turns() -> None:
    turns = [
        turn(0, 0, 0.0, [0.1], kv=account(turn_bytes_read=300)),
        turn(0, 1, 1.0, [0.1], kv=account(turn_bytes_read=500)),
        turn(1, 0, 0.0, [0.1], kv=account(turn_bytes_read=200)),
    ]
    found = kv_figures(turns)
    assert found is not None
    assert (found["bytes_read"], found["decode_tokens"]) == (1000, 20)
