"""Paired differences against formulations of their own."""

from __future__ import annotations

from itertools import product
from math import comb

import numpy as np
import pytest

from agentbench_kv.results.paired import holm, paired_difference, paired_ratio_difference


def arms(a, b):
    return tuple({f"s{i}": [score] for i, score in enumerate(arm)} for arm in (a, b))


def test_mcnemar_is_the_sign_test_of_the_pairs_that_differ():
    a, b = arms([1] * 8 + [0] * 2 + [1] * 5, [0] * 8 + [1] * 2 + [1] * 5)
    found = paired_difference(a, b)
    tail = sum(comb(10, k) for k in range(3)) / 2**10
    assert found.test == "mcnemar"
    assert found.p_value == pytest.approx(2 * tail)
    assert found.point == pytest.approx(6 / 15)
    assert found.low < found.point < found.high
    assert found.n == 15


def test_graded_scores_take_the_exact_permutation_test():
    a, b = arms([0.9, 0.5, 0.7, 0.4, 0.8], [0.4, 0.5, 0.1, 0.6, 0.3])
    gaps = np.array([0.5, 0.0, 0.6, -0.2, 0.5])
    signs = np.array(list(product((1, -1), repeat=5)))
    means = (signs * gaps).mean(1)
    # Twice the smaller tail, as scipy counts a two-sided test.
    expected = 2 * np.mean(means >= gaps.mean() - 1e-12)
    found = paired_difference(a, b)
    assert found.test == "permutation"
    assert found.p_value == pytest.approx(expected)


def test_only_shared_samples_count():
    a, b = {"x": [1.0], "y": [0.0]}, {"y": [1.0], "z": [0.0]}
    found = paired_difference(a, b)
    assert (found.n, found.point) == (1, -1.0)
    assert paired_difference({"x": [1.0]}, {"y": [1.0]}) is None


def test_equal_arms_differ_by_nothing_as_far_as_so_few_samples_tell():
    a, b = arms([1, 0, 1, 1], [1, 0, 1, 1])
    found = paired_difference(a, b)
    assert (found.point, found.p_value) == (0, 1)
    one, other = arms([1], [0])
    assert paired_difference(one, other).low < 0 < paired_difference(one, other).high


def test_ratios_weigh_samples_by_what_was_asked():
    a = {"x": (9.0, 10.0), "y": (1.0, 2.0), "z": (0.0, 0.0)}
    b = {"x": (5.0, 10.0), "y": (2.0, 2.0), "z": (0.0, 0.0)}
    found = paired_ratio_difference(a, b)
    assert found.point == pytest.approx(10 / 12 - 7 / 12)
    assert found.n == 2


def test_swapping_arms_turns_the_interval_round():
    rng = np.random.default_rng(0)
    a = {f"s{i}": (float(rng.integers(5, 10)), 10.0) for i in range(30)}
    b = {f"s{i}": (float(rng.integers(3, 10)), 10.0) for i in range(30)}
    ahead, back = paired_ratio_difference(a, b), paired_ratio_difference(b, a)
    assert ahead.point == pytest.approx(-back.point)
    assert ahead.low == pytest.approx(-back.high, abs=0.01)
    assert ahead.p_value == pytest.approx(back.p_value, abs=0.02)


def test_holm_multiplies_the_smallest_by_the_number():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([]) == []


def test_one_pair_is_no_evidence():
    assert paired_difference({"x": [0.2]}, {"x": [0.9]}).p_value == 1.0


def test_groups_alone_are_the_units():
    """Groups of equal samples say no more than one sample a group."""
    few = {f"s{i}": [score] for i, score in enumerate([0.1, 0.5, 0.9, 0.4, 0.8])}
    base = {name: [0.5] for name in few}
    many, many_base = (
        {f"{name}-{copy}": scores for name, scores in arm.items() for copy in range(4)}
        for arm in (few, base)
    )
    clusters = {name: name.partition("-")[0] for name in many}
    alone = paired_difference(few, base)
    grouped = paired_difference(many, many_base, clusters=clusters)
    assert (grouped.clusters, grouped.n, alone.clusters) == (5, 20, None)
    assert (grouped.point, grouped.p_value) == pytest.approx((alone.point, alone.p_value))
    assert (grouped.low, grouped.high) == pytest.approx((alone.low, alone.high))


@pytest.mark.slow
def test_the_grouped_interval_covers_and_the_test_seldom_alarms():
    rng = np.random.default_rng(1)
    clusters = {f"s{i}": f"g{i // 3}" for i in range(90)}
    covered = alarms = 0
    for _ in range(2000):
        shared = np.repeat(rng.normal(0, 0.1, 30), 3)
        a, b = arms(0.5 + shared + rng.normal(0, 0.05, 90), 0.5 + rng.normal(0, 0.05, 90))
        found = paired_difference(a, b, resamples=300, clusters=clusters)
        covered += found.low <= 0 <= found.high
        alarms += found.p_value < 0.05
    assert 0.93 <= covered / 2000 <= 0.97
    assert alarms / 2000 <= 0.065
