"""Caches of layers that see a window, their bytes, and the share of the KV in reach."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentbench_kv.accounting import LayerReach
from agentbench_kv.engines.core.ledger import SessionLedger, WindowBytes
from agentbench_kv.engines.core.rings import RowShape
from agentbench_kv.engines.embedded.slots import SMALLEST, CachePools
from agentbench_kv.engines.embedded.windows import WindowCache
from agentbench_kv.methods.full import Full

SHAPE = RowShape(2, 2, 1, 2, torch.float32, torch.device("cpu"))


def rows(first: int, n: int, layer: int) -> torch.Tensor:
    """Keys [1, n, 2] that name their position and layer."""
    return torch.stack([torch.arange(first, first + n), torch.full((n,), layer)], -1)[None].float()


@settings(deadline=None, max_examples=40)
@given(st.integers(2, 40), st.lists(st.integers(1, 90), min_size=1, max_size=12), st.data())
def test_a_window_shows_the_last_rows_whatever_the_chunks(
    window: int, chunks: list[int], data: st.DataObject
) -> None:
    cache, fed = WindowCache(CachePools(SHAPE), window), 0
    for n in chunks:
        cache.reserve(n)
        for _ in range(data.draw(st.integers(1, 2))):  # a forward may be tried again
            for layer in range(2):
                keys, values = cache.write(layer, rows(fed, n, layer), -rows(fed, n, layer))
                first = max(0, fed - window + 1)
                assert torch.equal(keys, rows(first, fed + n - first, layer))
                assert torch.equal(values, -keys)
        cache.advance(n)
        fed += n
        held = sorted(cache.keys[1, 0, : cache.held, 0].tolist())
        assert held == list(range(max(0, fed - window), fed))
        assert cache.next_row == fed % window
        assert cache.rows_with_next == min(fed + 1, window)
        assert cache.pool.capacity <= max(SMALLEST, 2 * window)


def test_bytes_are_counted_by_type_of_layer() -> None:
    ledger = SessionLedger(Full(), 10, WindowBytes(3, 4))
    ledger.begin_turn(3)
    ledger.forward(3)
    ledger.sampled()
    for _ in range(3):
        ledger.forward(1)
        ledger.sampled()
    # Steps see 4, 5 and 6 rows, of which windows hold 4.
    assert ledger.stats.bytes_read == 10 * (4 + 5 + 6) + 3 * (4 + 4 + 4)
    assert ledger.stats.window_bytes_read == 3 * 12
    assert ledger.fork()._windows == ledger._windows


def test_reach() -> None:
    reach = LayerReach(full=12, windowed=12, window=128)
    assert LayerReach.read(reach.document()) == reach
    assert LayerReach(24, 0, 0).document() == {}
    assert reach.share(128) == 0.5
    assert reach.share(128 * 99) == pytest.approx(0.99)
    assert "12 of 24 layers, 50% of the KV of a session of 100 tokens" in reach.sentence(100)
    for damaged in ({}, {"full_layers": "x", "window_layers": "1", "window": "2"}):
        assert LayerReach.read(damaged) is None
