"""Rows by position, against a sort."""

from __future__ import annotations

import pytest
import torch

from agentbench_kv.kernels import ascending_rows, by_position


@pytest.mark.parametrize("spread", [1, 3, 15, 17, 1000], ids=lambda n: f"spread {n}")
@pytest.mark.parametrize("tokens", [1, 2, 50])
def test_rows_by_position(tokens, spread):
    shape = (3, 2)
    heads = [torch.randperm(spread * tokens)[:tokens] for _ in range(6)]
    positions = torch.stack(heads).reshape(*shape, tokens)
    ordered, order = by_position(positions)
    assert torch.equal(ordered, positions.sort(-1).values)
    assert torch.equal(positions.gather(-1, order), ordered)


def test_no_rows_have_no_order():
    ordered, order = by_position(torch.zeros(2, 3, 0, dtype=torch.int64))
    assert ordered.shape == order.shape == (2, 3, 0)


def test_rows_ascend():
    rows = torch.stack([torch.randperm(40)[:13] for _ in range(6)]).reshape(3, 2, 13)
    assert torch.equal(ascending_rows(rows, 40), rows.sort(-1).values)
