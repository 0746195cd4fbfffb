"""compact: exactly the kept rows remain, in place, with few moves."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentbench_kv.kernels import compact

DIM = 3


@pytest.fixture(autouse=True)
def _on_device(device):
    """Tensors lie where the backend computes."""
    with torch.device(device):
        yield


def make_cache(layers, heads, capacity):
    """Distinct rows: every value names its layer, head and row."""
    rows = torch.arange(layers * heads * capacity * DIM).reshape(layers, heads, capacity, DIM)
    positions = torch.stack(
        [torch.randperm(capacity * 2)[:capacity] for _ in range(layers * heads)]
    )
    return rows.float(), -rows.float() - 1, positions.reshape(layers, heads, capacity)


def make_kept(layers, heads, length, budget):
    kept = [torch.randperm(length)[:budget].sort().values for _ in range(layers * heads)]
    return torch.stack(kept).reshape(layers, heads, budget)


def rows_of(keys, values, positions, layer, head, indices):
    return [
        (
            int(positions[layer, head, i]),
            tuple(keys[layer, head, i].tolist()),
            tuple(values[layer, head, i].tolist()),
        )
        for i in indices
    ]


def check(layers, heads, cache, kept, length, sort=False):
    """Run compact on `cache` in place and compare with the rows before."""
    before = [tensor.clone() for tensor in cache]
    kept_before = kept.clone()
    budget = kept.shape[-1]
    moved = compact(*cache, kept, length, sort=sort)
    bound = 0
    for layer in range(layers):
        for head in range(heads):
            chosen = kept[layer, head].tolist()
            expected = rows_of(*before, layer, head, chosen)
            got = rows_of(*cache, layer, head, range(budget))
            assert (got if sort else sorted(got)) == (expected if sort else sorted(expected))
            bound += min(budget, length - budget)
    for old, new in zip(before, cache, strict=True):
        assert torch.equal(old[:, :, length:], new[:, :, length:])
    if not sort:
        assert moved <= bound
        assert moved == int((kept >= budget).sum())
    assert torch.equal(kept, kept_before)


@settings(max_examples=80, deadline=None)
@given(
    layers=st.integers(1, 3),
    heads=st.integers(1, 3),
    length=st.integers(1, 16),
    spare=st.integers(0, 4),
    data=st.data(),
    seed=st.integers(0, 10**6),
    sort=st.booleans(),
)
def test_compact_keeps_exactly_the_kept_rows(layers, heads, length, spare, data, seed, sort):
    budget = data.draw(st.integers(1, length))
    torch.manual_seed(seed)
    cache = make_cache(layers, heads, length + spare)
    check(layers, heads, cache, make_kept(layers, heads, length, budget), length, sort)


LONG = (1, 2, 7, 8, 9, 63, 64, 65, 128, 255, 256, 257)


@settings(max_examples=60, deadline=None)
@given(runs=st.lists(st.tuples(*[st.sampled_from(LONG)] * 2), min_size=1, max_size=8))
def test_compact_fills_holes_of_every_length_between_runs_of_every_length(runs):
    """Kept rows are read many at a time; a gap may lie anywhere and be of any size."""
    marks = [mark for kept, gone in runs for mark in [True] * kept + [False] * gone]
    for first in (True, False):
        chosen = torch.tensor(marks if first else marks[::-1])
        torch.manual_seed(0)
        check(1, 1, make_cache(1, 1, len(marks)), chosen.nonzero()[:, 0][None, None], len(marks))


@pytest.mark.parametrize("sort", [False, True])
def test_compact_moves_nothing_if_the_first_rows_are_kept(sort):
    cache = make_cache(2, 2, 8)
    before = [tensor.clone() for tensor in cache]
    kept = torch.arange(5).expand(2, 2, 5)
    assert compact(*cache, kept, 8, sort=sort) == 0
    assert all(torch.equal(a, b) for a, b in zip(before, cache, strict=True))


def test_compact_does_not_move_kept_rows_before_the_new_end():
    keys, values, positions = make_cache(1, 1, 6)
    stays = keys[0, 0, 2].clone()
    kept = torch.tensor([[[2, 4, 5]]])
    assert compact(keys, values, positions, kept, 6) == 2
    assert torch.equal(keys[0, 0, 2], stays)


@pytest.mark.parametrize("sort", [False, True])
def test_compact_works_on_rows_of_a_larger_buffer(sort):
    """A view of a longer buffer: rows behind the view stay."""
    torch.manual_seed(0)
    whole = make_cache(2, 3, 12)
    behind = [tensor[:, :, 9:].clone() for tensor in whole]
    cache = tuple(tensor[:, :, :9] for tensor in whole)
    check(2, 3, cache, make_kept(2, 3, 7, 4), 7, sort)
    assert all(torch.equal(t[:, :, 9:], b) for t, b in zip(whole, behind, strict=True))


@pytest.mark.parametrize("sort", [False, True])
def test_compact_works_on_some_layers_of_a_buffer(sort):
    torch.manual_seed(0)
    whole = make_cache(4, 3, 9)
    cache = tuple(tensor[1:3] for tensor in whole)
    check(2, 3, cache, make_kept(2, 3, 9, 4), 9, sort)


@pytest.mark.parametrize("sort", [False, True])
def test_compact_works_on_some_heads_of_a_buffer(sort):
    """Layer and head strides that cannot be merged."""
    torch.manual_seed(0)
    whole = make_cache(2, 5, 9)
    cache = tuple(tensor[:, 1:4] for tensor in whole)
    check(2, 3, cache, make_kept(2, 3, 9, 4), 9, sort)


@pytest.mark.parametrize("sort", [False, True])
def test_compact_works_on_a_transposed_layout(sort):
    """Stored as [kv_heads, layers, capacity, head_dim], seen as [layers, kv_heads, ...]."""
    torch.manual_seed(0)
    cache = tuple(t.transpose(0, 1) for t in make_cache(3, 2, 9))
    check(2, 3, cache, make_kept(2, 3, 9, 4), 9, sort)


def test_compact_takes_non_contiguous_kept_rows():
    torch.manual_seed(0)
    kept = make_kept(3, 2, 9, 4).transpose(0, 1)
    check(2, 3, make_cache(2, 3, 9), kept, 9)


def test_compact_repeated_events_keep_the_survivors():
    """What is left after five events is what a Python list would have left."""
    torch.manual_seed(1)
    keys, values, positions = make_cache(2, 2, 30)
    positions.copy_(torch.arange(30).expand(2, 2, 30))
    alive = [[set(range(30)) for _ in range(2)] for _ in range(2)]
    length = 30
    for budget in (25, 24, 15, 7, 1):
        kept = make_kept(2, 2, length, budget)
        for layer in range(2):
            for head in range(2):
                alive[layer][head] &= set(positions[layer, head][kept[layer, head]].tolist())
        compact(keys, values, positions, kept, length)
        length = budget
        got = [[set(positions[i, j, :length].tolist()) for j in range(2)] for i in range(2)]
        assert got == alive
        base = torch.arange(4).reshape(2, 2, 1) * 30 * DIM
        assert torch.equal(keys[:, :, :length, 0], (base + positions[:, :, :length] * DIM).float())


@pytest.mark.parametrize("sort", [False, True])
@pytest.mark.parametrize("width", [16, 32, 48])
def test_rows_of_whole_cache_lines(width, sort):
    """Such rows are written past the processor's cache."""
    keys, values = torch.randn(2, 1, 3, 90, width)
    positions = torch.stack([torch.randperm(200)[:90] for _ in range(3)])[None]
    kept = torch.stack([torch.randperm(90)[:50].sort().values for _ in range(3)])[None]
    caches = (keys, values, positions)
    expected = [[cache[0, head, kept[0, head]].clone() for cache in caches] for head in range(3)]
    compact(keys, values, positions, kept, 90, sort=sort)
    for head, wanted in enumerate(expected):
        found = [cache[0, head, :50] for cache in caches]
        if not sort:
            found, wanted = ([part[rows[2].argsort()] for part in rows] for rows in (found, wanted))
        assert all(torch.equal(got, right) for got, right in zip(found, wanted, strict=True))
