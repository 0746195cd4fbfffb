"""Sums of attention stay with their rows when sessions change slots and pools change size."""

from __future__ import annotations

import torch

from agentbench_kv.engines.core.rings import RowShape
from agentbench_kv.engines.embedded.cache import SessionCache
from agentbench_kv.engines.embedded.slots import SMALLEST, CachePools

SHAPE = RowShape(
    layers=1,
    q_heads=1,
    kv_heads=1,
    head_dim=4,
    dtype=torch.float32,
    device=torch.device("cpu"),
    with_sums=True,
)


def filled(pools, first):
    """Return a session of three rows whose sums are first, first + 1, first + 2."""
    cache = SessionCache(pools)
    cache.reserve(3)
    rows = torch.ones(1, 3, 4)
    cache.write(0, rows, rows)
    cache.advance(0, 3)
    cache.sums[0, 0, :3] = torch.arange(first, first + 3.0)
    return cache


def test_sums_move_with_their_session_to_a_larger_slot():
    cache = filled(CachePools(SHAPE), 5.0)
    cache.reserve(2 * SMALLEST)
    assert cache.pool.capacity > SMALLEST
    assert cache.sums[0, 0, :3].tolist() == [5.0, 6.0, 7.0]


def test_sums_survive_a_pool_that_grows():
    pools = CachePools(SHAPE)
    sessions = [filled(pools, 10.0 * number) for number in range(5)]
    found = [cache.sums[0, 0, :3].tolist() for cache in sessions]
    assert found == [[n, n + 1, n + 2] for n in (0.0, 10.0, 20.0, 30.0, 40.0)]


def test_sums_of_evicted_rows_go_and_new_rows_start_at_zero():
    cache = filled(CachePools(SHAPE), 1.0)
    cache.keep(torch.tensor([[[0, 2]]]))
    assert cache.sums[0, 0, :2].tolist() == [1.0, 3.0]
    row = torch.ones(1, 1, 4)
    cache.write(0, row, row)
    assert cache.sums[0, 0, :3].tolist() == [1.0, 3.0, 0.0]
