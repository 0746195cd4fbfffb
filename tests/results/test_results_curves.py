"""Curve figures against known curves, and their intervals by simulation."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from agentbench_kv.results.curve_shape import falls, mean_height, threshold
from agentbench_kv.results.curves import curve_summary

BUDGETS = [256, 512, 1024, 2048, 4096]
X = np.log2(BUDGETS)
FULL = 0.9
SLOW = [0.3, 0.4, 0.5, 0.6, 0.7]
STEEP = [0.05, 0.25, 0.6, 0.8, 0.9]


def arm(label, tokens, scores, clusters=None):
    return SimpleNamespace(
        run_id=f"{label}-{tokens}", label=label, tokens=tokens, budget=tokens,
        clusters=clusters or {},
        scores={f"s{i}": [float(score)] for i, score in enumerate(scores)},
    )  # fmt: skip


def draw(rng, n=100):
    """One difficulty a sample, so that all arms are paired; a little luck an arm."""
    hard = rng.random(n)

    def solved(chance):
        mixed = np.where(rng.random(n) < 0.2, rng.random(n), hard)
        return mixed < chance

    curves = {"slow": SLOW, "steep": STEEP}
    arms = [
        arm(name, budget, solved(chance))
        for name, chances in curves.items()
        for budget, chance in zip(BUDGETS, chances, strict=True)
    ]
    return [arm("full", None, solved(FULL))], arms


def test_area_and_threshold_and_crossing_of_straight_lines():
    y = np.array([0.0, 0.25, 0.5, 0.75, 1.0])
    assert mean_height(X, y) == pytest.approx(0.5)
    assert threshold(X, y - 0.6) == pytest.approx(X[0] + 4 * 0.6)
    assert np.nansum(falls(X, y[::-1] - y)) == pytest.approx(X[2])
    assert np.nansum(falls(X, 0.3 - y)) == pytest.approx(X[0] + 4 * 0.3)
    assert np.isnan(falls(X, y - 0.3)).all()


def test_a_threshold_counts_from_where_the_curve_stays_above():
    above = np.array([[1, -1, 1, 1, 1], [1, 1, 1, 1, 1], [1, 1, 1, 1, -1], [-1, -1, -1, -1, 0]])
    found = threshold(X, above.astype(float))
    assert found == pytest.approx([(X[1] + X[2]) / 2, X[0], np.inf, X[4]])


def test_budgets_at_which_two_methods_are_equal_are_no_crossing_by_themselves():
    assert np.isnan(falls(X, np.array([1.0, 0, 1, 0, 0]))).all()
    assert np.isnan(falls(X, np.array([0.0, 0, -1, -1, 0]))).all()
    fell = falls(X, np.array([1.0, 0, 0, -1, -1]))
    assert fell[~np.isnan(fell)] == pytest.approx([X[2]])


@pytest.mark.slow
def test_every_interval_covers_the_truth():
    rng = np.random.default_rng(8)
    steep, slow = np.array(STEEP), np.array(SLOW)
    truth = {
        "area": np.trapezoid(steep, X) / (X[-1] - X[0]) / FULL,
        "keeps": 2 ** np.interp(0.85 * FULL, steep, X),
        "crossing": 2 ** np.interp(0, steep - slow, X),
    }
    covered = dict.fromkeys(truth, 0)
    for _ in range(2000):
        found = curve_summary(*draw(rng), share=0.85, resamples=200)
        (curve,) = [each for each in found.curves if each.label == "steep"]
        ends = {
            "area": (curve.area.low, curve.area.high),
            "keeps": (curve.keeps.low or np.inf, curve.keeps.high or np.inf),
            "crossing": (found.crossovers[0].low, found.crossovers[0].high),
        }
        for name, (low, high) in ends.items():
            covered[name] += low <= truth[name] <= high
    shares = {name: count / 2000 for name, count in covered.items()}
    assert all(0.93 <= share <= 0.97 for share in shares.values()), shares


def test_a_large_sample_finds_the_truth():
    found = curve_summary(*draw(np.random.default_rng(9), n=6000), resamples=200)
    slow, steep = found.curves
    assert steep.scores == pytest.approx(STEEP, abs=0.03)
    assert slow.keeps.point is slow.keeps.low is None
    assert str(slow.keeps) == "> 4096"
    (crossing,) = found.crossovers
    assert (crossing.below, crossing.above) == ("slow", "steep")
    assert 512 < crossing.low < crossing.high < 1024
    assert crossing.support == 1.0


def test_only_shared_samples_count_and_strangers_are_left_out():
    full = arm("full", None, [1, 1, 1, 0])
    lacking = arm("m", 512, [1, 0, 1])
    stranger = SimpleNamespace(**{**vars(arm("m", 1024, [])), "scores": {"other": [1.0]}})
    unlimited = arm("none", None, [1])
    found = curve_summary([full], [lacking, stranger, unlimited], resamples=50)
    assert found.samples == 3
    assert found.left_out == ["m-1024", "none-None"]
    assert found.curves[0].area is None
    assert found.curves[0].scores == pytest.approx([2 / 3])
    assert curve_summary([full], [unlimited]) is None


def test_repeats_count_together_and_a_full_that_fails_has_no_relative_figures():
    full = arm("full", None, [0, 0])
    found = curve_summary([full], [arm("m", 512, [1, 0]), arm("m", 512, [0, 0])], resamples=50)
    assert found.curves[0].scores == [0.25]
    assert found.curves[0].keeps is None


def test_groups_are_resampled_where_there_are_groups():
    scores = [1, 1, 1, 0, 0, 0, 1, 1, 1, 0, 0, 0]
    groups = {f"s{i}": f"g{i // 3}" for i in range(12)}
    full = arm("full", None, [1] * 12)
    alone, grouped = (
        curve_summary([full], [arm("m", b, scores, clusters) for b in (256, 512)], resamples=500)
        for clusters in (None, groups)
    )
    assert (alone.clusters, grouped.clusters) == (None, 4)
    widths = [each.curves[0].area.high - each.curves[0].area.low for each in (alone, grouped)]
    assert widths[1] > widths[0]
