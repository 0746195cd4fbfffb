"""Intervals that verdicts rest on: coverage, false alarms, and samples that decide."""

from __future__ import annotations

from math import ceil

import numpy as np
import pytest
from scipy.stats import norm

from agentbench_kv.results.gap import Gap, score_gap, size_gap
from agentbench_kv.results.statistics import unseen_share, wilson
from agentbench_kv.results.verdict import (
    Verdict,
    gap_of_scores,
    judge,
    non_inferiority,
    samples_needed,
    worst,
)

MARGIN = 0.02
RUNS = 2000


def draw(rng, n, change, flips):
    """Draw paired binary scores whose means differ by `change`; `flips` of the samples differ."""
    chances = [(flips + change) / 2, (flips - change) / 2, 1 - flips]
    moved = rng.choice([1, -1, 0], size=n, p=chances)
    same = rng.integers(0, 2, n)
    return np.where(moved == 0, same, moved > 0), np.where(moved == 0, same, moved < 0)


def simulate(change, flips, n=120, runs=RUNS, seed=0):
    rng = np.random.default_rng(seed)
    ones, ids = np.ones(n), [str(i) for i in range(n)]
    for _ in range(runs):
        cand, base = draw(rng, n, change, flips)
        sides = (np.stack([side, ones], 1).astype(float) for side in (cand, base))
        yield score_gap(ids, *sides, binary=True, resamples=400)


@pytest.mark.slow
@pytest.mark.parametrize("flips", [0.1, 0.3])
def test_under_no_difference_the_interval_covers_and_regression_is_rare(flips):
    gaps = list(simulate(0.0, flips))
    assert 0.93 <= np.mean([gap.low <= 0 <= gap.high for gap in gaps]) <= 0.97
    verdicts = [judge(gap.low, gap.high, MARGIN) for gap in gaps]
    assert verdicts.count(Verdict.REGRESSION) <= 0.05 * RUNS


@pytest.mark.slow
def test_a_loss_of_the_margin_is_seldom_called_ok_or_non_inferior():
    gaps = list(simulate(-MARGIN, 0.2, seed=1))
    verdicts = [judge(gap.low, gap.high, MARGIN) for gap in gaps]
    assert verdicts.count(Verdict.OK) <= 0.05 * RUNS
    assert verdicts.count(Verdict.REGRESSION) <= 0.05 * RUNS
    # The 90% interval leaves 5% on its lower side; 0.5% is one standard error of the simulation.
    assert np.mean([gap.low90 > -MARGIN for gap in gaps]) <= 0.065


def test_few_samples_without_a_loss_are_not_ok():
    """A plain bootstrap would be sure here in four runs of five."""
    gaps = list(simulate(-MARGIN, MARGIN, n=10, runs=300, seed=2))
    assert sum(gap.low > -MARGIN for gap in gaps) <= 0.05 * 300


@pytest.mark.slow
def test_groups_of_samples_widen_the_interval_until_it_covers():
    rng = np.random.default_rng(3)
    ids = [str(i) for i in range(120)]
    clusters = {name: f"g{i // 3}" for i, name in enumerate(ids)}
    covered = {"groups": 0, "samples": 0}
    for _ in range(RUNS):
        shared = np.repeat(rng.normal(0, 0.15, 40), 3)
        cand, base = (
            np.clip(0.5 + s + rng.normal(0, 0.05, 120), 0, 1) for s in (shared, 0 * shared)
        )
        sides = [np.stack([side, np.ones(120)], 1) for side in (cand, base)]
        for name, groups in (("groups", clusters), ("samples", None)):
            gap = score_gap(ids, *sides, groups, resamples=300)
            covered[name] += gap.low <= 0 <= gap.high
            assert gap.clusters == (40 if groups else None)
    assert 0.93 <= covered["groups"] / RUNS <= 0.97
    assert covered["samples"] / RUNS < 0.85


def test_the_saving_of_memory_covers():
    rng = np.random.default_rng(4)
    ids = [str(i) for i in range(60)]
    covered = 0
    for _ in range(RUNS):
        base = rng.uniform(800, 1200, 60)
        cand = base * rng.normal(0.8, 0.1, 60)
        gap = size_gap(ids, cand, base, resamples=300)
        covered += gap.low <= 0.2 <= gap.high
    assert 0.93 <= covered / RUNS <= 0.97


@pytest.mark.parametrize(("change", "flips"), [(0.1, 0.3), (-0.12, 0.3)])
def test_the_samples_that_are_asked_for_decide(change, flips):
    spread = np.sqrt(flips - change**2)
    gap = next(simulate(change, flips, runs=1)).model_copy(
        update={"point": change, "spread": spread, "units": 10}
    )
    needed = samples_needed(gap, MARGIN)
    assert needed == ceil(((norm.ppf(0.975) + norm.ppf(0.8)) * spread / abs(change + MARGIN)) ** 2)
    verdicts = [
        judge(each.low, each.high, MARGIN)
        for each in simulate(change, flips, n=needed, runs=400, seed=5)
    ]
    assert 0.72 <= np.mean([v is not Verdict.INCONCLUSIVE for v in verdicts]) <= 0.88


@pytest.mark.parametrize("score", [0.0, 1.0])
def test_equal_arms_are_ok_from_the_number_on_that_was_named(score):
    def equal(n):
        scores = {str(i): [score] for i in range(n)}
        return gap_of_scores(scores, scores, resamples=99)

    needed = samples_needed(equal(50), MARGIN)
    assert judge(equal(needed).low, equal(needed).high, MARGIN) is Verdict.OK
    before = equal(needed - 1)
    assert judge(before.low, before.high, MARGIN) is Verdict.INCONCLUSIVE


def test_a_change_on_the_margin_is_never_decided():
    gap = next(simulate(0.0, 0.3, runs=1)).model_copy(update={"point": -MARGIN})
    assert samples_needed(gap, MARGIN) is None


def test_what_was_never_seen_is_bounded_as_wilson_bounds_it():
    assert unseen_share(80) == pytest.approx(wilson(0, 80)[1])


def test_non_inferiority_looks_at_the_ninety_percent_end():
    rng = np.random.default_rng(6)
    cand, base = draw(rng, 400, 0.0, 0.1)
    a, b = ({str(i): [float(s)] for i, s in enumerate(side)} for side in (cand, base))
    found = non_inferiority(a, b, 0.05)
    gap = gap_of_scores(a, b)
    assert gap.low < found.low == gap.low90 < found.point
    assert found.holds == (found.low > -0.05)
    assert found.n == 400
    assert non_inferiority({"x": [1]}, {"y": [1]}, 0.05) is None


def test_words_and_exit_codes():
    assert judge(-0.5, -0.03, 0.02) is Verdict.REGRESSION
    assert judge(-0.01, 0.5, 0.02) is Verdict.OK
    assert judge(-0.03, 0.5, 0.02) is Verdict.INCONCLUSIVE
    assert judge(-0.02, 0.5, 0.02) is Verdict.INCONCLUSIVE
    assert [v.exit_code for v in Verdict] == [0, 4, 3]
    assert worst([Verdict.OK, Verdict.REGRESSION, Verdict.INCONCLUSIVE]) is Verdict.REGRESSION
    assert worst([Verdict.OK, Verdict.INCONCLUSIVE]) is Verdict.INCONCLUSIVE


def test_sub_scores_weigh_samples_by_what_was_asked():
    cand, base = np.array([[9.0, 10], [1, 2]]), np.array([[5.0, 10], [2, 2]])
    gap = score_gap(["x", "y"], cand, base)
    assert isinstance(gap, Gap)
    assert gap.point == pytest.approx(10 / 12 - 7 / 12)
    assert -1 <= gap.low < gap.point < gap.high <= 1
