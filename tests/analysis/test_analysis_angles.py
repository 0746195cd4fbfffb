"""Principal angles: against scipy, and planes whose angles are known."""

from __future__ import annotations

import json
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import subspace_angles

from agentbench_kv.analysis.angles import PhaseSpan, phase_angles, phase_spans
from agentbench_kv.errors import UsageError

DIM = 8


def expected_pairs(numeric, capture, layer, head, k):
    """(lower phase, higher phase, degrees) of every pair, by numpy's SVD and scipy."""
    q, phases = capture.q[layer, head].numpy(), capture.phases.numpy()
    spans = [span for span in numeric.runs(phases) if span[2] - span[1] > k]
    for (a, start_a, end_a), (b, start_b, end_b) in combinations(spans, 2):
        bases = (numeric.basis(q[start_a:end_a], k), numeric.basis(q[start_b:end_b], k))
        yield *sorted((a, b)), np.degrees(subspace_angles(*bases).mean())


def long_spans(seed=0, spans=7):
    rng = np.random.default_rng(seed)
    return np.repeat(rng.integers(0, 4, spans), rng.integers(4, 12, spans))


@pytest.mark.parametrize("k", [1, 3, 5])
@pytest.mark.parametrize("seed", [0, 1])
def test_angles_are_scipys(capture, numeric, k, seed):
    phases = long_spans(seed)
    made = capture(len(phases), layers=2, q_heads=4, head_dim=DIM, extra={"phase": phases})
    found = phase_angles([made], k)
    cells = found.cells()
    for layer in range(2):
        for head in range(4):
            pairs = list(expected_pairs(numeric, made, layer, head, k))
            got = found.degrees[:, layer, head].numpy()
            np.testing.assert_allclose(got, [p[2] for p in pairs], rtol=1e-6)
            for first in range(4):
                for second in range(first, 4):
                    values = [p[2] for p in pairs if p[:2] == (first, second)]
                    mean = np.mean(values) if values else np.nan
                    for cell in (
                        cells[layer, head, first, second],
                        cells[layer, head, second, first],
                    ):
                        np.testing.assert_allclose(float(cell), mean, rtol=1e-6)


def test_pooling_is_over_pairs_layers_and_heads(capture, numeric):
    captures = []
    for seed in (0, 3):
        phases = long_spans(seed)
        made = capture(len(phases), layers=2, q_heads=2, seed=seed, extra={"phase": phases})
        captures.append(made)
    document = phase_angles(captures, 3).document()
    every = [
        pair
        for made in captures
        for layer in range(2)
        for head in range(2)
        for pair in expected_pairs(numeric, made, layer, head, 3)
    ]
    inter = [angle for a, b, angle in every if a != b]
    intra = [angle for a, b, angle in every if a == b]
    assert document["inter_pairs"] == len(inter) / 4
    assert document["intra_pairs"] == len(intra) / 4
    np.testing.assert_allclose(document["inter_mean"], np.mean(inter), rtol=1e-6)
    np.testing.assert_allclose(document["intra_mean"], np.mean(intra), rtol=1e-6)
    tool_others = [angle for a, b, angle in every if (a, b) == (2, 3)]
    if tool_others:
        np.testing.assert_allclose(document["matrix"][3][2], np.mean(tool_others), rtol=1e-6)
    json.dumps(document, allow_nan=False)


def plane(tokens, *axes):
    """Rows that vary along some axes only, far from the origin."""
    rng = np.random.default_rng(len(axes) + tokens)
    rows = np.full((tokens, DIM), 5.0, dtype="f4")
    rows[:, axes] += rng.standard_normal((tokens, len(axes))).astype("f4")
    return rows


def of_rows(capture, *blocks):
    """A capture of one layer and head, one span of phases 0, 1, 0, 1, … per block."""
    rows = np.concatenate(blocks)[None]
    phases = np.concatenate([[i % 2] * len(block) for i, block in enumerate(blocks)])
    extra = {"q": rows, "k": rows, "v": rows, "phase": phases}
    return capture(len(phases), q_heads=1, kv_heads=1, head_dim=DIM, extra=extra)


def test_planes_whose_angles_are_known(capture):
    """Centring matters: all rows share a large mean, yet some spans are orthogonal."""
    made = of_rows(capture, plane(9, 0, 1), plane(7, 2, 3), plane(8, 1, 0), plane(6, 1, 2))
    found = phase_angles([made], 2)
    # Think-act, think-think, think-act, act-think, act-act, think-act; one shared axis: 45 degrees.
    expected = [90, 0, 45, 90, 45, 45]
    np.testing.assert_allclose(found.degrees[:, 0, 0].numpy(), expected, atol=1e-3)
    document = found.document()
    assert document["inter_mean"] == pytest.approx(270 / 4, abs=1e-3)
    assert document["intra_mean"] == pytest.approx(22.5, abs=1e-3)
    assert document["larger_inter_share"] == 1.0
    assert document["cells"][0][0][0][2] is None


def test_a_span_without_enough_directions_is_left_out(capture):
    """Four rows along one axis span one direction; what a second one would be is noise."""
    made = of_rows(capture, plane(9, 0, 1), plane(6, 2), plane(7, 0, 3))
    found = phase_angles([made], 2)
    first_second, first_third, second_third = found.degrees[:, 0, 0].tolist()
    assert np.isnan(first_second)
    assert np.isnan(second_third)
    assert first_third == pytest.approx(45, abs=1e-3)
    assert found.document()["inter_mean"] is None


def test_a_span_needs_more_tokens_than_directions(capture):
    """Centring takes a direction away: k tokens span k - 1."""
    made = of_rows(capture, plane(3, 0, 1, 2), plane(4, 0, 1, 2), plane(4, 0, 1, 2))
    assert phase_angles([made], 3).spans == 2
    with pytest.raises(UsageError, match=r"needs two spans of more than 4 tokens .*; found 0 in 1"):
        phase_angles([made], 4)


@pytest.mark.parametrize("k", [0, -1, DIM + 1])
def test_dimensions_out_of_range(capture, k):
    with pytest.raises(UsageError, match=rf"k={k}: expected 1 to the head dimension, {DIM}"):
        phase_angles([capture(40)], k)


def test_captures_of_different_models(capture):
    with pytest.raises(UsageError, match="give captures of one model"):
        phase_angles([capture(40), capture(40, layers=2)])


def test_a_rotation_of_all_queries_changes_nothing(capture):
    phases = long_spans(5)
    made = capture(len(phases), layers=2, extra={"phase": phases})
    rotation, _ = np.linalg.qr(np.random.default_rng(0).standard_normal((DIM, DIM)))
    turned = (made.q.double() @ torch.as_tensor(rotation)).float()
    again = capture(len(phases), layers=2, extra={"phase": phases, "q": turned})
    np.testing.assert_allclose(phase_angles([made], 3).degrees, phase_angles([again], 3).degrees,
                               rtol=1e-4)  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(phases=st.lists(st.integers(0, 3), min_size=1, max_size=30), shortest=st.integers(1, 4))
def test_spans_are_the_maximal_runs(numeric, phases, shortest):
    found = phase_spans(torch.tensor(phases), shortest)
    runs = numeric.runs(phases)
    assert found == [PhaseSpan(*run) for run in runs if run[2] - run[1] >= shortest]
