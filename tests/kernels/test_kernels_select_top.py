"""select_top against a Python sort with key (always, -score, index)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from kernels_reference import select_top as reference

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


MANY = settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def check(scores, budget, always=None, device="cpu"):
    mask = None if always is None else torch.tensor(always, device=device)
    got = select_top(torch.tensor(scores, dtype=torch.float32, device=device), budget, mask)
    assert got.dtype == torch.int64
    assert got.tolist() == brute_force(scores, budget, always or [False] * len(scores))


@MANY
@given(scores=st.lists(VALUES, min_size=1, max_size=24), budget=st.integers(1, 30))
@example(scores=[NAN, 1.0, NAN, 0.0], budget=3)
@example(scores=[1.0] * 6, budget=4)
@example(scores=[INF, INF, -INF], budget=1)
@example(scores=[NAN, -INF], budget=1)
def test_select_top_matches_a_python_sort(scores, budget, device):
    check(scores, budget, device=device)


@MANY
@given(data=st.data(), scores=st.lists(VALUES, min_size=1, max_size=24))
def test_select_top_takes_always_first(data, scores, device):
    budget = data.draw(st.integers(1, len(scores) + 2))
    marked = data.draw(st.sets(st.integers(0, len(scores) - 1), max_size=budget))
    check(scores, budget, [index in marked for index in range(len(scores))], device)


def test_select_top_always_beats_an_infinite_score(device):
    check([INF, 0.0, 1.0], 1, [False, True, False], device)


def test_select_top_nan_is_below_minus_infinity(device):
    check([NAN, -INF, NAN], 1, device=device)


@pytest.mark.parametrize("shape", [(7,), (2, 7), (2, 3, 7)])
def test_select_top_any_leading_dimensions(shape, device):
    scores = torch.randint(0, 4, shape, device=device).float()
    got = select_top(scores, 3)
    assert got.shape == (*shape[:-1], 3)
    for row, kept in zip(scores.reshape(-1, 7).tolist(), got.reshape(-1, 3).tolist(), strict=True):
        assert kept == brute_force(row, 3, [False] * 7)


@pytest.mark.parametrize("budget", [5, 6, 100])
def test_select_top_takes_all_if_there_are_fewer(budget, device):
    got = select_top(torch.tensor([[NAN, -INF, 0.0, INF, 1.0]] * 2, device=device), budget)
    assert got.tolist() == [[0, 1, 2, 3, 4]] * 2


def test_select_top_of_a_view_and_of_expanded_scores(device):
    wide = torch.randn(4, 20, device=device)
    assert torch.equal(select_top(wide[:, 3:11], 3), select_top(wide[:, 3:11].contiguous(), 3))
    same = wide[:1].expand(5, -1)
    assert torch.equal(select_top(same, 3), select_top(same.contiguous(), 3))


def test_select_top_leaves_its_input_alone(device):
    scores = torch.tensor([NAN, 1.0, 2.0], device=device)
    always = torch.tensor([True, False, False], device=device)
    select_top(scores, 2, always)
    assert scores.nan_to_num(7.0).tolist() == [7.0, 1.0, 2.0]
    assert always.tolist() == [True, False, False]


def test_select_top_is_exact_in_float64(device):
    check_row = torch.tensor([1.0, 1.0 + 1e-12, 1.0], dtype=torch.float64, device=device)
    assert select_top(check_row, 1).tolist() == [1]


def test_select_top_is_exact_in_integers(device):
    scores = torch.tensor([2**24, 2**24 + 1, 2**24], device=device)
    assert select_top(scores, 1).tolist() == [1]


KINDS = ["normal", "ties", "all equal", "few bits", "special", "both zeros"]


def draw(kind, rows, tokens, seed=0):
    """Scores that differ in all bits, in few, in the last ones only, or not at all."""
    rng = np.random.default_rng(seed)
    shape = (rows, tokens)
    special = np.array([NAN, INF, -INF, 0.0, -0.0, 1e-45, -1e-45, 3.4e38, 1.0], np.float32)
    drawn = {
        "normal": rng.normal(size=shape),
        "ties": rng.integers(0, 5, shape),
        "all equal": np.full(shape, -1.5),
        "few bits": 1 + rng.integers(0, 9, shape) * 2.0**-23,
        "special": special[rng.integers(0, len(special), shape)],
        "both zeros": np.where(rng.random(shape) < 0.5, 0.0, -0.0),
    }
    return drawn[kind].astype(np.float32)


def compare(scores, budget, device, always=None, dtype=torch.float32, positions=None):
    given_scores = torch.from_numpy(scores).to(dtype).to(device)
    mask = None if always is None else torch.from_numpy(always).to(device)
    places = None if positions is None else torch.from_numpy(positions).to(device)
    got = select_top(given_scores, budget, mask, places)
    expected = reference(given_scores.float().cpu().numpy(), budget, always, positions)
    assert got.dtype == torch.int64
    assert np.array_equal(got.cpu().numpy(), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 2, 31, 255, 257, 1023, 1025, 2048, 2600])
def test_select_top_of_rows_that_fit_no_block(tokens, kind, device):
    scores = draw(kind, 3, tokens)
    for budget in {0, 1, 2, tokens // 2, max(tokens - 1, 0), tokens}:
        compare(scores, budget, device)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [33, 1025, 2600])
def test_select_top_with_marks_up_to_the_whole_budget(tokens, kind, device):
    rng = np.random.default_rng(tokens)
    scores = draw(kind, 4, tokens)
    budget = tokens // 3
    always = np.zeros(scores.shape, bool)
    for row, count in enumerate((0, 1, budget // 2, budget)):
        always[row, rng.permutation(tokens)[:count]] = True
    compare(scores, budget, device, always)


def draw_positions(rows, tokens, most):
    """Distinct positions below `most` in no order, others in every row."""
    rng = np.random.default_rng(tokens)
    return np.stack([rng.choice(most, tokens, replace=False) for _ in range(rows)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 2, 255, 1025, 2600])
@pytest.mark.parametrize("spread", [1, 3, 50])
def test_select_top_breaks_ties_by_position(tokens, kind, spread, device):
    scores = draw(kind, 3, tokens)
    positions = draw_positions(3, tokens, spread * tokens)
    always = np.zeros(scores.shape, bool)
    always[1, : tokens // 4] = True
    for budget in {1, tokens // 3, max(tokens - 1, 1), tokens}:
        compare(scores, budget, device, positions=positions)
        if budget >= tokens // 4:
            compare(scores, budget, device, always, positions=positions)


def test_select_top_of_the_largest_positions(device):
    positions = np.array([[2**32 - 1, 0, 2**31, 2**32 - 2, 255, 256]])
    for budget in range(1, 7):
        compare(np.ones((1, 6), np.float32), budget, device, positions=positions)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_select_top_of_halves(kind, dtype, device):
    compare(draw(kind, 3, 700), 100, device, dtype=dtype)


@pytest.mark.parametrize("kind", ["normal", "ties", "special"])
@pytest.mark.parametrize("tokens", [65537, 131072])
def test_select_top_of_long_contexts(tokens, kind, device):
    scores = draw(kind, 2, tokens)
    for budget in (1, 2048, tokens - 1):
        compare(scores, budget, device)


def test_select_top_one_mask_for_all_rows(device):
    scores = draw("normal", 5, 300)
    always = np.zeros(300, bool)
    always[[3, 250]] = True
    got = select_top(torch.from_numpy(scores).to(device), 7, torch.from_numpy(always).to(device))
    expected = reference(scores, 7, np.broadcast_to(always, scores.shape))
    assert np.array_equal(got.cpu().numpy(), expected)


@pytest.mark.parametrize("shape", [(0, 5), (2, 0), (2, 0, 4)])
def test_select_top_of_nothing(shape, device):
    got = select_top(torch.zeros(shape, device=device), 3)
    assert got.shape == (*shape[:-1], min(3, shape[-1]))
