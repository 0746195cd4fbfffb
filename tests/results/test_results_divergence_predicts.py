"""The correlation of divergence and success, against scipy and by construction."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import spearmanr

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from divergence_predicts import Arm, correlation, estimate


def arms_of(success: list[float], divergence: list[float], noise: float) -> list[Arm]:
    rng = np.random.default_rng(0)
    arms = []
    for number, (score, nats) in enumerate(zip(success, divergence, strict=True)):
        own = np.clip(score + noise * rng.normal(size=50), 0, 1)
        kl = np.abs(nats + noise * rng.normal(size=20))
        budget = str(256 * (1 + number % 2))
        parts = np.array([own, np.ones(50)]), np.array([kl * 90, np.full(20, 90.0)])
        arms.append(Arm(f"m{number}", f"m{number}", budget, *parts))
    return arms


def test_ranks_are_spearman_s() -> None:
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(2, 12)).round(1)
    assert correlation(x, y, None) == pytest.approx(spearmanr(x, y).statistic)
    assert correlation(x, np.zeros(12), None) == 0


def test_within_groups_the_groups_explain_nothing() -> None:
    # Across groups both fall together; within each they go against each other.
    x = np.array([1.0, 2, 3, 11, 12, 13])
    y = np.array([3.0, 2, 1, 13, 12, 11])
    assert correlation(x, y, None) > 0.5
    assert correlation(x, y, ["a"] * 3 + ["b"] * 3) == pytest.approx(-1)


def test_the_interval_is_narrow_where_samples_agree_and_wide_where_not() -> None:
    success = [0.9, 0.7, 0.5, 0.3, 0.2, 0.1]
    nats = [0.01, 0.1, 0.2, 0.4, 0.7, 1.2]
    sure = estimate(arms_of(success, nats, 0.001), lambda x, y: correlation(x, y, None))
    assert sure == (-1, -1, -1)
    loose = estimate(arms_of(success, nats, 1.5), lambda x, y: correlation(x, y, None))
    assert loose[2] - loose[1] > 0.3
