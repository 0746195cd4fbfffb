"""Statistics against independent references: statsmodels, root finding, brute force."""

from __future__ import annotations

from itertools import combinations, product
from math import comb, sqrt

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.stats import binomtest, norm
from scipy.stats import t as student
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.proportion import proportion_confint

from agentbench_kv.results.stats import (
    Scores,
    change,
    draws,
    ends,
    holm,
    level,
    median,
    pass_levels,
    pass_scores,
    powers,
    size_change,
    speed_change,
)

scores_lists = st.lists(st.floats(0, 1, allow_nan=False), min_size=1, max_size=40)


def side(values: list[float], group: int | None = None) -> Scores:
    names = [f"s{i:03d}" for i in range(len(values))]
    groups = {name: f"g{i // group}" for i, name in enumerate(names)} if group else {}
    return Scores.of_trials(
        {name: [value] for name, value in zip(names, values, strict=True)}, groups
    )


@pytest.mark.parametrize(("right", "n"), [(0, 10), (3, 10), (10, 10), (1, 1), (7, 200), (199, 200)])
def test_plain_binary_scores_have_wilsons_interval(right: int, n: int) -> None:
    found = level(side([1.0] * right + [0.0] * (n - right)))
    low, high = proportion_confint(right, n, method="wilson")
    assert (found.low, found.high) == pytest.approx((max(low, 0.0), min(high, 1.0)), abs=1e-12)
    assert (found.method, found.n, found.point) == ("wilson", n, right / n)


@settings(deadline=None)
@given(scores_lists.filter(lambda values: len(values) > 1 and not set(values) <= {0.0, 1.0}))
def test_an_end_is_where_the_mixture_with_the_extreme_is_rejected(values: list[float]) -> None:
    """Solve the score equation by bisection, from its definition, for graded scores."""
    found, n = level(side(values)), len(values)
    mean, variance = float(np.mean(values)), float(np.var(values, ddof=1)) / n
    quantile = float(student.ppf(0.975, n - 1))

    def distance(extreme: float, share: float) -> float:
        mixed = (1 - share) * variance + share * (1 - share) * (extreme - mean) ** 2 / n
        return share * abs(extreme - mean) - quantile * sqrt(mixed)

    for extreme, end in ((0.0, found.low), (1.0, found.high)):
        if abs(extreme - mean) < 1e-9:
            continue
        if distance(extreme, 1.0) <= 0:
            share = 1.0
        else:
            share = brentq(lambda x, e=extreme: distance(e, x), 1e-15, 1.0, xtol=1e-14)
        assert end == pytest.approx(mean + share * (extreme - mean), abs=1e-6)


@given(scores_lists)
def test_a_level_holds_its_point_and_stays_in_bounds(values: list[float]) -> None:
    found = level(side(values))
    assert 0.0 <= found.low <= found.point + 1e-9
    assert found.point - 1e-9 <= found.high <= 1.0
    assert level(side(values), 0.9).low >= found.low - 1e-12


def test_one_graded_sample_or_one_group_says_nothing() -> None:
    assert (level(side([0.7])).low, level(side([0.7])).high) == (0.0, 1.0)
    found = level(side([1.0, 0.0, 1.0], group=3))
    assert (found.low, found.high, found.groups) == (0.0, 1.0, 1)
    gap = change(side([1.0, 0.0, 1.0], group=3), side([1.0, 1.0, 1.0], group=3))
    assert gap is not None
    assert (gap.low, gap.high, gap.p_value) == (-1.0, 1.0, 1.0)


def test_trials_that_all_agree_are_one_trial() -> None:
    once = {f"s{i}": [float(i % 3 > 0)] for i in range(30)}
    thrice = {name: values * 3 for name, values in once.items()}
    one, three = (level(Scores.of_trials(each)) for each in (once, thrice))
    assert (one.low, one.high) == (three.low, three.high)


def test_independent_trials_count_but_a_sample_is_the_unit() -> None:
    rng = np.random.default_rng(0)
    trials = {f"s{i}": rng.binomial(1, 0.5, 3).astype(float).tolist() for i in range(100)}
    found = level(Scores.of_trials(trials))
    as_if_all, as_if_one = (
        proportion_confint(n * found.point, n, method="wilson") for n in (300, 100)
    )
    width = found.high - found.low
    assert 0.9 * (as_if_all[1] - as_if_all[0]) < width < 0.8 * (as_if_one[1] - as_if_one[0])


def test_groups_that_differ_widen_the_interval_and_are_never_dropped() -> None:
    values = ([1.0] * 18 + [0.0] * 2) * 5 + ([1.0] * 4 + [0.0] * 16) * 5
    alone, grouped = level(side(values)), level(side(values, group=20))
    assert grouped.groups == 10
    assert grouped.high - grouped.low > 2 * (alone.high - alone.low)
    base = side([1.0] * 200, group=20)
    fewer = Scores(dict(list(base.parts.items())[:-1]), base.items)  # and it names no groups
    whole, cut = change(side(values, group=20), base), change(side(values, group=20), fewer)
    assert whole is not None
    assert cut is not None
    assert (whole.groups, cut.groups) == (10, 10)
    assert cut.low == pytest.approx(whole.low, abs=0.01)
    assert cut.high == pytest.approx(whole.high, abs=0.01)


def test_a_change_of_plain_binary_scores_combines_two_wilson_intervals() -> None:
    wins, losses, n = 3, 9, 60
    base = [0.0] * wins + [1.0] * losses + [1.0] * (n - wins - losses)
    cand = [1.0] * wins + [0.0] * losses + [1.0] * (n - wins - losses)
    gap = change(side(cand), side(base))
    assert gap is not None
    (gain_low, gain_high), (loss_low, loss_high) = (
        proportion_confint(count, n, method="wilson") for count in (wins, losses)
    )
    p, q = wins / n, losses / n
    opposed = p * q / sqrt(p * (1 - p) * q * (1 - q))

    def reach(a: float, b: float) -> float:
        return sqrt(a * a + b * b + 2 * opposed * a * b)

    assert gap.point == pytest.approx(p - q)
    assert gap.low == pytest.approx(p - q - reach(p - gain_low, loss_high - q))
    assert gap.high == pytest.approx(p - q + reach(gain_high - p, q - loss_low))
    assert gap.p_value == pytest.approx(binomtest(wins, wins + losses).pvalue)
    assert gap.test == "mcnemar"


@given(
    st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=12),
    st.sampled_from([None, 2, 3]),
)
def test_swapping_the_sides_mirrors_the_change(
    pairs: list[tuple[float, float]], group: int | None
) -> None:
    one, other = (side([pair[i] for pair in pairs], group) for i in (0, 1))
    there, back = change(one, other), change(other, one)
    assert there is not None
    assert back is not None
    assert (there.low, there.high) == pytest.approx((-back.high, -back.low))
    assert there.p_value == pytest.approx(back.p_value)
    assert -1 <= there.low <= there.point <= there.high <= 1


def test_equal_arms_leave_open_what_so_few_samples_cannot_show() -> None:
    z2 = norm.ppf(0.975) ** 2
    for n in (1, 10, 100, 1540):
        gap = change(side([1.0] * n), side([1.0] * n))
        assert gap is not None
        assert gap.high == pytest.approx(z2 / (n + z2))
        assert (gap.point, gap.p_value) == (0.0, 1.0)


def test_a_hair_of_change_is_no_surer_than_none() -> None:
    """One score of 0.80 that became 0.79 must not turn an open question into a sure one."""
    none = change(side([0.8] * 100), side([0.8] * 100))
    hair = change(side([0.79] + [0.8] * 99), side([0.8] * 100))
    assert none is not None
    assert hair is not None
    assert hair.high - hair.low == pytest.approx(none.high - none.low, rel=0.05)


def test_permutation_p_values_equal_brute_force() -> None:
    cand, base = [0.9, 0.2, 0.5, 0.7, 0.1, 0.4], [0.5, 0.3, 0.1, 0.2, 0.1, 0.9]
    changes = np.subtract(cand, base)
    sums = [float(np.dot(signs, changes)) for signs in product((1, -1), repeat=6)]
    seen = changes.sum()
    tail = min(sum(s <= seen + 1e-9 for s in sums), sum(s >= seen - 1e-9 for s in sums))
    gap = change(side(cand), side(base))
    assert gap is not None
    assert gap.p_value == pytest.approx(min(1.0, 2 * tail / 64))
    assert gap.test == "permutation"


def test_grouped_p_values_swap_whole_groups() -> None:
    rng = np.random.default_rng(1)
    cand, base = (rng.random(12) for _ in range(2))
    gap = change(side(cand.tolist(), 3), side(base.tolist(), 3))
    sums = (cand - base).reshape(4, 3).sum(1)
    swapped = [float(np.dot(signs, sums)) for signs in product((1, -1), repeat=4)]
    tail = min(
        sum(s <= sums.sum() + 1e-9 for s in swapped), sum(s >= sums.sum() - 1e-9 for s in swapped)
    )
    assert gap is not None
    assert (gap.p_value, gap.groups) == (pytest.approx(min(1.0, 2 * tail / 16)), 4)


def test_sub_scores_weigh_samples_by_what_they_asked() -> None:
    counts = {"a": (1.0, 4.0), "b": (3.0, 3.0), "c": (0.0, 0.0)}
    scores = Scores.of_counts(counts)
    assert scores.parts.keys() == {"a", "b"}
    assert level(scores).point == pytest.approx(4 / 7)
    gap = change(scores, Scores.of_counts({"a": (2.0, 4.0), "b": (3.0, 3.0)}))
    assert gap is not None
    assert gap.point == pytest.approx(-1 / 7)


def test_graded_answers_that_come_to_a_whole_number_are_no_counts() -> None:
    """Their interval would be a third narrower."""
    others = {"b": (9.558, 81.0), "c": (18.392, 152.0)}
    whole, near = (level(Scores.of_counts({"a": (sum_, 152.0), **others})) for sum_ in (19, 19.001))
    assert (whole.low, whole.high) == pytest.approx((near.low, near.high), abs=1e-3)


def test_a_size_change_is_the_ratio_of_the_means() -> None:
    rng = np.random.default_rng(2)
    base = {f"s{i}": float(v) for i, v in enumerate(rng.uniform(900, 1100, 40))}
    cand = {name: value * float(rng.uniform(0.5, 0.7)) for name, value in base.items()}
    gap = size_change(cand, base)
    assert gap is not None
    assert gap.point == pytest.approx(sum(cand.values()) / sum(base.values()) - 1)
    assert gap.low < gap.point < gap.high < 0
    ratios = []
    names = list(base)
    for _ in range(4000):
        drawn = rng.choice(names, len(names))
        ratios.append(sum(cand[n] for n in drawn) / sum(base[n] for n in drawn) - 1)
    low, high = np.quantile(ratios, [0.025, 0.975])
    assert (gap.low, gap.high) == (pytest.approx(low, abs=0.005), pytest.approx(high, abs=0.005))


def test_holm_counts_comparisons_that_were_not_worth_making() -> None:
    p_values = [0.01, 0.04, 0.03, 0.6, 0.01]
    assert holm(p_values) == pytest.approx(list(multipletests(p_values, method="holm")[1]))
    assert holm([0.01], family=10) == pytest.approx([0.1])
    assert holm([]) == []


@given(st.lists(st.integers(0, 1), min_size=2, max_size=7), st.integers(1, 7))
def test_pass_k_is_the_share_of_k_subsets_that_all_succeed(trials: list[int], k: int) -> None:
    found = powers({"s": [float(score) for score in trials]}, k)
    if k > len(trials):
        assert found == {}
        return
    subsets = list(combinations(trials, k))
    assert found["s"] == pytest.approx(sum(all(each) for each in subsets) / comb(len(trials), k))


def test_pass_levels_need_repeats_of_right_or_wrong() -> None:
    trials = {f"s{i}": [1.0, float(i % 2), 1.0] for i in range(20)}
    found = pass_levels(trials)
    assert list(found) == ["pass^1", "pass^2", "pass^3"]
    assert found["pass^3"].point == pytest.approx(0.5)
    assert pass_levels({"s": [1.0]}) == {}
    assert pass_levels({"s": [0.5, 1.0]}) == {}
    assert level(pass_scores(trials, 3)).point == found["pass^3"].point


def test_medians_of_repetitions() -> None:
    found = median([5.0, 1.0, 3.0, 2.0, 4.0, 9.0, 7.0, 8.0, 6.0])
    assert (found.point, found.n) == (5.0, 9)
    assert 1.0 <= found.low < 5.0 < found.high <= 9.0
    slower = speed_change([100.0] * 9, [90.0] * 9)
    assert (slower.point, slower.low, slower.high) == pytest.approx((-0.1, -0.1, -0.1))
    assert slower.enough
    assert slower.p_value < 0.001
    with pytest.raises(ValueError, match="positive"):
        speed_change([1.0], [0.0])


def test_draws_are_the_same_for_all_arms_and_ends_leave_nan_out() -> None:
    counts = draws(7, 500)
    assert counts.shape == (500, 7)
    assert (counts.sum(1) == 7).all()
    assert draws(7, 500) is counts
    values = np.append(np.arange(1001.0), np.nan)
    assert ends(values) == (25.0, 975.0)
