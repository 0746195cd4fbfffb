"""Ranks: tiers of achieved KV, ties by paired interval, prompts, what stays below the line."""

from __future__ import annotations

import numpy as np
import pytest

from agentbench_kv.results.arms import load_arms, set_apart
from agentbench_kv.results.paired import paired_difference
from agentbench_kv.results.site.ranking import standings, tier
from agentbench_kv.results.store import RunStore


@pytest.fixture
def arms_of(tmp_path, spec, make_trial):
    """Return a function that writes runs and loads them: name -> scores, peak live, changes."""

    def write(runs):
        store = RunStore(tmp_path)
        for name, (scores, peak, changes) in runs.items():
            own = spec | {"method": "agentkv", "budget": 256} | changes.get("spec", {})
            with store.open(name, own, expected_trials=len(scores)) as run:
                for i, score in enumerate(scores):
                    kv = {"peak_live": peak, "logical": 1000, "events": 1, "longest_prefill": 800}
                    sha = f"{changes.get('sha', '')}{i:08x}"
                    sample = f"{changes.get('samples', 's')}{i}"
                    run.append_trial(make_trial(sample, score=score, kv=kv, prompt_sha=sha))
        arms, problems = load_arms([tmp_path])
        assert not problems
        return arms

    return write


def by_name(placed):
    return {standing.arm.run_id: standing for standing in placed}


def test_tiers_hold_their_upper_edge():
    assert [tier(kept) for kept in (0.001, 0.1, 0.1001, 0.5, 0.75, 0.76, 0.95, 1.0)] == [
        0, 0, 1, 2, 3, 4, 4, 5,
    ]  # fmt: skip


def test_a_tier_is_of_achieved_not_nominal_kv(arms_of):
    placed = by_name(standings(arms_of({"a": ([1.0, 0.0], 240, {}), "b": ([0.0, 0.0], 900, {})})))
    assert (placed["a"].tier, placed["b"].tier) == (1, 4)
    assert (placed["a"].rank, placed["b"].rank) == (1, 1)
    assert placed["a"].of == placed["b"].of == 1


@pytest.mark.parametrize("right", [[1.0], [1.0, 1.0]])
def test_a_sample_or_two_rank_nobody_before_another(arms_of, right):
    placed = by_name(
        standings(arms_of({"a": (right, 400, {}), "b": ([0.0] * len(right), 400, {})}))
    )
    assert [placed["a"].rank, placed["b"].rank] == [1, 1]
    gap = placed["b"].gap
    assert gap.point == -1.0
    assert gap.low < 0 < gap.high


def test_runs_of_another_temperature_do_not_compete(arms_of):
    hot = {"spec": {"temperature": 1.0}}
    arms = arms_of({"a": ([1.0] * 9, 400, {}), "b": ([0.0] * 9, 400, hot)})
    assert {(s.rank, s.of) for s in standings(arms)} == {(1, 1)}
    assert sorted(set_apart(arms).values()) == ["temperature=1.0", "temperature=None"]
    assert set(set_apart(arms[:1]).values()) == {""}


def test_ranks_are_shared_exactly_where_the_paired_interval_includes_zero(arms_of):
    rng = np.random.default_rng(5)
    ease = rng.random(60)
    runs = {
        f"run{i}": ([float(e < c) for e in ease + rng.normal(0, 0.05, 60)], 400, {})
        for i, c in enumerate((0.9, 0.88, 0.7, 0.68, 0.3, 0.3))
    }
    placed = by_name(standings(arms_of(runs)))
    left = sorted(placed.values(), key=lambda s: (-s.arm.summary.score.point, s.arm.run_id))
    first, done = left[0], 0
    while left:
        leader = left[0]
        group = [
            s
            for s in left
            if s is leader
            or (d := paired_difference(s.arm.scores, leader.arm.scores)).low <= 0 <= d.high
        ]
        assert {s.rank for s in group} == {done + 1}
        done += len(group)
        left = [s for s in left if s not in group]
    assert len({s.rank for s in placed.values()}) > 1
    assert len({s.rank for s in placed.values()}) < len(runs)
    for standing in placed.values():
        if standing is not first:
            exact = paired_difference(standing.arm.scores, first.arm.scores)
            assert standing.gap.point == pytest.approx(exact.point)
            assert standing.gap.low == pytest.approx(exact.low, abs=0.04)
            assert standing.gap.high == pytest.approx(exact.high, abs=0.04)


def test_pairs_on_the_samples_both_have(arms_of):
    runs = {"long": ([1.0] * 30, 400, {}), "short": ([0.0] * 10, 400, {})}
    gap = by_name(standings(arms_of(runs)))["short"].gap
    assert (gap.n, gap.point) == (10, -1.0)


def test_nothing_in_common_is_a_tie(arms_of):
    runs = {"a": ([1.0] * 9, 400, {}), "b": ([0.0] * 9, 400, {"samples": "t", "sha": "9"})}
    placed = by_name(standings(arms_of(runs)))
    assert placed["a"].rank == placed["b"].rank == 1


def test_other_cells_do_not_compete(arms_of):
    runs = {"a": ([1.0] * 9, 400, {}), "b": ([0.0] * 9, 400, {"spec": {"task": "micro/other"}})}
    placed = by_name(standings(arms_of(runs)))
    assert placed["b"].rank == 1
    assert placed["b"].gap is None


def test_another_seed_with_other_prompts_is_its_own_field(arms_of):
    runs = {
        "a": ([1.0] * 9, 400, {}),
        "b": ([0.0] * 9, 400, {"sha": "f", "spec": {"seed": 9}}),
        "c": ([0.0] * 9, 400, {"spec": {"seed": 9}}),
    }
    placed = by_name(standings(arms_of(runs)))
    assert (placed["b"].asked, placed["b"].rank) == (1, 1)
    assert (placed["c"].asked, placed["c"].rank) == (0, 2)


def test_drifted_prompts_are_below_the_line(arms_of):
    runs = {"a": ([1.0] * 9, 400, {}), "b": ([1.0] * 9, 400, {"sha": "f"})}
    placed = by_name(standings(arms_of(runs)))
    assert placed["a"].ranked
    assert not placed["b"].ranked
    assert placed["b"].reason.startswith("drift: prompts differ")


def test_a_run_over_its_budget_is_below_the_line_with_the_reason(arms_of):
    runs = {"a": ([1.0] * 9, 400, {}), "b": ([1.0] * 9, 1000, {"spec": {"budget": 10}})}
    placed = standings(arms_of(runs))
    assert [s.arm.run_id for s in placed] == ["a", "b"]
    assert placed[1].rank is None
    assert "exceeded the budget" in placed[1].reason
