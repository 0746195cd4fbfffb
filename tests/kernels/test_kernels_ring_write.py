"""ring_write: rows land in their slots, everything else stays."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentbench_kv.kernels import ring_write


@settings(max_examples=40, deadline=None)
@given(
    heads=st.integers(1, 3),
    slots=st.integers(1, 9),
    data=st.data(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_ring_write_matches_a_loop(heads, slots, data, dtype):
    chosen = data.draw(st.lists(st.integers(0, slots - 1), unique=True))
    ring = torch.randn(slots, heads, 4).to(dtype)
    rows = torch.randn(len(chosen), heads, 4)
    expected = ring.clone()
    for row, slot in enumerate(chosen):
        expected[slot] = rows[row].to(dtype)
    ring_write(ring, rows, torch.tensor(chosen, dtype=torch.int64))
    assert torch.equal(ring, expected)


def test_ring_write_into_a_view_of_a_larger_buffer():
    whole = torch.zeros(2, 8, 3, 4)
    ring_write(whole[1][2:6], torch.ones(2, 3, 4), torch.tensor([3, 0]))
    expected = np.zeros((2, 8, 3, 4))
    expected[1][[5, 2]] = 1
    assert np.array_equal(whole.numpy(), expected)


@pytest.mark.parametrize("heads", [1, 4])
def test_ring_write_non_contiguous_rows(heads):
    ring = torch.zeros(5, heads, 2)
    rows = torch.randn(heads, 3, 2).transpose(0, 1)
    ring_write(ring, rows, torch.tensor([4, 1, 2]))
    assert torch.equal(ring[[4, 1, 2]], rows)
    assert not ring[[0, 3]].any()
