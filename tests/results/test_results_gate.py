"""The gate: how often it is wrong, what it can tell, and what it says it can."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from scipy.stats import multinomial

from agentbench_kv.errors import UsageError
from agentbench_kv.results.contrast import _slower
from agentbench_kv.results.gate import (
    Design,
    Rule,
    Verdict,
    chances,
    samples_for,
    smallest_caught,
    units_to_decide,
    worst,
)
from agentbench_kv.results.stats import Scores, change, size_change, speed_change

DEFAULT = Rule.of(1, None)
OK, OPEN, REGRESSION = Verdict


def judged(rule, cand, base, groups=None):
    """Judge two arrays of scores as a comparison does."""
    sides = [
        Scores({str(i): (float(score), 1.0) for i, score in enumerate(side)}, {}, groups or {})
        for side in (cand, base)
    ]
    seen, sure = (change(*sides, level, tested=False) for level in (0.95, 1 - rule.alarm))
    return rule.judge(seen.low, sure.high)


@cache
def verdicts(n):
    """Return the verdict on every number of wins and losses that is at all likely."""
    most = min(n, int(0.2 * n + 40))
    found = {}
    for wins in range(most):
        for losses in range(min(most, n - wins + 1, int(0.3 * n + 45) - wins)):
            cand, base = np.zeros((2, n))
            cand[:wins], base[wins : wins + losses] = 1, 1
            found[wins, losses] = judged(DEFAULT, cand, base)
    return found


def enumerated(n, loss, differ):
    """Sum the trinomial chances of every verdict."""
    differ = max(differ, abs(loss))
    p = [(differ - loss) / 2, (differ + loss) / 2, 1 - differ]
    table = verdicts(n)
    counts = np.array([(won, lost, n - won - lost) for won, lost in table])
    chance = multinomial.pmf(counts, n, p)
    assert chance.sum() > 1 - 1e-5
    said = np.array([str(verdict) for verdict in table.values()])
    return {verdict: float(chance[said == verdict].sum()) for verdict in Verdict}


@pytest.mark.slow
@pytest.mark.parametrize("n", [50, 200])
@pytest.mark.parametrize("differ", [0.02, 0.05, 0.1, 0.15, 0.3])
def test_every_outcome_there_is_seldom_gets_the_wrong_word(n, differ):
    for loss in (-0.1, -0.02, 0.0, 0.005, 0.01):
        assert enumerated(n, loss, differ)[REGRESSION] <= 0.016
    for loss in (0.1, 0.105, 0.12, 0.15, 0.2):
        assert enumerated(n, loss, differ)[OK] <= 0.03
    for loss in (0.0, 0.05, 0.1, 0.15):
        alone = chances(DEFAULT, Design(n, differ), loss)
        for verdict, chance in enumerated(n, loss, differ).items():
            assert alone[verdict] == pytest.approx(chance, abs=1e-5)


def test_two_hundred_samples_catch_ten_points():
    """The figures of the issue: discordance up to 15%, n = 200."""
    for differ in (0.02, 0.05, 0.1, 0.15):
        design = Design(200, differ)
        assert chances(DEFAULT, design, 0.1)[REGRESSION] >= 0.9
        assert chances(DEFAULT, design, 0.01)[REGRESSION] <= 0.015
        assert chances(DEFAULT, design, 0.0)[REGRESSION] <= 0.006
        assert chances(DEFAULT, design, 0.1)[OK] <= 0.025
        assert chances(DEFAULT, design, 0.0)[OK] >= 0.94


def test_a_job_of_many_rows_raises_no_more_false_alarms():
    design = Design(200)
    for rows in (5, 20, 100):
        alarm = chances(Rule.of(1, None, rows), design, 0.01)[REGRESSION]
        assert 1 - (1 - alarm) ** rows <= 0.02


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize(("margin", "catch"), [(1, 10), (2, 2), (0, 5)])
def test_the_limits_are_those_of_a_search_through_all_outcomes(margin, catch, rows):
    rule, n, loss = Rule.of(margin, catch, rows), 30, 0.05
    found = dict.fromkeys(Verdict, 0.0)
    for wins in range(n + 1):
        for losses in range(n - wins + 1):
            cand, base = np.zeros((2, n))
            cand[:wins], base[wins : wins + losses] = 1, 1
            p = [0.075, 0.125, 0.8]
            chance = multinomial.pmf([wins, losses, n - wins - losses], n, p)
            found[judged(rule, cand, base)] += chance
    for verdict, chance in chances(rule, Design(n, 0.2), loss).items():
        assert chance == pytest.approx(found[verdict], abs=1e-6)


@pytest.mark.parametrize("n", [20, 50, 100, 200])
@pytest.mark.parametrize(("margin", "catch"), [(2, 2), (1, 10)])
def test_rare_total_losses_of_graded_scores_are_not_ok(n, margin, catch):
    """Scores that jitter by 0.01, and now and then fall to 0: few samples never show it."""
    rule, rng = Rule.of(margin, catch), np.random.default_rng(n)
    for share in (margin / 80, 0.02, 0.025, 0.05, catch / 80):
        said = []
        for _ in range(150):
            base, cand = np.clip(0.8 + rng.normal(0, 0.01, (2, n)), 0, 1)
            cand[rng.random(n) < share] = 0
            said.append(judged(rule, cand, base))
        if 80 * share <= margin:
            assert said.count(REGRESSION) <= 0.02 * len(said)
        if 80 * share >= catch:
            assert said.count(OK) <= 0.05 * len(said)


@pytest.mark.parametrize("shape", ["graded", "binary"])
@pytest.mark.parametrize("number", [5, 10, 20])
def test_groups_of_samples(shape, number):
    rng, group = np.random.default_rng(number), np.repeat(np.arange(number), 20)
    names = {str(i): f"g{each}" for i, each in enumerate(group)}
    for loss, wrong, most in ((0.01, REGRESSION, 0.02), (0.1, OK, 0.05)):
        said = []
        for _ in range(600):
            shift = rng.normal(0, 0.07, number)[group] - loss
            if shape == "graded":
                base = np.clip(0.5 + rng.normal(0, 0.1, group.size), 0, 1)
                cand = np.clip(base + shift + rng.normal(0, 0.1, group.size), 0, 1)
            else:
                right = rng.beta(8, 8, number)[group]
                chance = np.stack([right, np.clip(right + shift, 0, 1)])
                base, cand = rng.random((2, group.size)) < chance
            said.append(judged(DEFAULT, cand, base, names))
        # In 2,000 draws: regression 0.8 to 1.6%, ok 2.4 to 2.6%. Two errors of 600 are let pass.
        assert said.count(wrong) <= 600 * (most + 2 * np.sqrt(most / 600))


def test_sizes_cover_and_a_saving_is_no_loss():
    rng, covered = np.random.default_rng(4), 0
    for _ in range(1000):
        base = rng.uniform(800, 1200, 60)
        cand = base * rng.normal(0.8, 0.1, 60)
        sides = [{str(i): v for i, v in enumerate(side)} for side in (cand, base)]
        found = size_change(*sides)
        covered += found.low <= -0.2 <= found.high
    assert 0.93 <= covered / 1000 <= 0.97


@pytest.mark.slow
def test_nine_repetitions_seldom_call_an_equal_speed_slower():
    rng, wrong, caught = np.random.default_rng(5), 0, 0
    for _ in range(300):
        base, same, slow = (list(rng.normal(mean, 3, 9)) for mean in (100, 99, 90))
        for cand, loss in ((same, 0), (slow, 1)):
            found = speed_change(base, cand)
            said = DEFAULT.judge(found.low, found.high) is REGRESSION
            said = said and _slower(base, cand, DEFAULT)
            wrong, caught = wrong + said * (1 - loss), caught + said * loss
    assert wrong <= 0.02 * 300
    assert caught >= 0.9 * 300


def test_words_and_exit_codes():
    rule = Rule.of(2, 10)
    assert rule.judge(-0.5, -0.03) is REGRESSION
    assert rule.judge(-0.05, 0.5) is OK
    assert rule.judge(-0.05, -0.03) is REGRESSION  # a proven loss, though a small one
    assert rule.judge(-0.11, 0.5) is OPEN
    assert rule.judge(-0.10, -0.02) is OPEN
    assert [v.exit_code for v in Verdict] == [0, 4, 3]
    assert worst([OK, REGRESSION, OPEN]) is REGRESSION
    assert worst([OK, OPEN]) is OPEN


def test_the_loss_to_catch_is_at_least_the_margin():
    assert Rule.of(1, None) == Rule(0.01, 0.1)
    assert Rule.of(30, None) == Rule(0.3, 0.3)
    for margin, catch in ((-1, None), (100, None), (5, 4), (0, 0), (1, 101), (float("nan"), 5)):
        with pytest.raises(UsageError, match=r"margin|catch"):
            Rule.of(margin, catch)
    with pytest.raises(UsageError, match="catch nan"):
        Rule.of(1, float("nan"))


@pytest.mark.parametrize(("point", "verdict"), [(0.0, OK), (-0.15, REGRESSION)])
def test_the_samples_that_are_asked_for_decide(point, verdict):
    spread = np.sqrt(0.3 - point**2)
    needed = units_to_decide(DEFAULT, point, spread, 10)
    assert 0.72 <= chances(DEFAULT, Design(needed, 0.3), -point)[verdict] <= 0.88


def test_equal_arms_are_ok_from_the_number_on_that_was_named():
    needed = units_to_decide(DEFAULT, 0.0, 0.0, 10)
    equal = np.ones(needed)
    assert judged(DEFAULT, equal, equal) is OK
    assert judged(DEFAULT, equal[1:], equal[1:]) is OPEN
    assert units_to_decide(DEFAULT, 0.0, 0.0, 500) == 501


def test_a_change_on_both_limits_is_never_decided():
    assert units_to_decide(Rule.of(2, 2), -0.02, 0.5, 100) is None
    assert units_to_decide(Rule.of(2, 3), -0.02, 0.5, 100) > 100


def test_a_plan_says_what_comes_true():
    design = Design(200)
    least = smallest_caught(DEFAULT, design)
    assert chances(DEFAULT, design, least)[REGRESSION] >= 0.9
    assert chances(DEFAULT, design, least - 0.005)[REGRESSION] < 0.9
    assert smallest_caught(Rule.of(1, None, 10_000), Design(3)) is None
    for verdict, loss in ((REGRESSION, 0.1), (OK, 0.0)):
        needed = samples_for(DEFAULT, design, verdict, loss)
        for n in (needed, needed + 40):
            assert chances(DEFAULT, design.of(n), loss)[verdict] >= 0.89
        assert chances(DEFAULT, design.of(needed - 20), loss)[verdict] < 0.9
    assert samples_for(DEFAULT, design, REGRESSION, 0.01) is None


def test_beyond_what_can_be_enumerated_the_chances_go_on():
    for loss in (0.0, 0.01, 0.03, 0.05):
        exact, close = (chances(DEFAULT, Design(n), loss) for n in (1000, 1001))
        for verdict in Verdict:
            assert close[verdict] == pytest.approx(exact[verdict], abs=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("design", [Design(200, 0.15, groups=10), Design(100, 0.3, trials=4)])
def test_what_is_approximated_is_near_a_simulation(design):
    rng, said = np.random.default_rng(8), {0.0: [], 0.1: []}
    group = {str(i): f"g{i % (design.groups or 1)}" for i in range(design.samples)}
    for loss, found in said.items():
        p = [(design.discordance - loss) / 2, (design.discordance + loss) / 2]
        for _ in range(1000):
            moves = rng.choice([1, -1, 0], (design.samples, design.trials), p=[*p, 1 - sum(p)])
            moved = moves.mean(1)
            sides = (
                (moved > 0, moved < 0) if design.trials == 1 else (0.5 + moved / 2, 0.5 - moved / 2)
            )
            found.append(judged(DEFAULT, *sides, group if design.groups else None))
    for loss, verdict in ((0.0, OK), (0.1, REGRESSION)):
        expected = chances(DEFAULT, design, loss)[verdict]
        assert said[loss].count(verdict) / 1000 == pytest.approx(expected, abs=0.1)
