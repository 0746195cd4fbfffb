"""select_top against a Python sort with key (always, -score, index)."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agentbench_kv.kernels import select_top

NAN, INF = math.nan, math.inf
VALUES = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, -1.0, NAN, INF, -INF]),
    st.floats(width=32, allow_nan=True, allow_infinity=True),
)


def brute_force(scores, budget, always):
    """NaN below everything (also below -inf), always first, ties to the lower index."""

    def rank(index):
        score = scores[index]
        nan = math.isnan(score)
        return (not always[index], nan, 0.0 if nan else -score, index)

    return sorted(sorted(range(len(scores)), key=rank)[:budget])


def check(scores, budget, always=None):
    mask = None if always is None else torch.tensor(always)
    got = select_top(torch.tensor(scores, dtype=torch.float32), budget, mask)
    assert got.dtype == torch.int64
    assert got.tolist() == brute_force(scores, budget, always or [False] * len(scores))


@settings(max_examples=200, deadline=None)
@given(scores=st.lists(VALUES, min_size=1, max_size=24), budget=st.integers(1, 30))
@example(scores=[NAN, 1.0, NAN, 0.0], budget=3)
@example(scores=[1.0] * 6, budget=4)
@example(scores=[INF, INF, -INF], budget=1)
@example(scores=[NAN, -INF], budget=1)
def test_select_top_matches_a_python_sort(scores, budget):
    check(scores, budget)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), scores=st.lists(VALUES, min_size=1, max_size=24))
def test_select_top_takes_always_first(data, scores):
    budget = data.draw(st.integers(1, len(scores) + 2))
    marked = data.draw(st.sets(st.integers(0, len(scores) - 1), max_size=budget))
    check(scores, budget, [index in marked for index in range(len(scores))])


def test_select_top_always_beats_an_infinite_score():
    check([INF, 0.0, 1.0], 1, [False, True, False])


def test_select_top_nan_is_below_minus_infinity():
    check([NAN, -INF, NAN], 1)


@pytest.mark.parametrize("shape", [(7,), (2, 7), (2, 3, 7)])
def test_select_top_any_leading_dimensions(shape):
    scores = torch.randint(0, 4, shape).float()
    got = select_top(scores, 3)
    assert got.shape == (*shape[:-1], 3)
    for row, kept in zip(scores.reshape(-1, 7).tolist(), got.reshape(-1, 3).tolist(), strict=True):
        assert kept == brute_force(row, 3, [False] * 7)


@pytest.mark.parametrize("budget", [5, 6, 100])
def test_select_top_takes_all_if_there_are_fewer(budget):
    got = select_top(torch.tensor([[NAN, -INF, 0.0, INF, 1.0]] * 2), budget)
    assert got.tolist() == [[0, 1, 2, 3, 4]] * 2


def test_select_top_of_a_view_and_of_expanded_scores():
    wide = torch.randn(4, 20)
    assert torch.equal(select_top(wide[:, 3:11], 3), select_top(wide[:, 3:11].contiguous(), 3))
    same = wide[:1].expand(5, -1)
    assert torch.equal(select_top(same, 3), select_top(same.contiguous(), 3))


def test_select_top_leaves_its_input_alone():
    scores = torch.tensor([NAN, 1.0, 2.0])
    always = torch.tensor([True, False, False])
    select_top(scores, 2, always)
    assert torch.equal(scores.nan_to_num(7.0), torch.tensor([7.0, 1.0, 2.0]))
    assert always.tolist() == [True, False, False]


def test_select_top_is_exact_in_float64():
    check_row = torch.tensor([1.0, 1.0 + 1e-12, 1.0], dtype=torch.float64)
    assert select_top(check_row, 1).tolist() == [1]
