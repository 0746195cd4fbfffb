"""Utility coverage against whole attention matrices in numpy, and a case worked out by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest

from agentbench_kv.analysis import replay
from agentbench_kv.analysis.coverage import utility_coverage
from agentbench_kv.analysis.replay import select_capture
from agentbench_kv.errors import UsageError
from agentbench_kv.registry import make_method

PHASES = ("think", "act", "tool", "others")
SAMPLERS = ("multiscale", "weighted", "diverse")


def by_name(coverage):
    return {(r.strategy, r.representatives, r.budget, r.phase): r for r in coverage.rows}


def shares(utility, kept, phases):
    """Coverage [5] of one head: four phases and overall; NaN for a phase without tokens."""
    found = []
    for group in [*(phases == phase for phase in range(4)), np.ones(len(phases), bool)]:
        total = utility[group].sum()
        found.append(
            utility[[row for row in kept if group[row]]].sum() / total if total else np.nan
        )
    return found


def brute_force(numeric, capture, keep, points):
    """Mean over heads and layers, then over events, of a strategy `keep(layer, head, now)`."""
    phases = capture.phases.numpy()
    events = []
    for now in points:
        heads = [
            shares(
                numeric.utility(
                    capture.q[layer].numpy(),
                    capture.k[layer].numpy(),
                    capture.positions.numpy(),
                    now,
                )[head],
                keep(layer, head, now),
                phases[:now],
            )
            for layer in range(capture.layers)
            for head in range(capture.kv_heads)
        ]
        events.append(np.nanmean(heads, 0))
    return np.nanmean(events, 0)


# An event every 16 tokens after a prompt of 12: sampled with 27, 43, … tokens fed.
POINTS = [27, 43, 59, 75]


@pytest.fixture(scope="module")
def session(capture):
    return capture(90, layers=2, runs=6)


@pytest.fixture(scope="module")
def found(session):
    return by_name(
        utility_coverage([session], [10, 20], representatives=8, recent=(4, 16), interval=16)
    )


def compare(found, name, q, budget, expected):
    got = [found[name, q, budget, phase].coverage for phase in (*PHASES, "overall")]
    np.testing.assert_allclose(got, expected, rtol=1e-4)


@pytest.mark.parametrize("budget", [10, 20])
@pytest.mark.parametrize("recent", [4, 16])
def test_recent_queries(numeric, session, found, budget, recent):
    def keep(layer, head, now):
        queries = session.q[layer, 2 * head : 2 * head + 2, now - recent : now].numpy()
        scores = numeric.mean_attention(queries, session.k[layer, head, :now].numpy())
        return numeric.top(scores, budget)

    compare(found, "recent", recent, budget, brute_force(numeric, session, keep, POINTS))


@pytest.mark.parametrize("budget", [10, 20])
def test_phase_balanced_queries(numeric, session, found, budget):
    def keep(layer, head, now):
        rows = numeric.ring_rows(session.phases.numpy(), now, 2)
        queries = session.q[layer, 2 * head : 2 * head + 2].numpy()[:, rows]
        scores = numeric.mean_attention(queries, session.k[layer, head, :now].numpy())
        return numeric.top(scores, budget)

    compare(found, "phase", 8, budget, brute_force(numeric, session, keep, POINTS))


@pytest.mark.parametrize("budget", [10, 20])
def test_the_oracle(numeric, session, found, budget):
    def keep(layer, head, now):
        q, k = session.q[layer].numpy(), session.k[layer].numpy()
        return numeric.top(numeric.utility(q, k, session.positions.numpy(), now)[head], budget)

    compare(found, "oracle", None, budget, brute_force(numeric, session, keep, POINTS))
    assert found["oracle", None, budget, "tool"].relative == pytest.approx(1)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_samplers_keep_what_the_method_keeps(numeric, session, found, sampler):
    method = make_method("agentkv@paper", 20, {"representatives": 8, "sampler": sampler})
    kept = {now: select_capture(session.at(now), method).kept for now in POINTS}
    expected = brute_force(
        numeric, session, lambda layer, head, now: kept[now][layer, head].tolist(), POINTS
    )
    compare(found, sampler, 8, 20, expected)


def test_nothing_keeps_more_of_the_whole_than_the_oracle(found):
    for row in found.values():
        assert 0 <= row.coverage <= 1
        best = found["oracle", None, row.budget, row.phase].coverage
        assert row.relative == pytest.approx(row.coverage / best)
        if row.phase == "overall":
            assert row.relative <= 1 + 1e-6


def test_blocks_do_not_matter(session, found, monkeypatch):
    monkeypatch.setattr(replay, "BLOCK_BYTES", 2000)
    again = utility_coverage([session], [10], representatives=8, recent=(4,), interval=16)
    for key, row in by_name(again).items():
        assert row.coverage == pytest.approx(found[key].coverage, rel=1e-4)


def test_uniform_attention_by_hand(capture):
    """Zero queries spread their attention evenly, so ties keep the first token only.

    Events with 2 and 3 of 4 tokens. Of two equal tokens, think and act, the first is kept:
    think 1, act 0, overall 1/2. Of three, think, act and think: think 1/2, act 0, overall 1/3.
    """
    zeros = np.zeros((1, 4, 2), "f4")
    extra = {"q": zeros, "k": zeros, "v": zeros, "phase": np.array([0, 1, 0, 3])}
    made = capture(4, q_heads=1, kv_heads=1, extra=extra | {"prompt": np.array(2)})
    coverage = utility_coverage([made], [1], recent=(1,), representatives=4, interval=1)
    assert coverage.events == {1: 2}
    rows = by_name(coverage)
    for strategy, q in (("recent", 1), ("phase", 4), ("diverse", 4), ("oracle", None)):
        values = {phase: rows[strategy, q, 1, phase] for phase in (*PHASES, "overall")}
        assert values["think"].coverage == pytest.approx(3 / 4)
        assert values["act"].coverage == pytest.approx(0)
        assert values["overall"].coverage == pytest.approx(5 / 12)
        assert (values["tool"].coverage, values["tool"].relative, values["tool"].events) == (
            None,
            None,
            0,
        )
        assert (values["act"].relative, values["act"].events) == (None, 2)
        assert values["think"].relative == pytest.approx(1)
    json.dumps(coverage.document(), allow_nan=False)


def test_events_of_several_captures_are_pooled(capture):
    options = {"recent": (4,), "representatives": 8, "interval": 16}
    sessions = [capture(90, seed=1), capture(60, seed=2)]
    together = utility_coverage(sessions, [10], **options)
    apart = [by_name(utility_coverage([one], [10], **options)) for one in sessions]
    assert together.events == {10: 4 + 3}
    for key, row in by_name(together).items():
        parts = [one[key] for one in apart]
        total = sum(part.events * (part.coverage or 0) for part in parts)
        assert row.coverage == pytest.approx(total / row.events)


def test_without_an_event(capture):
    with pytest.raises(UsageError, match=r"no event at budget 80: .* lower --budget or --interval"):
        utility_coverage([capture(60)], [80])


def test_representatives_that_no_method_takes(capture):
    with pytest.raises(UsageError, match="representatives=10: expected a multiple of 4"):
        utility_coverage([capture(60)], [8], representatives=10)
