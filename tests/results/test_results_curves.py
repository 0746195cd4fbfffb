"""Curve figures against known curves, and their intervals by simulation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import isotonic_regression

from agentbench_kv.results.curves import (
    Point,
    curve_summary,
    falls,
    mean_height,
    rising,
    threshold,
)
from agentbench_kv.results.stats import Scores

BUDGETS = [256, 512, 1024, 2048, 4096]
LONGEST = 8192
X = np.log2(BUDGETS)
FULL = 0.9
SLOW = [0.3, 0.4, 0.5, 0.6, 0.7]
STEEP = [0.05, 0.25, 0.6, 0.8, 0.9]
FLAT = [0.86, 0.87, 0.87, 0.88, 0.88]
CURVES = {"slow": SLOW, "steep": STEEP, "flat": FLAT}
SHARE = 0.95


def scores(values, groups=None):
    parts = {f"s{i}": (float(value), 1.0) for i, value in enumerate(values)}
    return Scores(parts, groups=groups or {})


def draw(rng, n=100):
    """One difficulty a sample, so that all methods are paired; a little luck a method."""
    hard = rng.random(n)

    def solved(chance):
        mixed = np.where(rng.random(n) < 0.2, rng.random(n), hard)
        return scores(mixed < chance)

    points = [
        Point(name, budget, solved(chance))
        for name, chances in CURVES.items()
        for budget, chance in zip(BUDGETS, chances, strict=True)
    ]
    return solved(FULL), points, dict.fromkeys([f"s{i}" for i in range(n)], LONGEST)


def true_keeps(curve):
    """Where the straight lines through the curve and full at the longest session cross 95%."""
    heights = [*curve, FULL]
    if heights[0] >= SHARE * FULL:
        return BUDGETS[0]
    return 2 ** np.interp(SHARE * FULL, heights, [*X, np.log2(LONGEST)])


def test_area_and_threshold_and_crossing_of_straight_lines():
    y = np.array([0.0, 0.25, 0.5, 0.75, 1.0])
    assert mean_height(X, y) == pytest.approx(0.5)
    assert threshold(X, y - 0.6) == pytest.approx(X[0] + 4 * 0.6)
    assert np.nansum(falls(X, y[::-1] - y)) == pytest.approx(X[2])
    assert np.nansum(falls(X, 0.3 - y)) == pytest.approx(X[0] + 4 * 0.3)
    assert np.isnan(falls(X, y - 0.3)).all()


def test_a_threshold_is_the_first_budget_or_none_at_the_ends():
    above = np.array([[1, 1, 1, 1, 1], [-1, -1, -1, -1, 0], [-1, -1, -1, -1, -1]], float)
    assert threshold(X, above) == pytest.approx([X[0], X[4], np.inf])
    assert threshold(X[:1], np.array([[1.0], [-1.0]])) == pytest.approx([X[0], np.inf])


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=9))
def test_rising_is_isotonic_regression(values):
    found = rising(np.array([values, values[::-1]]))
    for own, expected in zip(found, (values, values[::-1]), strict=True):
        assert own == pytest.approx(isotonic_regression(expected).x, abs=1e-9)


def test_budgets_at_which_two_methods_are_equal_are_no_crossing_by_themselves():
    assert np.isnan(falls(X, np.array([1.0, 0, 1, 0, 0]))).all()
    assert np.isnan(falls(X, np.array([0.0, 0, -1, -1, 0]))).all()
    fell = falls(X, np.array([1.0, 0, 0, -1, -1]))
    assert fell[~np.isnan(fell)] == pytest.approx([X[2]])


def simulate(n, times, seed=8):
    """Return how often each interval covers; how often `keeps` lies past the longest session."""
    rng = np.random.default_rng(seed)
    steep, slow = np.array(STEEP), np.array(SLOW)
    area = np.trapezoid(steep, X) / (X[-1] - X[0]) / FULL
    crossing = 2 ** np.interp(0, steep - slow, X)
    covered = dict.fromkeys(["area", "crossing", *CURVES], 0)
    past = 0
    for _ in range(times):
        found = curve_summary(*draw(rng, n), resamples=300)
        for curve in found.curves:
            keeps = curve.keeps
            past += keeps.high is None or keeps.high > LONGEST * 1.001
            truth = true_keeps(CURVES[curve.label])
            covered[curve.label] += keeps.low <= truth * 1.001 and truth <= keeps.high * 1.001
        (own,) = [curve for curve in found.curves if curve.label == "steep"]
        covered["area"] += own.area.low <= area <= own.area.high
        crossings = [c for c in found.crossovers if (c.below, c.above) == ("slow", "steep")]
        covered["crossing"] += any(c.low <= crossing <= c.high for c in crossings)
    return {name: count / times for name, count in covered.items()}, past


def test_intervals_cover_and_keeps_is_never_past_the_longest_session():
    covered, past = simulate(50, 150)
    assert past == 0
    # 4.3 standard errors under 0.92, of 150 draws.
    assert all(share >= 0.85 for name, share in covered.items() if name != "crossing"), covered


@pytest.mark.slow
@pytest.mark.parametrize(
    "n", [20, *(pytest.param(n, marks=pytest.mark.nightly) for n in (50, 200))]
)
def test_every_interval_covers_the_truth(n):
    covered, past = simulate(n, 1000)
    assert past == 0
    # 2.5 standard errors under 0.90.
    assert all(covered[name] >= 0.876 for name in (*CURVES, "area")), covered
    if n == 200:
        assert covered["crossing"] >= 0.92


def test_a_large_sample_finds_the_truth():
    found = curve_summary(*draw(np.random.default_rng(9), n=6000), resamples=200)
    curves = {curve.label: curve for curve in found.curves}
    assert curves["steep"].scores == pytest.approx(STEEP, abs=0.03)
    for name in ("steep", "slow"):
        assert curves[name].keeps.point == pytest.approx(true_keeps(CURVES[name]), rel=0.1)
    assert str(curves["flat"].keeps).startswith("<= 256")
    (crossing,) = [c for c in found.crossovers if "flat" not in (c.below, c.above)]
    assert (crossing.below, crossing.above) == ("slow", "steep")
    assert 512 < crossing.low < crossing.high < 1024
    assert crossing.support == 1.0


def test_a_dip_by_chance_does_not_move_what_is_kept_past_the_grid():
    """Audit A7: one sample less at the largest budget said `> 4096` of a method that kept all."""
    full = scores([1] * 20)
    heights = [0, 10, 20, 20, 18]
    points = [
        Point("m", budget, scores([1] * right + [0] * (20 - right)))
        for budget, right in zip(BUDGETS, heights, strict=True)
    ]
    lengths = dict.fromkeys(full.parts, LONGEST)
    (curve,) = curve_summary(full, points, lengths, resamples=200).curves
    assert curve.keeps.point < 1024
    assert curve.keeps.high <= LONGEST
    (blind,) = curve_summary(full, points[:2], {}, resamples=200).curves
    assert str(blind.keeps) == "> 512"


def test_a_budget_that_holds_every_session_keeps_everything():
    """Whatever it scored: nothing was evicted, so the difference is the noise of two runs."""
    full, low = scores([1] * 20), scores([1] * 10 + [0] * 10)
    points = [Point("m", budget, low) for budget in (512, 1024)]
    (curve,) = curve_summary(full, points, dict.fromkeys(full.parts, 900), resamples=200).curves
    assert 512 < curve.keeps.point <= curve.keeps.high <= 1024


def test_a_method_whose_own_sessions_are_longer_keeps_what_was_measured():
    """An agent that wanders where `full` does not has events also at budgets that hold full's."""
    full, low = scores([1] * 20), scores([1] * 10 + [0] * 10)
    points = [Point("m", budget, low, evicted=True) for budget in (512, 1024)]
    lengths = dict.fromkeys(full.parts, 900)
    (curve,) = curve_summary(full, points, lengths, resamples=200).curves
    assert str(curve.keeps) == "> 1024"


def test_quantised_rows_are_full_at_no_budget():
    full, low = scores([1] * 20), scores([1] * 10 + [0] * 10)
    lengths = dict.fromkeys(full.parts, 900)
    found = [
        str(curve_summary(full, [point], lengths, resamples=200).curves[0].keeps)
        for point in (Point("m", 512, low), Point("m", 512, low, lossless=False))
    ]
    assert not found[0].startswith(">")
    assert found[1] == "> 512"


def test_only_shared_samples_count():
    full = scores([1, 1, 1, 0])
    found = curve_summary(full, [Point("m", 512, scores([1, 0, 1]))], {}, resamples=50)
    assert found.samples == 3
    assert found.curves[0].area is None
    assert found.curves[0].scores == pytest.approx([2 / 3])
    assert curve_summary(full, [], {}) is None
    assert curve_summary(full, [Point("m", 512, Scores({"other": (1.0, 1.0)}))], {}) is None


def test_equal_budgets_count_together_and_a_full_that_fails_has_no_relative_figures():
    points = [Point("m", 512, scores([1, 0])), Point("m", 512, scores([0, 0]))]
    found = curve_summary(scores([0, 0]), points, {}, resamples=50)
    assert found.curves[0].scores == [0.25]
    assert found.curves[0].keeps is None


def test_groups_are_resampled_where_there_are_groups():
    right = [1, 1, 1, 0, 0, 0, 1, 1, 1, 0, 0, 0]
    groups = {f"s{i}": f"g{i // 3}" for i in range(12)}
    alone, grouped = (
        curve_summary(
            scores([1] * 12, known),
            [Point("m", b, scores(right, known)) for b in (256, 512)],
            {},
            resamples=500,
        )
        for known in (None, groups)
    )
    assert (alone.groups, grouped.groups) == (None, 4)
    widths = [each.curves[0].area.high - each.curves[0].area.low for each in (alone, grouped)]
    assert widths[1] > widths[0]
