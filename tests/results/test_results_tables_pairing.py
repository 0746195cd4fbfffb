"""The figures of many pairs at once are those of one call each."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from agentbench_kv.results.paired import paired_difference, paired_ratio_difference
from agentbench_kv.results.statistics import interval, ratio_interval, steady_ends
from agentbench_kv.results.tables.pairing import Scores, differences, intervals, spans

KINDS = {
    "binary": lambda rng: [float(rng.random() < 0.6)],
    "graded": lambda rng: [float(rng.random())],
    "repeated": lambda rng: [float(rng.random()) for _ in range(3)],
}


def draw(rng, kind, n, start=0):
    return {f"s{i}": KINDS[kind](rng) for i in range(start, start + n)}


@pytest.fixture(scope="module")
def arms():
    """Pairs of all kinds and two sizes, overlapping in part, so that one draw serves several."""
    rng = np.random.default_rng(5)
    return [
        (draw(rng, a, 30), draw(rng, b, size, start))
        for a, b, (size, start) in product(KINDS, KINDS, [(30, 0), (25, 10)])
    ]


def test_differences_are_those_of_one_call_each(arms):
    together = differences([(Scores.of_trials(a), Scores.of_trials(b)) for a, b in arms])
    for (a, b), found in zip(arms, together, strict=True):
        expected = paired_difference(a, b)
        assert (found.n, found.test) == (expected.n, expected.test)
        assert [found.point, found.low, found.high] == pytest.approx(
            [expected.point, expected.low, expected.high], abs=1e-9
        )
        # Two Monte Carlo tests of the same thing; McNemar is exact.
        slack = 1e-12 if found.test == "mcnemar" else 0.025
        assert found.p_value == pytest.approx(expected.p_value, abs=slack)


def test_a_permutation_test_of_few_samples_is_exact():
    rng = np.random.default_rng(2)
    a, b = draw(rng, "graded", 10), draw(rng, "graded", 10)
    (found,) = differences([(Scores.of_trials(a), Scores.of_trials(b))])
    gaps = np.array([a[name][0] - b[name][0] for name in a])
    sums = np.array([np.dot(signs, gaps) for signs in product((1, -1), repeat=10)])
    tail = min((sums <= gaps.sum() + 1e-9).mean(), (sums >= gaps.sum() - 1e-9).mean())
    assert found.p_value == pytest.approx(min(1.0, 2 * tail))


def test_clusters_are_what_is_resampled():
    rng = np.random.default_rng(3)
    a, b = draw(rng, "graded", 60), draw(rng, "graded", 60)
    clusters = {f"s{i}": f"c{i // 3}" for i in range(60)}
    (found,) = differences([(Scores.of_trials(a, clusters), Scores.of_trials(b, clusters))])
    expected = paired_difference(a, b, clusters=clusters)
    assert found.clusters == expected.clusters == 20
    assert [found.low, found.high] == pytest.approx([expected.low, expected.high], abs=1e-9)


def test_ratios_weigh_samples_by_what_was_asked():
    rng = np.random.default_rng(4)
    asked = {f"s{i}": float(rng.integers(1, 6)) for i in range(50)}
    a, b = ({k: (float(rng.integers(0, v + 1)), v) for k, v in asked.items()} for _ in "ab")
    pair = (Scores(a, ratio=True), Scores(b, ratio=True))
    (found,), expected = differences([pair]), paired_ratio_difference(a, b)
    assert [found.point, found.low, found.high] == pytest.approx(
        [expected.point, expected.low, expected.high], abs=1e-9
    )
    (alone,) = intervals([pair[0]])
    known = ratio_interval({k: v[0] for k, v in a.items()}, asked)
    assert [alone.point, alone.low, alone.high] == pytest.approx(
        [known.point, known.low, known.high]
    )
    assert alone.method == known.method


def test_spans_are_the_differences_without_their_tests(arms):
    pairs = [(Scores.of_trials(a), Scores.of_trials(b)) for a, b in arms]
    for span, gap in zip(spans(pairs), differences(pairs), strict=True):
        assert (span.point, span.low, span.high, span.n) == (gap.point, gap.low, gap.high, gap.n)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("grouped", [False, True])
def test_intervals_are_those_of_one_call_each(kind, grouped):
    rng = np.random.default_rng(6)
    clusters = {f"s{i}": f"c{i // 2}" for i in range(40)} if grouped else {}
    arms = [draw(rng, kind, 40) for _ in range(3)]
    for arm, found in zip(
        arms, intervals([Scores.of_trials(a, clusters) for a in arms]), strict=True
    ):
        expected = interval(arm, clusters)
        assert (found.method, found.n) == (expected.method, expected.n)
        assert [found.point, found.low, found.high] == pytest.approx(
            [expected.point, expected.low, expected.high], abs=1e-9
        )


def test_constant_scores_and_constant_gaps_get_wilson():
    same = {f"s{i}": [0.5, 0.5] for i in range(8)}
    (found,) = intervals([Scores.of_trials(same)])
    assert found == interval(same)
    more = {name: [0.75] for name in same}
    (gap,) = differences([(Scores.of_trials(more), Scores.of_trials(same))])
    assert gap.point == 0.25
    assert (gap.low, gap.high) == pytest.approx(steady_ends(0.25, 8))


def test_arms_without_a_shared_sample_have_no_difference():
    a, b = Scores.of_trials({"x": [1.0]}), Scores.of_trials({"y": [1.0]})
    assert differences([(a, b), (a, a)])[0] is None
    assert spans([(a, b)]) == [None]


def test_an_arm_without_samples_is_refused():
    with pytest.raises(ValueError, match="no scores"):
        intervals([Scores({})])
