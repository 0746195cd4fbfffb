"""Fidelity's figures against float64 numpy, and what is counted under which name."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from agentbench_kv.analysis.fidelity import FidelityCounts, compare, distance_group
from agentbench_kv.errors import UsageError


def softmax(logits):
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def reference(full, other, tokens):
    p, q = softmax(full.astype(np.float64)), softmax(other.astype(np.float64))
    rows = np.arange(len(tokens))
    ranked = np.sort(p, -1)
    same = p.argmax(-1) == q.argmax(-1)
    return {
        "kl": (p * (np.log(p) - np.log(q))).sum(-1),
        "dnll": np.log(p[rows, tokens]) - np.log(q[rows, tokens]),
        "top1": same,
        "flips": ~same & (ranked[:, -1] - ranked[:, -2] > 0.1),
        "right": q.argmax(-1) == tokens,
        "right_full": p.argmax(-1) == tokens,
    }


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("scale", [0.0, 0.1, 3.0])
def test_figures_are_those_of_the_definition(tokens, scale):
    draw = torch.Generator().manual_seed(tokens)
    full = 4 * torch.randn(tokens, 50, generator=draw)
    other = full + scale * torch.randn(tokens, 50, generator=draw)
    ids = torch.randint(50, (tokens,), generator=draw)
    ids[::2] = full.argmax(-1)[::2]
    found = compare(full, other, ids)
    expected = reference(full.numpy(), other.numpy(), ids.numpy())
    for name, values in expected.items():
        np.testing.assert_allclose(getattr(found, name).numpy(), values, rtol=1e-4, atol=2e-6)
    assert (scale < 3) or (found.flips.any() and not found.top1.all())


def test_no_logits_are_the_full_caches():
    full, ids = torch.randn(7, 20), torch.arange(7)
    shared, copied = compare(full, None, ids), compare(full, full.clone(), ids)
    for name in ("kl", "dnll", "top1", "flips", "right", "right_full"):
        assert torch.equal(getattr(shared, name).float(), getattr(copied, name).float()), name


def test_sums_by_group_and_calls():
    full = torch.eye(4) * 9  # the best token of row i is i
    other = full.clone()
    other[2] = torch.tensor([0.0, 9.0, 0.0, 0.0])  # a flip at the third token
    ids = torch.arange(4)
    groups = [("_act",), ("_act", "_value"), ("_act", "_value"), ("_others",)]
    counts = FidelityCounts()
    # A call of two tokens, both right; one of one token, which the method gets wrong.
    counts.add(compare(full, other, ids), groups, [True, False, True, False])
    counts.end_call()
    found = counts.metrics()
    assert (found["top1_right"], found["top1_asked"]) == (3, 4)
    assert (found["flips_value_total"], found["flips_value_count"]) == (1, 2)
    assert (found["calls_exact_right"], found["calls_exact_asked"]) == (1, 2)
    assert (found["calls_exact_full_right"], found["calls_exact_full_asked"]) == (2, 2)
    assert found["kl_count"] == 4
    assert found["kl_total"] == pytest.approx(found["kl_act_total"])
    assert found["kl_others_total"] == 0
    assert found["kl_total"] > 5


def test_a_call_that_two_stretches_share_is_one():
    full, ids = torch.eye(4) * 9, torch.arange(4)
    counts = FidelityCounts()
    figures = compare(full, None, ids)
    counts.add(figures, [()] * 4, [False, True, True, True])
    counts.add(figures, [()] * 4, [True, False, False, False])
    counts.end_call()
    assert counts.metrics()["calls_exact_asked"] == 1


def test_distances_have_names():
    named = [distance_group(n) for n in (None, 1, 2, 8, 9, 128, 129)]
    assert named == ["_before", "_to1", "_to8", "_to8", "_to32", "_to128", "_later"]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("side", ["full", "other"])
def test_logits_that_are_no_numbers_are_refused(value, side):
    """Two NaN have the same best token, and no mean had their KL: a broken model was at 100 %."""
    logits = {"full": torch.randn(3, 7), "other": torch.randn(3, 7)}
    logits[side][1, 4] = value
    with pytest.raises(UsageError, match="logits are no numbers"):
        compare(*logits.values(), torch.tensor([1, 2, 3]))


def test_tokens_that_both_models_rule_out_are_no_distance():
    full, other = torch.randn(3, 7), torch.randn(3, 7)
    full[:, 5] = other[:, 5] = float("-inf")
    found = compare(full, other, torch.tensor([1, 2, 3]))
    kept = [0, 1, 2, 3, 4, 6]
    without = compare(full[:, kept], other[:, kept], torch.tensor([1, 2, 3]))
    assert torch.allclose(found.kl, without.kl)
