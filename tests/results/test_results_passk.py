"""pass^k against brute force, and its interval by simulation."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from agentbench_kv.results.passk import pass_power, pass_powers


@pytest.mark.parametrize("k", [1, 2, 3])
def test_it_is_the_share_of_k_subsets_that_all_pass(k):
    scores = {"a": [1, 0, 1, 1], "b": [0, 0, 1], "c": [1, 1, 1, 1, 0.5]}
    subsets = [list(combinations(trials, k)) for trials in scores.values()]
    expected = np.mean([np.mean([all(s == 1 for s in sub) for sub in all_]) for all_ in subsets])
    assert pass_power(scores, k).point == pytest.approx(expected)


def test_samples_with_fewer_trials_do_not_count():
    assert pass_power({"a": [1, 1], "b": [0]}, 2).n == 1
    assert pass_power({"b": [0]}, 2) is None
    with pytest.raises(ValueError, match="at least 1"):
        pass_power({"b": [0]}, 0)


def test_groups_of_samples_are_what_is_resampled():
    scores = {f"s{i}": [i % 2, 1] for i in range(12)}
    found = pass_power(scores, 2, clusters={f"s{i}": f"g{i // 4}" for i in range(12)})
    assert found.n == 3


def test_all_powers_of_as_many_trials_as_every_sample_has():
    scores = {"a": [1, 1, 0, 1], "b": [1, 0, 1], "c": [0, 0, 0, 0, 1]}
    found = pass_powers(scores, resamples=200)
    assert list(found) == ["pass^1", "pass^2", "pass^3"]
    assert found["pass^2"] == pass_power(scores, 2, resamples=200)
    many = {name: [1.0] * 20 for name in "ab"}
    assert list(pass_powers(many, resamples=50)) == [
        f"pass^{k}" for k in (1, 2, 3, 4, 5, 6, 7, 8, 16, 20)
    ]


@pytest.mark.parametrize("scores", [{"a": [1], "b": [1, 0]}, {"a": [1, 0.5], "b": [1, 0]}, {}])
def test_single_trials_and_graded_scores_have_no_powers(scores):
    assert pass_powers(scores) == {}


@pytest.mark.slow
def test_the_interval_covers_the_truth_and_the_point_is_unbiased():
    rng = np.random.default_rng(5)
    truth = np.mean(rng.beta(2, 1, 200_000) ** 2)
    points, covered = [], 0
    for _ in range(2000):
        ability = rng.beta(2, 1, 40)
        trials = (rng.random((40, 4)) < ability[:, None]).astype(float)
        found = pass_power({str(i): list(t) for i, t in enumerate(trials)}, 2, resamples=400)
        points.append(found.point)
        covered += found.low <= truth <= found.high
    assert np.mean(points) == pytest.approx(truth, abs=0.01)
    assert 0.93 <= covered / 2000 <= 0.97
